"""A call as the client keeps it: what was sent, and the future that waits for it."""

from __future__ import annotations

import _thread
import itertools
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from skyward.api.brief import glance
from skyward.api.compute import PendingCompute
from skyward.api.ref import Ref
from skyward.api.secret import hide
from skyward.api.usage_errors import hide_frames
from skyward.client.futures import UserFuture
from skyward.errors import FilesLost, PoolClosed, ResultNotSerializable
from skyward.node.protocol import Blobs, Header, Returned
from skyward.transport import blobs
from skyward.transport.exceptions import PackedError, as_text
from skyward.transport.frames import nbytes
from skyward.transport.payload import unpack
from skyward.transport.pickle_errors import StaysHere
from skyward.transport.streams import Consumer, Producer
from skyward.transport.threads import run_in_thread

if TYPE_CHECKING:
    from skyward.client.futures import UserCode
    from skyward.client.kept import KeptResult

__all__ = ["Call", "CallFuture", "Packed", "discard", "is_light", "new_id", "unpacked"]

log = logging.getLogger("skyward.engine")

T = TypeVar("T")

_PREFIX = os.urandom(3).hex()
_COUNT = itertools.count(1)
_NONE: frozenset[str] = frozenset()
_LIGHT = 1 << 14
_SLOW_TO_REMOVE = 64 << 20  # bytes: giving back the memory of a file takes 0.2 ms per MiB
_STACK_GLOBAL = b"\x93"


class CallFuture(UserFuture[T]):
    """Unpickles its result when asked for it; cancel() stops the body."""

    def __init__(self, name: str, user: UserCode | None = None) -> None:
        super().__init__(user)
        self._name = name
        self._loading = _thread.RLock()  # of one thread twice: a signal handler may ask for the same result
        self.sent = False
        self.unasked = False  # whether somebody has it who should hear of a failure, and nobody has asked so far
        self.call = ""
        self.on_load: Callable[[Any], None] | None = None
        """Gets the unpickled result first."""
        self.owner: object = None
        """A pool is not closed while someone waits for its calls."""

    def settle(self, result: Returned) -> None:
        pieces = result.buffers
        head = bytes(pieces[0]) if pieces else b""  # a copy: the frame that it came in need not be kept for it
        if not self.fulfil(Packed(result.blobs, [head, *pieces[1:]], result.incomplete)):
            discard(result.blobs)

    def settle_files(self, files: Sequence[blobs.Blob], ours: bool) -> None:
        try:
            named = [(path if ours else blobs.duplicate(path), size) for path, size in files]
        except OSError as exc:
            self.fail(FilesLost("a kept result", str(exc.filename)) if isinstance(exc, FileNotFoundError) else exc)
            return
        packed = Packed({str(index): file for index, file in enumerate(named)}, [b""] * len(named))
        if not self.fulfil(packed):
            discard(packed.blobs)

    def fulfil(self, value: Any) -> bool:
        try:
            self.set_result(value)
        except InvalidStateError:
            return False
        return True

    def fail(self, error: BaseException) -> bool:
        try:
            self.set_exception(error)
        except InvalidStateError:
            return False
        return True

    def _load(self) -> None:
        with self._loading:
            packed: Any = self._result
            if not isinstance(packed, Packed):
                return
            try:
                self._result = unpacked(self._name, packed)
                if (on_load := self.on_load) is not None:
                    self.on_load = None
                    on_load(self._result)
            except KeyboardInterrupt:
                raise  # the user's wish, not the result's fault: it can be asked for again
            except BaseException as exc:
                self._result, self._exception = None, exc

    def result(self, timeout: float | None = None) -> T:
        self.unasked = False
        try:
            return super().result(timeout)
        except Exception as exc:
            __tracebackhide__ = True
            hide_frames(exc)
            raise

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self.unasked = False
        return super().exception(timeout)

    def add_done_callback(self, fn: Callable[[Future[T]], object]) -> None:
        self.unasked = False
        super().add_done_callback(fn)

    def __del__(self) -> None:
        held = self.__dict__
        packed, error = held.get("_result"), held.get("_exception")
        if isinstance(packed, Packed) and packed.owner == os.getpid():
            discard(packed.blobs)  # nobody ever asked for it
        # that a call ended with its pool is no news: whoever closed the pool, or the end of the program, did that
        if error is not None and held.get("unasked") and not isinstance(error, PoolClosed):
            what = str(error) if isinstance(error, PackedError) else as_text(error)
            text = f"{self._name} failed, and its result was never retrieved: {what}"
            act = partial(log.error, "%s", text)
            # The user's handlers run then. When the interpreter ends, no thread begins any more, and waiting for one
            # would never end.
            self.user.callbacks.submit(act) if self.user is not None and not sys.is_finalizing() else act()

    @property
    def is_light(self) -> bool:
        packed: Any = self._result
        if not isinstance(packed, Packed) or self._exception is not None:
            return False
        return is_light(packed) and self._events_are_heard()

    def running(self) -> bool:
        return super().running() or (self.sent and not self.done())

    def __reduce__(self) -> Any:
        raise StaysHere(f"the future of {self._name} stays here; pass its result, `future.result()`.")


@dataclass(slots=True)
class Packed:
    blobs: Blobs
    pieces: list[Any]
    incomplete: str | None = None
    owner: int = field(default_factory=os.getpid)


