"""A call as the client keeps it: what was sent, how to send it again, and the future that waits for it."""

from __future__ import annotations

import itertools
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any, TypeVar, cast

from skyward.api.brief import glance
from skyward.api.compute import PendingCompute
from skyward.api.ref import Ref
from skyward.client.callbacks import UserCode, UserFuture
from skyward.client.functions import remembers_nothing, streamed_parameters, unbound
from skyward.client.logs import Watch
from skyward.client.refs import Refs
from skyward.errors import PoolClosed, ResultNotSerializable
from skyward.transport import blobs
from skyward.transport.culprits import StaysHere
from skyward.transport.exceptions import PackedError
from skyward.transport.frames import nbytes
from skyward.transport.payload import Packed, Packer, unpack
from skyward.transport.refs import collected
from skyward.transport.streams import Consumer, Producer

__all__ = ["Call", "CallFuture", "Packing", "discard", "unpacked"]

log = logging.getLogger("skyward.engine")

T = TypeVar("T")

_PREFIX = os.urandom(2).hex()
_COUNT = itertools.count(1)
_LIGHT = 1 << 14
_STACK_GLOBAL = b"\x93"


class CallFuture(UserFuture[T]):
    """A real future whose result is unpickled when it is asked for, and whose cancel() stops the body."""

    def __init__(self, name: str, user: UserCode | None = None) -> None:
        super().__init__(user)
        self._name = name
        self._loading = threading.RLock()  # of one thread twice: a signal handler may ask for the same result
        self.sent = False
        self.unasked = False  # whether somebody has it who should hear of a failure, and nobody has asked so far
        self.owner: object = None
        """Kept alive as long as the future is: a pool is not closed under those who wait for its calls."""

    def settle(self, about: dict[str, Any], pieces: list[Any]) -> None:
        """Has the future hold a result that is not unpickled yet."""
        head = bytes(pieces[0]) if pieces else b""  # a copy: the frame that it came in need not be kept for it
        if not self.fulfil(_Packed(about, [head, *pieces[1:]])):
            discard(about)

    def fulfil(self, value: Any) -> bool:
        """Sets the result; False if the future was cancelled meanwhile."""
        try:
            self.set_result(value)
        except InvalidStateError:
            return False
        return True

    def fail(self, error: BaseException) -> bool:
        """Sets the exception; False if the future was cancelled meanwhile."""
        try:
            self.set_exception(error)
        except InvalidStateError:
            return False
        return True

    def _load(self) -> None:
        """Unpickles the result, once; a failure to do so becomes the future's exception."""
        with self._loading:
            packed: Any = self._result
            if not isinstance(packed, _Packed):
                return
            try:
                self._result = unpacked(self._name, packed.about, packed.pieces)
            except KeyboardInterrupt:
                raise  # the user's wish, not the result's fault: it can be asked for again
            except BaseException as exc:
                self._result, self._exception = None, exc

    def result(self, timeout: float | None = None) -> T:
        self.unasked = False
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self.unasked = False
        return super().exception(timeout)

    def add_done_callback(self, fn: Callable[[Future[T]], object]) -> None:
        self.unasked = False
        super().add_done_callback(fn)

    def __del__(self) -> None:
        held = self.__dict__
        packed, error = held.get("_result"), held.get("_exception")
        if isinstance(packed, _Packed):
            discard(packed.about)  # nobody ever asked for it
        # that a call ended with its pool is no news: whoever closed the pool, or the end of the program, did that
        if error is not None and held.get("unasked") and not isinstance(error, PoolClosed):
            what = str(error) if isinstance(error, PackedError) else f"{type(error).__name__}: {error}"
            text = f"{self._name} has failed, and nobody has asked for its result: {what}"
            act = partial(log.error, "%s", text)
            # The user's handlers run then. When the interpreter ends, no thread begins any more, and waiting for one
            # would never end.
            self.user.callbacks.submit(act) if self.user is not None and not sys.is_finalizing() else act()

    @property
    def is_light(self) -> bool:
        packed: Any = self._result
        if not isinstance(packed, _Packed) or packed.about.get("blobs") or self._exception is not None:
            return False
        # without a reference to a class or function, no code of anybody's runs
        plain = _STACK_GLOBAL not in packed.pieces[0] and sum(map(nbytes, packed.pieces)) < _LIGHT
        return plain and self._events_are_heard()

    def running(self) -> bool:
        return super().running() or (self.sent and not self.done())

    def __reduce__(self) -> Any:
        raise StaysHere(f"the future of {self._name} stays here; pass its result, `future.result()`.")


