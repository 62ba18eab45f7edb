"""What users hold of shared collections. Making a handle asks nothing; it can be sent to a node."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, ClassVar, Generic, TypeVar, cast, overload

from skyward.errors import InvalidArgument, LockLost
from skyward.node.shared.channel import Channel
from skyward.node.shared.protocol import COUNTER_END, joined_keys, read_key, split_keys, written_key

__all__ = [
    "Asker",
    "Collection",
    "GroupState",
    "Handle",
    "Refused",
    "Reply",
    "Request",
    "SharedBarrier",
    "SharedCounter",
    "SharedDict",
    "SharedEvent",
    "SharedLock",
    "SharedQueue",
    "SharedSet",
    "done",
    "seconds",
]


K = TypeVar("K")
V = TypeVar("V")
T = TypeVar("T")
D = TypeVar("D")

_LONGEST = 200
_NO_LIMIT = 1e15  # seconds: nobody waits that long
_NONE = object()


class Handle:
    kind: ClassVar[str]

    def __init__(self, name: str, channel: Callable[[], Channel]) -> None:
        if not isinstance(name, str) or not 0 < len(name) <= _LONGEST:
            raise InvalidArgument(
                f"{name!r} cannot name a {self.kind}: a name is a text of 1 to {_LONGEST} characters."
            )
        self.name = name
        self._channel = channel

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"

    def __reduce__(self) -> tuple[Any, ...]:
        from skyward.node.shared.names import attached

        return attached, (type(self), self.name, *self._options())

    def _options(self) -> tuple[Any, ...]:
        return ()

    def _ask(
        self, operation: str, arguments: list[Any], values: list[Any] | None = None, timeout: float | None = None
    ) -> tuple[Any, list[Any]]:
        return self._channel().ask(self.kind, self.name, operation, arguments, values, timeout)

    def _pack(self, value: object) -> bytes:
        return self._channel().pack(value, f"a value for {self.kind} '{self.name}'")


class SharedDict(Handle, Generic[K, V]):
    """A dict that all ranks and the client see. Every operation is atomic.

    Keys are strings, numbers, bytes, None, and tuples of these. What you read is a copy.
    """

    kind = "dict"

    def __getitem__(self, key: K) -> V:
        found, values = self._ask("get", [written_key(key)])
        if not found:
            raise KeyError(key)
        return self._channel().unpack(values[0])

    def __setitem__(self, key: K, value: V) -> None:
        self._ask("set", [written_key(key)], [self._pack(value)])

    def __delitem__(self, key: K) -> None:
        if not self._ask("pop", [written_key(key)])[0]:
            raise KeyError(key)

    def __contains__(self, key: object) -> bool:
        return self._ask("contains", [written_key(key)])[0]

    def __len__(self) -> int:
        return self._ask("len", [])[0]

    def __iter__(self) -> Iterator[K]:
        return iter(self.keys())

    @overload
    def get(self, key: K) -> V | None: ...
    @overload
    def get(self, key: K, default: D) -> V | D: ...
    def get(self, key: K, default: Any = None) -> Any:
        """The value of a key, or `default` where there is none."""
        found, values = self._ask("get", [written_key(key)])
        return self._channel().unpack(values[0]) if found else default

    @overload
    def pop(self, key: K) -> V: ...
    @overload
    def pop(self, key: K, default: D) -> V | D: ...
    def pop(self, key: K, default: Any = _NONE) -> Any:
        """Removes a key and returns its value, or `default`."""
        found, values = self._ask("pop", [written_key(key)])
        if found:
            return self._channel().unpack(values[0])
        if default is _NONE:
            raise KeyError(key)
        return default

    def setdefault(self, key: K, value: V) -> V:
        """Sets a missing key, and returns the value that is there then."""
        new, values = self._ask("setdefault", [written_key(key)], [self._pack(value)])
        return value if new else self._channel().unpack(values[0])

    def update(self, values: Mapping[K, V]) -> None:
        """Sets the keys of `values` at once."""
        keys = joined_keys(written_key(key) for key in values)
        self._ask("update", [], [keys, *(self._pack(value) for value in values.values())])

    def compare_and_set(self, key: K, expected: V, value: V) -> bool:
        """Sets a key if its value equals `expected` (==, in this process); False if it does not."""
        text, packed = written_key(key), self._pack(value)
        while True:
            number, values = self._ask("get", [text])
            if not number or self._channel().unpack(values[0]) != expected:
                return False
            if self._ask("swap", [text, number], [packed])[0]:
                return True

    def change(self, key: K, change: Callable[[V], V], default: V) -> V:
        """Sets a key to `change(value)`, atomically, and returns that. `change` may run again if another process was
        faster; without a value it gets `default`.
        """
        text = written_key(key)
        while True:
            number, values = self._ask("get", [text])
            new = change(self._channel().unpack(values[0]) if number else default)
            if self._ask("swap", [text, number], [self._pack(new)])[0]:
                return new

    def keys(self) -> list[K]:
        """All keys at one moment, in the order in which they came."""
        return [read_key(text) for text in split_keys(self._ask("keys", [])[1][0])]

    def values(self) -> list[V]:
        """All values at one moment."""
        unpack = self._channel().unpack
        return [unpack(value) for value in self._ask("items", [])[1][1:]]

    def items(self) -> list[tuple[K, V]]:
        """All keys and values at one moment."""
        texts, *values = self._ask("items", [])[1]
        unpack = self._channel().unpack
        return [(read_key(text), unpack(value)) for text, value in zip(split_keys(texts), values, strict=True)]

    def clear(self) -> None:
        """Removes everything."""
        self._ask("clear", [])


class SharedSet(Handle, Generic[T]):
    """A set that all ranks and the client see. Every operation is atomic. Members are plain values, like keys."""

    kind = "set"

    def add(self, member: T) -> bool:
        """Adds a member; True if it was new."""
        return self.update([member]) > 0

    def update(self, members: Iterable[T]) -> int:
        """Adds several members at once; returns how many were new."""
        return self._ask("add", [], [joined_keys(written_key(member) for member in members)])[0]

    def discard(self, member: T) -> bool:
        """Removes a member; False if it was not there."""
        return self._ask("discard", [written_key(member)])[0]

    def remove(self, member: T) -> None:
        """Removes a member; raises KeyError if it was not there."""
        if not self.discard(member):
            raise KeyError(member)

    def pop(self) -> T:
        """Removes the member that came first and returns it; raises KeyError if there is none."""
        found = self._ask("pop", [])[0]
        if not found:
            raise KeyError(f"pop from an empty set: {self!r}")
        return read_key(found[0])

    def members(self) -> set[T]:
        """All members at one moment."""
        return set(self)

    def __contains__(self, member: object) -> bool:
        return self._ask("contains", [written_key(member)])[0]

    def __iter__(self) -> Iterator[T]:
        return iter([cast("T", read_key(text)) for text in split_keys(self._ask("keys", [])[1][0])])

    def __len__(self) -> int:
        return self._ask("len", [])[0]

    def clear(self) -> None:
        """Removes everything."""
        self._ask("clear", [])


class SharedCounter(Handle):
    """A whole number of up to 64 bits that all ranks and the client see; it begins with 0."""

    kind = "counter"

    def add(self, number: int = 1) -> int:
        """Adds a `number` (1) and returns the new value."""
        return self._ask("add", [_whole(number)])[0]

    def set(self, value: int) -> int:
        """Sets the counter and returns the value that it had."""
        return self._ask("set", [_whole(value)])[0]

    @property
    def value(self) -> int:
        """The value at this moment."""
        return self._ask("add", [0])[0]


class SharedQueue(Handle, Generic[T]):
    """A queue that all ranks and the client use: first in, first out, each item to one of them."""

    kind = "queue"

    def __init__(self, name: str, channel: Callable[[], Channel], maxsize: int | None = None) -> None:
        super().__init__(name, channel)
        if maxsize is not None and (isinstance(maxsize, bool) or not isinstance(maxsize, int) or maxsize < 0):
            raise InvalidArgument(
                f"maxsize={maxsize!r}: a whole number of items, or 0 for as many as there is room for."
            )
        self._maxsize = maxsize

    def put(self, item: T, timeout: float | None = None) -> None:
        """Adds an item at the end; waits while the queue is full, at most `timeout` seconds (None: without a limit)."""
        self._ask("put", [self._maxsize], [self._pack(item)], checked_timeout(timeout))

    def get(self, timeout: float | None = None) -> T:
        """Removes the first item and returns it; waits for one, at most `timeout` seconds (None: without a limit).

        Raises `sky.errors.SharedTimeout`, which is a TimeoutError. With `timeout=0` it does not wait.
        """
        return self._channel().unpack(self._ask("get", [self._maxsize], None, checked_timeout(timeout))[1][0])

    def __len__(self) -> int:
        return self._ask("len", [])[0]

    def __bool__(self) -> bool:
        return True  # not a question to the server: an empty queue is a queue

    def clear(self) -> int:
        """Removes all items; returns how many there were."""
        return self._ask("clear", [])[0]

    def _options(self) -> tuple[Any, ...]:
        return (self._maxsize,)


def checked_timeout(seconds: float | None) -> float | None:
    if seconds is None:
        return None
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds >= 0:
        raise InvalidArgument(f"timeout={seconds!r}: a number of seconds, 0 for not waiting, or None for no limit.")
    return float(seconds) if seconds < _NO_LIMIT else None


def _whole(number: Any) -> int:
    try:
        whole = int(number.__index__())
    except AttributeError:
        raise InvalidArgument(f"{number!r} cannot be added to a counter, which takes whole numbers.") from None
    if not -COUNTER_END <= whole < COUNTER_END:
        raise InvalidArgument(f"a number of {whole.bit_length()} bits is too large for a counter, which has 64.")
    return whole


# What all kinds of shared collections have in common: questions, replies, and questions that wait.
#
# No clock, socket or thread here. An `operation` is told who asks, and returns replies. An asker that is not among the
# replies waits. Keys are texts, values are bytes; nothing is unpickled.


@dataclass(eq=False, slots=True)
class Asker:
    name: str
    label: str = "a process"
    rank: int | None = None


@dataclass(eq=False, slots=True)
class Request:
    asker: Asker
    id: int
    arguments: list[Any]
    values: list[bytes]
    since: float
    timeout: float | None = None


@dataclass
class GroupState:
    ranks: int = 1
    losses: dict[int, tuple[float, str]] = field(default_factory=dict[int, tuple[float, str]])


Reply = tuple[Request, str, Any, list[bytes]]


class Refused(Exception):
    def __init__(self, code: str, text: str) -> None:
        super().__init__(code, text)
        self.code, self.text = code, text


Operation = Callable[[Any, Request], list[Reply]]
F = TypeVar("F", bound=Operation)


def operation(name: str) -> Callable[[F], F]:
    """Marks the method of a collection that does what is asked for by this name."""

    def marked(method: F) -> F:
        _OPERATIONS[method] = name
        return method

    return marked


_OPERATIONS: dict[Operation, str] = {}


def done(request: Request, result: Any = None, values: list[bytes] | None = None) -> Reply:
    return request, "", result, values or []


def seconds(value: float) -> str:
    return f"{value:.3g} s" if value < 100 else f"{value:.0f} s"


class Collection:
    kind: ClassVar[str]
    operations: ClassVar[dict[str, Operation]]
    lasting: ClassVar[bool] = True
    """Whether it is kept when nobody waits there."""

    def __init_subclass__(cls) -> None:
        cls.operations = {
            _OPERATIONS[each]: each
            for each in vars(cls).values()
            if isinstance(each, FunctionType) and each in _OPERATIONS
        }

    def __init__(self, name: str, group: GroupState) -> None:
        self.name, self.group = name, group
        self.size = 0
        self.waiting: deque[Request] = deque()

    def __str__(self) -> str:
        return f"{self.kind} '{self.name}'"

    def late(self, request: Request) -> tuple[str | list[int], list[Reply]]:
        """A question's time is over: why it has waited, and answers for others."""
        raise NotImplementedError

    def leave(self, request: Request, why: str) -> list[Reply]:
        """Takes a waiting question away; returns answers for others."""
        self.waiting.remove(request)
        return []

    def gone(self, asker: Asker, now: float) -> list[Reply]:
        """A process has ended; its questions were taken away before."""
        return []

    def lost(self, rank: int, why: str) -> list[Reply]:
        return []