def new_id() -> str:
    return f"{_PREFIX}{next(_COUNT):06x}"


class Call:
    __slots__ = (
        "announced",
        "arguments",
        "asked",
        "attempt",
        "cause",
        "chunk",
        "failure",
        "feeders",
        "future",
        "gang",
        "given",
        "header",
        "heard",
        "holds",
        "id",
        "inner",
        "inputs",
        "keeps",
        "lacks",
        "made",
        "name",
        "needs",
        "node",
        "pieces",
        "pinned",
        "prefers",
        "rank",
        "ref",
        "retries",
        "sent",
        "spoke",
        "stall",
        "state",
        "stopping",
        "stream",
        "until",
        "uploads",
        "yields",
    )

    def __init__(
        self,
        pending: PendingCompute[Any] | Call,
        header: Header,
        pieces: list[Any],
        uploads: dict[str, blobs.Blob],
        inputs: dict[str, Any],
        retries: int,
        user: UserCode | None = None,
    ) -> None:
        self.id = new_id()
        self.name = name = pending.name
        self.chunk = pending.chunk
        watched = user is not None and user.listeners.any()
        self.arguments = hide(_glance(pending)) if watched and isinstance(pending, PendingCompute) else ""
        self.header, self.pieces, self.uploads, self.inputs = header, pieces, uploads, inputs
        self.retries = 0 if inputs else retries  # an iterator that was read cannot be read again
        self.attempt = 0
        self.node: int | None = None
        self.rank: int | None = None  # which process runs it, once that is known
        self.pinned = False
        self.state = "waiting"
        self.sent = self.heard = self.spoke = 0.0
        self.stall: BaseException | None = None  # the error, if it is stopped since its broadcast gets nowhere
        self.made = time.monotonic()  # or when its earlier attempt was lost
        self.announced = self.asked = False
        self.stopping: str | None = None
        self.gang: Sequence[Call] = ()
        self.cause: BaseException | None = None  # the error of the rank because of which it is stopped
        self.failure: tuple[BaseException, Any, float] | None = None
        self.stream: Consumer | None = None
        self.yields = False  # whether it is known to give a stream, before its body begins
        self.feeders: dict[str, Producer] = {}
        self.needs: Sequence[KeptResult] = ()  # results of other calls that it takes
        self.given: Sequence[list[blobs.Blob]] = ()  # what they were when it was sent
        self.lacks: set[str] | frozenset[str] = _NONE  # those that are still being made
        self.keeps: KeptResult | None = None  # its own result, if that stays on its node
        self.ref: Ref[Any] | None = None  # what the user gets of it
        self.holds: Sequence[Ref[Any]] = ()  # objects that it takes, which must not go while it is open
        self.inner: Sequence[Call] = ()  # calls among its arguments, to be sent with it
        self.prefers: int | None = None
        self.until = 0.0
        self.future: CallFuture[Any] = CallFuture(name, user)
        self.future.call = self.id

    @property
    def items(self) -> int:
        return self.chunk.items if self.chunk is not None else 1

    @property
    def movable(self) -> bool:
        return not self.pinned and not self.inputs

    def sending(self, began: float) -> tuple[str, float]:
        return self.gang[0].id if self.gang else "", max(0.0, began - self.made)

    def again(self) -> Call:
        made = type(self)(self, self.header.copy(), self.pieces, self.uploads, {}, self.retries)
        made.attempt, made.needs, made.keeps = self.attempt + 1, self.needs, self.keeps
        made.arguments = self.arguments
        return made


def _glance(pending: PendingCompute[Any]) -> str:
    chunk = pending.chunk
    if not pending.args and not pending.kwargs:
        return ""
    if chunk is None or chunk.first is None:
        return glance(pending.args, pending.kwargs)
    if chunk.items == 1:
        return glance(tuple(pending.args[0]), {})
    return f"items {chunk.first} to {chunk.first + chunk.items - 1}"


def discard(named: Blobs) -> None:
    """Large files in a thread: the I/O thread may call."""
    files = list(named.values())
    act = partial(_remove, [path for path, _ in files])
    run_in_thread(act) if sum(size for _, size in files) >= _SLOW_TO_REMOVE else act()


def _remove(paths: Sequence[str]) -> None:
    try:
        blobs.remove(paths)
    except OSError as exc:
        log.debug("an unwanted result stays until the pool is closed: %s", exc)


def unpacked(name: str, packed: Packed) -> Any:
    files, pieces, unlink = packed.blobs, packed.pieces, packed.owner == os.getpid()
    try:
        while files:
            index, blob = next(iter(files.items()))
            pieces[int(index)] = blobs.read(blob, unlink=unlink)
            del files[index]  # whoever is interrupted goes on with the others
    except Exception as exc:
        if unlink:
            discard(files)
        raise ResultNotSerializable(
            f"the result of {name} has arrived but cannot be read here: {packed.incomplete or _described(exc)}. "
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


def is_light(packed: Packed) -> bool:
    """Whether unpickling runs no code, and needs no thread."""
    if packed.blobs or sum(map(nbytes, packed.pieces)) >= _LIGHT:
        return False
    return _STACK_GLOBAL not in bytes(packed.pieces[0])


def _described(exc: BaseException) -> str:
    return f"{type(exc).__name__}: {exc}"
