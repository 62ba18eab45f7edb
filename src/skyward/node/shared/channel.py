"""How one process asks the server of shared collections: numbered questions, threads that wait for their answers.

The server watches the time-outs, and says at their end what was the matter. The asker watches them too, and waits a
little longer: the server may be silent. A thread that gives up withdraws its question, and what a late answer brings is
given back.

It shares its process with the user, so it uses nothing but the standard library and cloudpickle. The same class serves
runners and the client; how messages travel is passed in.
"""

from __future__ import annotations

import itertools
import os
import pickle
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from skyward.errors import (
    BarrierBroken,
    InvalidArgument,
    LockLost,
    PoolClosed,
    SharedError,
    SharedLost,
    SharedTimeout,
    SharedTooLarge,
)
from skyward.node.receiver import Message, Receiver
from skyward.node.shared.protocol import LARGEST, AskerToServer, ServerToAsker
from skyward.transport.frames import TooLarge, nbytes
from skyward.transport.payload import Packer, unpack

__all__ = ["LATE", "Channel", "Post", "no_answer", "pack_value", "refuse_child", "unpack_value"]


Post = Callable[[Message, list[Any]], None]

LATE = 3.0
"""How much later than a time-out its answer may come."""
_NAP = 3600.0  # a lock cannot be waited for as long as users may say
_OVERHEAD = 16  # bytes, for each value: many small ones are much to keep

_ERRORS: dict[str, type[Exception]] = {
    "argument": InvalidArgument,
    "closed": PoolClosed,
    "lock lost": LockLost,
    "lost": SharedLost,
    "timeout": SharedTimeout,
    "too large": SharedTooLarge,
}


class _Wait:
    """A thread that waits for an answer."""

    __slots__ = ("answer", "lock", "question", "thread")

    def __init__(self, question: tuple[str, str, str]) -> None:
        self.question = question  # kind, name, operation
        self.answer: tuple[str, Any, list[Any]] | None = None
        self.thread = threading.get_ident()
        self.lock = threading.Lock()
        self.lock.acquire()

    def go_on(self) -> None:
        """Has the thread look whether there is an answer."""
        try:
            self.lock.release()
        except RuntimeError:
            pass  # somebody else has just done so