class SharedLock(Handle):
    """A lock that one call of the whole pool, or the client, holds at a time: `with sky.lock("x"): ...`

    Not reentrant: acquiring it twice waits for itself. Whoever waits first gets it first. A holder that ends releases
    it: a call that returns, a process or node that is lost. `timeout` is how many seconds `with` waits at most
    (default: without a limit); `acquire` has its own.
    """

    kind = "lock"

    def __init__(self, name: str, channel: Callable[[], Channel], timeout: float | None = None) -> None:
        super().__init__(name, channel)
        self._timeout = checked_timeout(timeout)

    def acquire(self, timeout: float | None = None) -> int:
        """Waits for the lock, at most `timeout` seconds (None: without a limit), and returns its fencing token.

        Tokens grow: a store that refuses smaller ones than it has seen is safe from a holder that was given up for lost
        and continues. Raises `sky.errors.SharedTimeout`, which names the holder.
        """
        channel = self._channel()
        token = self._ask("acquire", [], None, checked_timeout(timeout))[0]
        channel.held[self.name] = token, channel.call()
        return token

    def release(self) -> None:
        """Releases the lock; raises LockLost if this process does not hold it (any more)."""
        held = self._channel().held.pop(self.name, None)
        if held is None:
            raise LockLost(f"lock '{self.name}' is not held by this process: acquire it first.")
        self._ask("release", [held[0]])

    def holder(self) -> str | None:
        """Who holds it now ("rank 2", "the client"), if somebody does."""
        found = self._ask("state", [])[0]
        return found and found[0]

    def locked(self) -> bool:
        """Whether somebody holds it now."""
        return self.holder() is not None

    def __enter__(self) -> int:
        return self.acquire(self._timeout)

    def __exit__(self, *exc: object) -> None:
        self.release()

    def _options(self) -> tuple[Any, ...]:
        return (self._timeout,)


