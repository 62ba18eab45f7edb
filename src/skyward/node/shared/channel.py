"""How a process queries the server of shared collections: numbered requests, threads that wait for replies.

The server enforces timeouts; the asking side waits slightly longer. A late reply to a withdrawn request is undone.
Standard library and cloudpickle only.
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
from skyward.node.shared.protocol import LARGEST, AskerToServer, ServerToAsker
from skyward.transport.codec import Raw, Receiver, handles
from skyward.transport.frames import TooLarge, nbytes
from skyward.transport.payload import Packer, unpack

__all__ = ["LATE", "Channel", "Post", "no_answer", "pack_value", "refuse_child", "unpack_value"]


Post = Callable[[Raw, list[Any]], None]

LATE = 3.0
"""Seconds after a timeout within which its reply may come."""
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
    __slots__ = ("answer", "lock", "question", "thread")

    def __init__(self, question: tuple[str, str, str]) -> None:
        self.question = question  # kind, name, operation
        self.answer: tuple[str, Any, list[Any]] | None = None
        self.thread = threading.get_ident()
        self.lock = threading.Lock()
        self.lock.acquire()

    def go_on(self) -> None:
        try:
            self.lock.release()
        except RuntimeError:
            pass  # somebody else has just done so


class Channel:
    """Thread-safe, one per process. `call` names the current thread's call, `age` its seconds. `opening` identifies
    this process to a server.
    """

    def __init__(
        self,
        post: Post,
        pack: Callable[[object, str], bytes],
        unpack: Callable[[Any], Any],
        call: Callable[[], str | None] = lambda: None,
        age: Callable[[], float] = lambda: 0.0,
        opening: Callable[[], Raw] | None = None,
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
        receiver = Receiver(ServerToAsker, self)
        self.receive, self.receive_all = receiver.receive, receiver.receive_all

    def ask(
        self,
        kind: str,
        name: str,
        operation: str,
        arguments: list[Any],
        values: list[Any] | None = None,
        timeout: float | None = None,
    ) -> tuple[Any, list[Any]]:
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
            asked = AskerToServer.Ask(id, self._epoch, kind, name, operation, arguments, timeout, values)
            self._post(asked.encoded()[0], values)
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
        """`wake` interrupts it, so that a pending exception can be raised."""
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
        """Does not wait for the reply."""
        id, values = next(self._ids), values or []
        self._left[id] = kind, name, operation
        asked = AskerToServer.Ask(id, self._epoch, kind, name, operation, arguments, None, values)
        self._tell(asked.encoded()[0], values)

    def _tell(self, message: Raw, values: list[Any]) -> None:
        try:
            self._post(message, values)
        except SharedError:
            self._left.pop(message[1], None)  # the server is gone, with all that this was about

    def wake(self, thread: int) -> None:
        """Lets a waiting thread run, so that an exception set for it is raised."""
        for wait in list(self._waits.values()):
            if wait.thread == thread:
                wait.go_on()

    def end_call(self, call: str) -> None:
        for name, (token, holder) in list(self.held.items()):
            if holder == call:
                del self.held[name]
                self.tell("lock", name, "release", [token])

    def fail(self, code: str, text: str) -> None:
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
        self._closed = text
        self.fail("closed", text)

    @handles(ServerToAsker.Answer)
    def _answered(self, answer: ServerToAsker.Answer) -> None:
        id, epoch, code, result, buffers = answer.id, answer.epoch, answer.code, answer.result, list(answer.buffers)
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
        with self._lock:
            still = self._waits.pop(id, None) is not None
            if still:
                self._left[id] = wait.question
        if still:
            self._tell(AskerToServer.Withdraw(id).encoded()[0], [])
        elif wait.answer is not None:
            self._undo(wait.question, *wait.answer)

    def _undo(self, question: tuple[str, str, str] | None, code: str, result: Any, values: list[Any]) -> None:
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
    return SharedTimeout(
        f"node 0, which keeps the shared collections of the pool, has not answered within {timeout:g} s: it is busy, "
        "or cannot be reached now. An item that comes late is put back; whether yours was put is not known."
    )


def _raise(code: str, result: Any) -> NoReturn:
    if code == "broken":
        raise BarrierBroken(*result)
    raise _ERRORS.get(code, SharedError)(result)


def refuse_child() -> NoReturn:
    raise SharedError(
        "shared collections cannot be used here: this process was forked from the one that runs the body. Use them in "
        "the body itself, or in threads of it."
    )


_PLAIN = frozenset({int, float, str, bool, type(None)})
_BUFFERS = b"B"  # what a pickle does not begin with


def pack_value(packer: Packer, value: object, what: str) -> bytes:
    if type(value) in _PLAIN:
        return pickle.dumps(value, 5)
    head, buffers = packer.pack(value, what)
    if not buffers:
        return head
    return _BUFFERS + pickle.dumps((head, [bytearray(buffer) for buffer in buffers]), 5)


def unpack_value(data: Any, *, keep_classes: bool = False) -> Any:
    """Arrays are writable."""
    if data[:1] != _BUFFERS:
        return unpack(data, (), keep_classes=keep_classes)
    head, buffers = pickle.loads(memoryview(data)[1:])
    return unpack(head, buffers, keep_classes=keep_classes)