@dataclass(slots=True)
class _Packed:
    """A result as it came from a node."""

    about: dict[str, Any]
    pieces: list[Any]


class Call:
    """One call on its way."""

    __slots__ = (
        "about",
        "announced",
        "arguments",
        "asked",
        "attempt",
        "failure",
        "feeders",
        "future",
        "gang",
        "heard",
        "id",
        "inputs",
        "made",
        "name",
        "node",
        "pieces",
        "pinned",
        "rank",
        "retries",
        "sent",
        "spoke",
        "stall",
        "state",
        "stopping",
        "stream",
        "uploads",
    )

    def __init__(
        self,
        pending: PendingCompute[Any],
        about: dict[str, Any],
        pieces: list[Any],
        uploads: dict[str, blobs.Blob],
        inputs: dict[str, Any],
        retries: int,
        user: UserCode | None = None,
    ) -> None:
        self.id = f"{_PREFIX}{next(_COUNT):08x}"
        self.name = pending.name
        watched = user is not None and user.listeners.any()
        self.arguments = _glance(pending) if watched else ""
        self.about, self.pieces, self.uploads, self.inputs = about, pieces, uploads, inputs
        self.retries = 0 if inputs else retries  # an iterator that was read cannot be read again
        self.attempt = 0
        self.node: int | None = None
        self.rank: int | None = None  # which process runs it, once that is known
        self.pinned = False
        self.state = "waiting"
        self.sent = self.heard = self.spoke = 0.0
        self.stall: BaseException | None = None  # the error, if it is stopped since its broadcast gets nowhere
        self.made = time.monotonic()
        self.announced = self.asked = False
        self.stopping: str | None = None
        self.gang: Sequence[Call] = ()
        self.failure: tuple[BaseException, Any, float] | None = None
        self.stream: Consumer | None = None
        self.feeders: dict[str, Producer] = {}
        self.future: CallFuture[Any] = CallFuture(self.name, user)

    @property
    def movable(self) -> bool:
        """Whether another node may get it: not a rank of a broadcast, nor one that an iterator is being read for."""
        return not self.pinned and not self.inputs