class SharedBarrier(Handle):
    """Where ranks wait for each other, again and again: `sky.barrier("epoch").wait()`.

    It waits for all ranks of the pool, or for `parties` of any. If a rank is lost while others wait for it, or one
    gives up waiting, it raises `sky.errors.BarrierBroken` in all of them, which names the rank.
    """

    kind = "barrier"

    def __init__(self, name: str, channel: Callable[[], Channel], parties: int | None = None) -> None:
        super().__init__(name, channel)
        if parties is not None and (isinstance(parties, bool) or not isinstance(parties, int) or parties < 1):
            raise InvalidArgument(f"parties={parties!r}: a whole number, or None for all ranks of the pool.")
        self._parties = parties

    def wait(self, timeout: float | None = None) -> int:
        """Waits until all have come, at most `timeout` seconds (None: without a limit); returns how many came before.

        Raises `sky.errors.SharedTimeout`, which names the missing ones; the others then get `sky.errors.BarrierBroken`.
        """
        age = self._channel().age()
        return self._ask("wait", [self._parties, age], None, checked_timeout(timeout))[0]

    @property
    def waiting(self) -> int:
        """How many wait now."""
        return self._ask("waiting", [])[0]

    def _options(self) -> tuple[Any, ...]:
        return (self._parties,)


class SharedEvent(Handle):
    """A flag that somebody sets and others wait for."""

    kind = "event"

    def set(self) -> None:
        """Sets it: everyone who waits continues, and later ones do not wait."""
        self._ask("set", [])

    def clear(self) -> None:
        """Clears it: from now on `wait` waits."""
        self._ask("clear", [])

    def is_set(self) -> bool:
        """Whether it is set now."""
        return self._ask("is_set", [])[0]

    def wait(self, timeout: float | None = None) -> None:
        """Waits until it is set, at most `timeout` seconds (None: without a limit)."""
        self._ask("wait", [], None, checked_timeout(timeout))
