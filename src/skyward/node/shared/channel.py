"""How one process asks the server of shared collections: numbered questions, threads that wait for their answers.

It shares its process with the user, so it uses nothing but the standard library and cloudpickle. The same class serves
runners and the client; how messages travel is passed in.
"""

from __future__ import annotations

import itertools
import os
import threading
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
from skyward.transport.frames import nbytes

__all__ = ["Channel", "Post", "refuse_child"]

Post = Callable[[Message, list[Any]], None]

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
        if self._closed:
            raise PoolClosed(self._closed)
        values = values or []
        if values and (size := sum(map(nbytes, values))) > LARGEST:
            raise SharedTooLarge(
                f"what was to be put into {kind} '{name}' takes {size:,} bytes; collections take up to {LARGEST:,} at "
                "a time. Pass large data as arguments and results of calls, or put a path or a key into the collection."
            )
        id, wait = next(self._ids), _Wait((kind, name, operation))
        self._waits[id] = wait
        try:
            self._open()
            self._post(
                AskerToServer.ask(id, self._epoch, kind, name, operation, arguments, timeout, len(values)), values
            )
            while wait.answer is None:  # `wake` has us come by here, for an exception that waits for this thread
                wait.lock.acquire()
        except BaseException:
            self._leave(id, wait)
            raise
        code, result, found = wait.answer
        if code:
            _raise(code, result)
        return result, found

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
        self._post(AskerToServer.ask(id, self._epoch, kind, name, operation, arguments, None, len(values)), values)

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
            self._post(AskerToServer.withdraw(id), [])
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