class Packing:
    """Turns pending calls into bytes; a function that occurs many times at once is pickled once."""

    def __init__(self, packer: Packer, store: blobs.Store, shared: bool, user: UserCode | None = None) -> None:
        self._packer, self._store, self._user = packer, store, user
        self._shared = shared  # whether nodes read the store's files themselves
        self._logging = Watch()
        self._digests: weakref.WeakKeyDictionary[FunctionType, tuple[Packed, str]] = weakref.WeakKeyDictionary()

    def refs(self, forget: Callable[[Sequence[str]], None]) -> Refs:
        """What makes Refs to objects that these calls may use."""
        return Refs(self._packer, self._store, forget)

    def calls(self, pending: Sequence[PendingCompute[Any]], retries: int) -> list[Call]:
        """The calls, ready to be sent; raises NotSerializable before any of them is."""
        functions: dict[int, tuple[str, list[Any], dict[str, Ref[Any]]]] = {}
        made: list[Call] = []
        for item in pending:
            streams = streamed_parameters(item)
            fn, args, kwargs = unbound(item)
            known = functions.get(id(fn))
            if known is None:
                with collected(self._store) as refs:
                    known = functions[id(fn)] = (*self._function(fn, f"function {item.name}"), refs)
            shift = len(args) - len(item.args)
            positions = {index + shift for index in streams[0]}
            made.append(self._call(item, *known, args, kwargs, positions, streams[1], retries))
        return made

    def copies(self, pending: PendingCompute[Any], count: int, attempt: int) -> list[Call]:
        """The same call several times over the same bytes, for a broadcast."""
        first = self.calls([pending], 0)[0]
        if first.inputs and count > 1:
            self._store.release(first.uploads)
            name = next(iter(first.inputs))
            raise TypeError(
                f"argument {name} of {first.name} is an iterator: it can be read once, not by {count} ranks."
            )
        rest: list[Call] = []
        for _ in range(count - 1):
            self._store.retain(first.uploads)
            rest.append(Call(pending, dict(first.about), first.pieces, first.uploads, {}, 0, self._user))
        for call in (first, *rest):
            call.attempt = attempt
        return [first, *rest]

    def drop(self, calls: Sequence[Call]) -> None:
        """Lets go of what calls need that were packed and never sent."""
        for call in calls:
            self._store.release(call.uploads)

    def _function(self, fn: Callable[..., Any], name: str) -> tuple[str, list[Any]]:
        packed = self._packer.pack_function(fn, name)
        head, buffers = packed
        known = self._digests.get(fn) if isinstance(fn, FunctionType) else None
        if known is not None and known[0] is packed:
            return known[1], [head, *buffers]
        digest = _digest(packed) if remembers_nothing(fn) else ""
        if isinstance(fn, FunctionType):
            self._digests[fn] = packed, digest
        return digest, [head, *buffers]

    def _call(
        self,
        item: PendingCompute[Any],
        digest: str,
        function: list[Any],
        refs: dict[str, Ref[Any]],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        positions: set[int],
        names: set[str],
        retries: int,
    ) -> Call:
        inputs: dict[str, Any] = {}
        if positions or names:
            inputs = {str(i): args[i] for i in positions} | {k: kwargs[k] for k in names}
            args = tuple(None if i in positions else a for i, a in enumerate(args))
            kwargs = {k: None if k in names else v for k, v in kwargs.items()}
        with collected(self._store) as found:
            head, buffers = self._packer.pack((args, kwargs), f"arguments of {item.name}")
        pieces: list[Any] = [*function, head, *buffers]
        about: dict[str, Any] = {"name": item.name, "fn": digest, "split": len(function), "attempt": 0}
        if item.timeout is not None:
            about["timeout"] = item.timeout
        if inputs:
            about["streams"] = list(inputs)
        if (logging_now := self._logging.news()) is not None:
            about["log"] = logging_now
        uploads: dict[str, blobs.Blob] = {}
        for index, piece in enumerate(pieces):
            if nbytes(piece) >= blobs.LARGE:
                key, blob = self._store.put(piece)
                if key in uploads:
                    self._store.release([key])  # the same content twice in one call counts once
                uploads[key] = blob
                about.setdefault("blobs", {})[str(index)] = blob if self._shared else (key, blob[1])
                pieces[index] = b""
            elif isinstance(piece, memoryview):
                pieces[index] = bytes(
                    cast("memoryview[int]", piece)
                )  # the caller may change its array as soon as we return
        for key, ref in (refs | found).items():
            about.setdefault("refs", {})[key] = len(pieces), len(ref.blobs)
            self._store.retain({name for name, _ in ref.blobs if name not in uploads})
            for name, blob in ref.blobs:
                uploads[name] = blob
                about.setdefault("blobs", {})[str(len(pieces))] = blob if self._shared else (name, blob[1])
                pieces.append(b"")
        chosen = retries if item.retries is None else item.retries
        return Call(item, about, pieces, uploads, inputs, chosen, self._user)


def _glance(pending: PendingCompute[Any]) -> str:
    """The arguments in short; a function of ours that has others in its arguments says which."""
    return getattr(pending.fn, "glance", glance)(pending.args, pending.kwargs)


def _digest(packed: Packed) -> str:
    import xxhash

    made = xxhash.xxh3_128(packed[0])
    for buffer in packed[1]:
        made.update(buffer)
    return made.hexdigest()


def discard(about: dict[str, Any]) -> None:
    """Removes the blobs of a result that nobody waits for."""
    try:
        blobs.remove(path for path, _ in about.get("blobs", {}).values())
    except OSError as exc:
        log.debug("a result that nobody wants stays until the pool is closed: %s", exc)


def unpacked(name: str, about: dict[str, Any], pieces: list[Any]) -> Any:
    """The object that a node sent; its blobs are mapped and removed."""
    try:
        files = about.get("blobs", {})
        while files:
            index, blob = next(iter(files.items()))
            pieces[int(index)] = blobs.read(blob, unlink=True)
            del files[index]  # whoever is interrupted goes on with the others
    except Exception as exc:
        discard(about)
        raise ResultNotSerializable(
            f"the result of {name} has arrived but cannot be read here: {about.get('incomplete') or _described(exc)}. "
            "It may be that memory, open files or the room in the directory for temporary files have run out, or that "
            "the file was deleted. Make room and call it again, or return less."
        ) from exc
    try:
        return unpack(pieces[0], pieces[1:], keep_classes=True)
    except KeyboardInterrupt:
        raise
    except BaseException as exc:
        raise ResultNotSerializable(
            f"the result of {name} has arrived but cannot be rebuilt here: {_described(exc)}. "
            "If its class exists only on the node, install that package on this computer too, or return plain data."
        ) from exc


def _described(exc: BaseException) -> str:
    return f"{type(exc).__name__}: {exc}"