class Channel:
    """Asks for one process; may be used from any thread.

    `post` sends a message to the server. `pack` and `unpack` turn values into bytes and back. `call` says for which
    call the current thread works, and `age` since how many seconds that runs. `opening` says who this process is; it is
    sent before the first question, and again to a server that does not know it any more.
    """

    def __init__(
        self,
        post: Post,
        pack: Callable[[object, str], bytes],
        unpack: Callable[[Any], Any],
        call: Callable[[], str | None] = lambda: None,
        age: Callable[[], float] = lambda: 0.0,
        opening: Callable[[], Message] | None = None,
    ) -> None:
        self._opening, self._opened = opening, opening is None
        self._post, self.pack, self.unpack, self.call, self.age = post, pack, unpack, call, age
        self._ids = itertools.count(1)
        self._waits: dict[int, _Wait] = {}
        self._lock = threading.Lock()  # over which questions are waited for
        self._left: dict[int, tuple[str, str, str]] = {}  # questions that nobody waits for any more
        self._epoch = ""
        self._pid = os.getpid()
        self._closed = ""
        self.held: dict[str, tuple[int, str | None]] = {}
        """The locks that this process holds: their tokens, and for which calls."""
        receiver = Receiver(ServerToAsker, self)
        self.hear, self.hear_all = receiver.hear, receiver.hear_all

    def ask(
        self,
        kind: str,
        name: str,
        operation: str,
        arguments: list[Any],
        values: list[Any] | None = None,
        timeout: float | None = None,
    ) -> tuple[Any, list[Any]]:
        """The server's answer: a result and values; raises what went wrong."""
        if os.getpid() != self._pid:
            refuse_child()
        values = values or []
        if values and (size := sum(map(nbytes, values)) + _OVERHEAD * len(values)) > LARGEST:
            raise _too_large(kind, name, f"{size:,} bytes")
        id, wait, sent = next(self._ids), _Wait((kind, name, operation)), False
        with self._lock:
            self._waits[id] = wait
        try:
            if self._closed:  # by now it is known who waits, and `close` answers all of them
                raise PoolClosed(self._closed)
            self._open()
            self._post(
                AskerToServer.ask(id, self._epoch, kind, name, operation, arguments, timeout, len(values)), values
            )
            sent = True
            code, result, found = self._wait(wait, timeout)
        except BaseException as exc:
            if sent or not isinstance(exc, PoolClosed | SharedError | TooLarge):
                self._leave(id, wait)
                raise
            with self._lock:
                self._waits.pop(id, None)
            if isinstance(exc, TooLarge):
                raise _too_large(kind, name, str(exc)) from None
            raise
        if code:
            _raise(code, result)
        return result, found

    def _wait(self, wait: _Wait, timeout: float | None) -> tuple[str, Any, list[Any]]:
        """Waits for an answer; `wake` has us look again, for an exception that waits for this thread."""
        end = None if timeout is None else time.monotonic() + timeout + LATE
        while wait.answer is None:
            if timeout is None or end is None:
                wait.lock.acquire()
            elif (left := end - time.monotonic()) > 0:
                wait.lock.acquire(timeout=min(left, _NAP))
            else:
                raise no_answer(timeout)
        return wait.answer

    def _open(self) -> None:
        if not self._opened and self._opening is not None:
            with self._lock:
                if not self._opened:
                    self._post(self._opening(), [])
                    self._opened = True

    def tell(self, kind: str, name: str, operation: str, arguments: list[Any], values: list[Any] | None = None) -> None:
        """Asks for something whose answer nobody wants."""
        id, values = next(self._ids), values or []
        self._left[id] = kind, name, operation
        self._tell(AskerToServer.ask(id, self._epoch, kind, name, operation, arguments, None, len(values)), values)

    def _tell(self, message: Message, values: list[Any]) -> None:
        try:
            self._post(message, values)
        except SharedError:
            self._left.pop(message[1], None)  # the server is gone, with all that this was about

    def wake(self, thread: int) -> None:
        """Has a thread that waits run a little, so that an exception is raised that was set for it."""
        for wait in list(self._waits.values()):
            if wait.thread == thread:
                wait.go_on()

    def end_call(self, call: str) -> None:
        """A call has ended: what it holds is released."""
        for name, (token, holder) in list(self.held.items()):
            if holder == call:
                del self.held[name]
                self.tell("lock", name, "release", [token])

    def fail(self, code: str, text: str) -> None:
        """No answers come any more to what was asked so far."""
        with self._lock:
            waits = list(self._waits.values())
            self._waits.clear()
            self._left.clear()
            self.held.clear()
        if waits:
            self._epoch = ""  # they are told; the next question is one of a beginner
        for wait in waits:
            wait.answer = code, text, []
            wait.go_on()

    def close(self, text: str) -> None:
        """The pool is closed: whoever waits is told, and nothing can be asked any more."""
        self._closed = text
        self.fail("closed", text)

    def _from_server_answer(self, id: int, epoch: str, code: str, result: Any, buffers: list[Any]) -> None:
        if not self._epoch or code == "lost":
            self._epoch = epoch
        if code == "lost":
            self._opened = self._opening is None
        with self._lock:
            wait = self._waits.pop(id, None)
            if wait is not None:
                wait.answer = code, result, buffers
        if wait is not None:
            wait.go_on()
        else:
            self._undo(self._left.pop(id, None), code, result, buffers)

    def _leave(self, id: int, wait: _Wait) -> None:
        """A thread waits no longer for its answer."""
        with self._lock:
            still = self._waits.pop(id, None) is not None
            if still:
                self._left[id] = wait.question
        if still:
            self._tell(AskerToServer.withdraw(id), [])
        elif wait.answer is not None:
            self._undo(wait.question, *wait.answer)

    def _undo(self, question: tuple[str, str, str] | None, code: str, result: Any, values: list[Any]) -> None:
        """Gives back what came for somebody who does not wait any more."""
        if code or question is None:
            return
        kind, name, operation = question
        if operation == "acquire":
            self.tell(kind, name, "release", [result])
        elif kind == "queue" and operation == "get":
            self.tell(kind, name, "unget", [], values)


def _too_large(kind: str, name: str, what: str) -> SharedTooLarge:
    return SharedTooLarge(
        f"what was to be put into {kind} '{name}' takes {what}; collections take up to {LARGEST:,} bytes at a time. "
        "Put less at a time. Pass large data as arguments and results of calls, and put a path or a key into the "
        "collection."
    )


def no_answer(timeout: float) -> SharedTimeout:
    """The error of a thread that has waited and got no answer at all."""
    return SharedTimeout(
        f"node 0, which keeps the shared collections of the pool, has not answered within {timeout:g} s: it is busy, "
        "or cannot be reached now. What a late answer brings is given back; whether something was put is not known."
    )


def _raise(code: str, result: Any) -> NoReturn:
    if code == "broken":
        raise BarrierBroken(*result)
    raise _ERRORS.get(code, SharedError)(result)


def refuse_child() -> NoReturn:
    """Raises in a process that was forked from the one that asks."""
    raise SharedError(
        "shared collections cannot be used here: this process was forked from the one that runs the body. Use them in "
        "the body itself, or in threads of it."
    )


_PLAIN = frozenset({int, float, str, bool, type(None)})
_BUFFERS = b"B"  # what a pickle does not begin with


def pack_value(packer: Packer, value: object, what: str) -> bytes:
    """Bytes for a value, called `what` in errors."""
    if type(value) in _PLAIN:
        return pickle.dumps(value, 5)
    head, buffers = packer.pack(value, what)
    if not buffers:
        return head
    return _BUFFERS + pickle.dumps((head, [bytearray(buffer) for buffer in buffers]), 5)


def unpack_value(data: Any, *, keep_classes: bool = False) -> Any:
    """The value again; arrays can be written to."""
    if data[:1] != _BUFFERS:
        return unpack(data, (), keep_classes=keep_classes)
    head, buffers = pickle.loads(memoryview(data)[1:])
    return unpack(head, buffers, keep_classes=keep_classes)
