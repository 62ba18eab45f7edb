"""The process in which user code runs: enters the plugins' hooks once, then executes calls.

    agent --socket--> main thread, or a helper during bodies (see reading.py) --> queue --> body
    agent <--socket------------------------------ result, exception, stream items
    agent <--pipes------------------------------- file descriptors 1 and 2

Shares its process with the user: standard library and cloudpickle only.
"""

from __future__ import annotations

import contextvars
import ctypes
import faulthandler
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any, Generic, Literal, NoReturn, Protocol, TypeVar, cast

from skyward.api import info as info_module
from skyward.api import reporting
from skyward.api.info import VARIABLE, announce, call_context, holds_group, preempted, set_stall_timeout
from skyward.errors import PluginError
from skyward.node import decorators, gpu_failures, logs, processes, stack_dump, stdio
from skyward.node.body import Bodies, Ending, KeptObjects, RunnerCall, Stopped, end_if_forked, load_item
from skyward.node.protocol import (
    AgentToRunner,
    Close,
    Facts,
    Grant,
    Info,
    InputEnd,
    InputItems,
    Raised,
    Recall,
    Returned,
    Run,
    RunnerToAgent,
)
from skyward.node.protocol import Stopped as StoppedVerdict
from skyward.node.settings import RunnerSettings
from skyward.node.shared.runner_side import RunnerShared
from skyward.node.status_page import StatusPage
from skyward.transport import exceptions, frames
from skyward.transport.blobs import size_of
from skyward.transport.codec import Buffers, Described, Message, Raw, Receiver, handles, split
from skyward.transport.payload import unpack
from skyward.transport.streams import Consumer

__all__ = ["CALLS", "TICK", "Runner", "RunnerCalls", "Turn"]


_OUTPUT_PIECE = 1 << 15
_AWAKE: Any = object()  # what the queue holds when the main thread is to read the socket
# that of `signal` looks for an enum first, by an exception if a handler is a function: 8 us for each body
_getsignal: Callable[[int], object] = sys.modules["_signal"].getsignal


class Runner:
    def __init__(self, sock: socket.socket, status: int) -> None:
        self._sock, self._status_file = sock, status
        self._status: StatusPage
        self._send_lock = threading.Lock()
        self._lock = threading.Lock()  # over the states of calls
        self._calls: RunnerCalls[RunnerCall] = RunnerCalls()
        self._queue: queue.SimpleQueue[RunnerCall | None] = queue.SimpleQueue()
        self._turn, self._alarm = Turn(), threading.Lock()  # who reads the socket; released to wake the helper
        self._incoming = self._messages()
        self._bodies: Bodies
        self._threads, self._exiting = 1, False
        self._pid, self._main = os.getpid(), threading.get_ident()
        self._current: RunnerCall | None = None  # whose body the main thread runs
        self._sending = self._postponed = False
        self._hooks, self._on_term = ExitStack(), self._on_sigterm  # the one bound method, to be known again
        self._settings: RunnerSettings
        self._context = contextvars.copy_context()
        self._shared = RunnerShared(self._send, self._write, lambda: self._status.read())
        self._receiver = Receiver(AgentToRunner, self, self._shared, KeptObjects())

    def serve(self) -> NoReturn:
        faulthandler.enable(file=2, all_threads=False)
        self._joined = os.environ.pop("SKYWARD_JOINER", "") != ""  # then an engine may send SIGTERM to everybody
        self._install_handlers()
        keep_handler_out_of_children()
        hooks = self._receiver.receive(*next(self._incoming))  # `init`
        helper = threading.Thread(target=self._help, name="skyward-reader", daemon=True)
        helper.start()  # before the hooks: groups are formed with the help of the agent
        self._begin(hooks)
        if self._threads == 1:
            self._work(0)
        else:
            workers = [
                threading.Thread(target=self._work, args=(i,), name=f"skyward-slot-{i}", daemon=True)
                for i in range(self._threads)
            ]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
        self._leave(0)

    def _install_handlers(self) -> None:
        if _getsignal(signal.SIGTERM) is not self._on_term:
            signal.signal(signal.SIGTERM, self._on_term)
        if _getsignal(signal.SIGINT) != signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.SIG_IGN)

    @handles(AgentToRunner.Init)
    def _init(self, message: AgentToRunner.Init) -> Buffers:
        self._settings = settings = message.settings
        self._threads = settings["threads"]
        self._status = StatusPage(self._status_file, self._threads)
        os.close(self._status_file)
        stack_dump.listen(self._status.fd)
        sys.path[:0] = settings["paths"]
        self._bodies = Bodies(settings, self._send)
        decorators.decide_by(self._is_turn)
        set_stall_timeout(settings.get("stall_timeout"))
        self._shared.install(settings)
        stdio.install(threads=self._threads > 1, emit=self._emit if self._threads > 1 else None)
        logs.install(settings.get("log"))
        return message.buffers

    def _begin(self, hooks: Buffers) -> None:
        try:
            if hooks:
                self._bodies.enter(unpack(hooks[0], hooks[1:]), self._hooks)
        except BaseException as exc:  # reported to the agent, which reports to the client
            error = exc if isinstance(exc, PluginError) else PluginError("", "around_app", repr(exc))
            described, data = exceptions.capture(error)
            self._send(RunnerToAgent.Failed(described, [data]))
            self._leave(1)
        self._context = contextvars.copy_context()  # what the hooks have set holds in every call
        self._send(RunnerToAgent.Ready())

    # reading

    def _messages(self) -> Iterator[tuple[Raw, list[Any]]]:
        reader = frames.FrameReader()
        ready, alive = select.poll(), True
        ready.register(self._sock, select.POLLIN)
        while alive:
            ready.poll()  # a thread that waits in `recv` also wakes whenever the agent has read what we sent
            got, alive = reader.read(self._sock.recv_into)
            for batch, buffers in got:
                yield from split(batch, buffers)

    def _read(self) -> None:
        try:
            self._receiver.receive(*next(self._incoming))
            return
        except (OSError, StopIteration):
            pass  # the agent is gone; so are we
        except BaseException:
            import traceback

            traceback.print_exc()
        if not self._exiting:
            os._exit(1)
        threading.Event().wait()  # the main thread leaves

    def _help(self) -> None:
        self._alarm.acquire()
        while True:
            while not self._turn.hand_back():
                self._read()
            self._queue.put(_AWAKE)
            while (next_step := self._turn.look()) != "read":
                self._alarm.acquire(True, TICK if next_step == "again" else -1)

    def _wake_helper(self) -> None:
        try:
            self._alarm.release()
        except RuntimeError:
            pass  # it is awake

    def _next_call(self) -> RunnerCall | None:
        while True:
            if self._threads == 1 and self._turn.may_read() and self._queue.empty():
                self._read()
                continue
            call = self._queue.get()
            if call is not _AWAKE:
                return call

    @handles(Run)
    def _run(self, message: Run) -> None:
        call = RunnerCall(message.id, message.header, list(message.buffers))
        for key in message.header.get("streams", ()):
            call.inputs[key] = self._consumer(call.id, key)
        with self._lock:
            taken = self._calls.add(call)
        if taken:
            self._queue.put(call)
        else:
            self._send(RunnerToAgent.Recalled(call.id))

    def _is_turn(self, broadcast: str) -> bool:
        with self._lock:
            present = [gang for call in self._calls.calls.values() if (gang := call.header.get("gang"))]
        return broadcast not in present or present[0] == broadcast

    @handles(Recall)
    def _recall(self, message: Recall) -> None:
        with self._lock:
            given = self._calls.recall(message.id)
        if given:
            self._send(RunnerToAgent.Recalled(message.id))

    @handles(AgentToRunner.Cancel)
    def _cancel(self, message: AgentToRunner.Cancel) -> None:
        """Gives back a waiting call; interrupts a running one, after which no other starts here."""
        with self._lock:
            call, given = self._calls.cancel(message.id)
            if call is not None:
                self._send(RunnerToAgent.Leaving(given))  # before its verdict, which takes the lock first
                self._interrupt(call)
            elif given:
                self._send(RunnerToAgent.Recalled(message.id))
        if call is not None:
            self._take_no_more()

    @handles(AgentToRunner.Exit)
    def _exit(self, message: AgentToRunner.Exit) -> None:
        self._take_no_more()

    def _take_no_more(self) -> None:
        for _ in range(self._threads):
            self._queue.put(None)

    @handles(Info)
    def _info(self, message: Info) -> None:
        os.environ[VARIABLE] = message.info

    @handles(AgentToRunner.Notice)
    def _notice(self, message: AgentToRunner.Notice) -> None:
        announce(message.seconds)
        if self._calls.running():
            signal.pthread_kill(self._main, signal.SIGTERM)  # for bodies that have set a handler

    @handles(AgentToRunner.Facts)
    def _facts(self, message: AgentToRunner.Facts) -> None:
        facts = info_module.facts()
        if self._threads == 1 and (helpers := stack_dump.helpers(self._main)) is not None:
            facts["threads"] = helpers
        self._send(RunnerToAgent.Facts(cast("Facts", facts)))

    @handles(Grant)
    def _grant(self, message: Grant) -> None:
        call = self._calls.calls.get(message.id)
        if call is not None and call.output is not None:
            call.output.grant(message.count)

    @handles(Close)
    def _close(self, message: Close) -> None:
        call = self._calls.calls.get(message.id)
        if call is not None and call.output is not None:
            call.output.close()

    @handles(InputItems)
    def _items(self, message: InputItems) -> None:
        call = self._calls.calls.get(message.id)
        if call is not None:
            items = _split(message.buffers, message.counts)
            call.inputs[message.argument].feed([(item, size_of(item)) for item in items])

    @handles(InputEnd)
    def _end(self, message: InputEnd) -> None:
        call, error = self._calls.calls.get(message.id), cast("Described", message.error)
        if call is not None:  # an error is rebuilt in the body's thread
            call.inputs[message.argument].end(exceptions.packed(error, message.buffers[0]) if error else None)

    def _interrupt(self, call: RunnerCall) -> None:
        if call.output is not None:
            call.output.close()
        if self._threads == 1:
            signal.pthread_kill(self._main, signal.SIGTERM)
        elif call.thread is not None:  # else it is not in its body yet, where this is looked at first, or no longer
            raise_in_thread(call.thread, Stopped)
            self._shared.wake(call.thread)

    def _on_sigterm(self, *_: object) -> None:
        call = self._current
        if call is None:
            if not (self._calls.leaving or self._calls.running() or preempted() or self._joined):
                self._leave(0)  # somebody else wants this process to end, and nothing runs
        elif call.state == "stopping" and not call.interrupted:
            if self._sending:
                self._postponed = True  # a message must not end in the middle
            else:
                call.interrupted = True
                raise Stopped

    # working

    def _work(self, thread: int) -> None:
        while (call := self._next_call()) is not None:
            with self._lock:
                if not self._calls.claim(call):
                    continue  # given back meanwhile
                self._status.begin(thread, call.id, time.monotonic(), threading.get_native_id())
            if "timeout" in call.header:
                call.enter = partial(self._enter_function, thread)
            if self._turn.begin():
                self._wake_helper()
            if call.inputs:
                self._expect_answer()
            self._serve_call(call)
            del call  # nothing of it stays in memory while we wait for the next
            if self._calls.leaving:
                return

    def _enter_function(self, thread: int) -> None:
        self._status.enter(thread, time.monotonic())

    def _serve_call(self, call: RunnerCall) -> None:
        if call.header.get("ahead"):
            self._mark_output(call.id)
        started = time.perf_counter()
        ending = self._run_body(call)
        sys.stdout.flush()
        sys.stderr.flush()
        verdict = ending(id=call.id, seconds=time.perf_counter() - started, group=holds_group())
        self._shared.end_call(call.id)
        if isinstance(verdict, Raised) or (isinstance(verdict, Returned) and verdict.failed):
            self._clean_up()
        with self._lock:
            self._calls.end(call)
            if self._threads == 1 or not self._calls.running():
                processes.end_children()  # under the lock: the next body's are not meant
        self._send(verdict, last=True)

    def _clean_up(self) -> None:
        gpu_failures.clean_up()
        if gpu_failures.is_dead():
            with self._lock:
                if not self._calls.leaving:
                    self._send(RunnerToAgent.Leaving(self._calls.leave()))  # before the verdict
                    self._take_no_more()

    def _run_body(self, call: RunnerCall) -> Ending:
        """After this returns, Stopped can no longer be raised."""
        ending: Ending | None = None
        stack: str | None = None
        try:
            self._enter_body(call)
            ending = self._context.copy().run(self._run_in_context, call)
        except Stopped as exc:
            stack = exceptions.frames_of(exc) or None
        end_if_forked(self._pid)  # before any lock, which a forked child may find taken for ever
        while True:
            try:
                self._leave_body(call)
                return ending or partial(StoppedVerdict, stack=stack)
            except Stopped:
                continue  # it came just now; there is only one

    def _enter_body(self, call: RunnerCall) -> None:
        """From here on a call can be interrupted."""
        if self._threads == 1:
            self._install_handlers()  # an earlier body, or one of its libraries, may have had its own
            self._current = call
        else:
            with self._lock:
                call.thread = threading.get_ident()

    def _leave_body(self, call: RunnerCall) -> None:
        """From here on it cannot; a pending interrupt is dropped."""
        if self._threads == 1:
            self._current = None
        else:
            with self._lock:
                call.thread = None
            if call.state == "stopping":
                raise_in_thread(threading.get_ident(), None)

    def _run_in_context(self, call: RunnerCall) -> Ending:
        header = call.header
        with call_context(call.id, header["attempt"], threads=self._threads > 1, broadcast=header.get("gang")):
            try:
                return self._bodies.run(call)
            finally:
                reporting.end_of_call()
                stdio.drain()  # lines that have no end yet still belong to this call

    def _mark_output(self, call_id: str) -> None:
        mark = b"\0" + self._settings.get("mark", "").encode() + call_id.encode() + b"\0"
        os.write(1, mark)
        os.write(2, mark)

    def _consumer(self, call_id: str, key: str) -> Consumer:
        return Consumer(
            grant=lambda n: self._send(RunnerToAgent.Want(call_id, key, n)),
            close=lambda: None,
            load=load_item,
        )

    # sending

    def _send(self, message: Message, last: bool = False) -> None:
        if not last:
            self._expect_answer()
        raw, buffers = message.encoded()
        self._write(self._sock, self._send_lock, frames.encode([raw], buffers))

    def _expect_answer(self) -> None:
        if self._turn.running and self._turn.hurry():
            self._wake_helper()

    def _write(self, sock: socket.socket, lock: threading.Lock, pieces: list[Any]) -> None:
        guarded = self._current is not None and threading.get_ident() == self._main
        self._sending = self._sending or guarded
        try:
            with lock:
                for piece in pieces:
                    sock.sendall(piece)
        finally:
            if guarded:
                self._sending = False
                if self._postponed:
                    self._postponed = False
                    self._on_sigterm()

    def _emit(self, stream: Literal["stdout", "stderr"], text: str, call_id: str | None) -> None:
        data = text.encode("utf-8", "surrogateescape")
        for at in range(0, len(data), _OUTPUT_PIECE):  # each in one write, which no Stopped can cut in two
            self._send(RunnerToAgent.Out(stream, call_id, [data[at : at + _OUTPUT_PIECE]]))

    def _leave(self, status: int) -> NoReturn:
        self._exiting = True
        try:
            if not self._calls.running() and not gpu_failures.is_dead():  # a group could wait for its GPU for ever
                self._hooks.close()
        except BaseException:
            import traceback

            traceback.print_exc()  # goes to the node's stderr, and so to the client
        finally:
            processes.end_children()
            try:
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(status)


def _split(buffers: Buffers, counts: list[int]) -> list[list[Any]]:
    rest = iter(buffers)
    return [[next(rest) for _ in range(count)] for count in counts]


def raise_in_thread(thread: int, kind: type[BaseException] | None) -> None:
    """At the thread's next bytecode; None cancels a pending exception."""
    what = ctypes.py_object(kind) if kind is not None else None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), what)


def keep_handler_out_of_children() -> None:
    """With our SIGTERM handler, forked children would not end."""
    os.register_at_fork(
        before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}),
        after_in_parent=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM}),
        after_in_child=_take_usual_handler,
    )


def _take_usual_handler() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


# The calls of one runner: which wait for a thread, which run, which are to end.
#
# No thread, socket or signal here: `RunnerCalls` is told what happens, under its owner's lock, and says what it
# means. Whether a call is begun or given back is decided in one place, on the call itself, so that it is never both.


Row = tuple[str, tuple[str, ...]]

CALLS: dict[tuple[str, str], Row] = {
    # waits for a thread
    ("waiting", "claim"): ("running", ("write status", "start body")),
    ("waiting", "recall"): ("gone", ("tell recalled",)),
    ("waiting", "cancel"): ("gone", ("tell recalled",)),
    ("waiting", "leave"): ("gone", ("tell recalled",)),
    # its body runs
    ("running", "cancel"): ("stopping", ("leave", "interrupt body")),
    ("running", "end"): ("gone", ("tell verdict",)),
    # its body was interrupted: the process begins no other body
    ("stopping", "end"): ("gone", ("tell verdict",)),
}


class RunnerState(Protocol):
    id: str
    state: str


C = TypeVar("C", bound=RunnerState)


class RunnerCalls(Generic[C]):
    """Not thread-safe: its owner holds a lock."""

    def __init__(self) -> None:
        self.calls: dict[str, C] = {}
        self.leaving = False
        """Whether a body was interrupted here or broke the GPU: no other may begin."""

    def add(self, call: C) -> bool:
        """False if no call begins here any more; the agent knows."""
        call.state = "waiting"
        if self.leaving:
            return False
        self.calls[call.id] = call
        return True

    def claim(self, call: C) -> bool:
        """False if the call was given back, or nothing begins here any more."""
        return self._step(call, "claim") is not None

    def recall(self, call_id: str) -> bool:
        call = self.calls.get(call_id)
        return call is not None and self._step(call, "recall") is not None

    def cancel(self, call_id: str) -> tuple[C | None, list[str]]:
        call = self.calls.get(call_id)
        actions = self._step(call, "cancel") if call is not None else None
        if call is None or actions is None:
            return None, []
        return (call, self.leave()) if "leave" in actions else (None, [call.id])

    def leave(self) -> list[str]:
        self.leaving = True
        return [other.id for other in list(self.calls.values()) if self._step(other, "leave") is not None]

    def end(self, call: C) -> None:
        self._step(call, "end")

    def running(self) -> list[C]:
        return [call for call in list(self.calls.values()) if call.state != "waiting"]

    def _step(self, call: C, event: str) -> tuple[str, ...] | None:
        row = CALLS.get((call.state, event))
        if row is None:
            return None
        call.state = row[0]
        if call.state == "gone" and self.calls.get(call.id) is call:
            del self.calls[call.id]
        return row[1]


# Who reads a runner's socket: its main thread while it is idle, a helper thread once a body takes longer.
#
# This costs one wake-up per call. Each method of `Turn` is one step, and returns what to do. Pure.


TICK = 0.01  # seconds


class Turn:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.helps = True  # whether the helper reads: it does while hooks are entered, which may need messages
        self.running = False  # whether the main thread runs a body
        self._waits = False  # whether it waits for what the helper hears
        self._body = self._seen = 0  # the number of the body, and when the helper looked last
        self._rests = self._hurries = False

    # the main thread

    def begin(self) -> bool:
        """Whether the helper must be woken, to look at it later."""
        with self._lock:
            self.running, self._waits = True, False
            self._body += 1
            woken, self._rests = self._rests, False
            return woken

    def may_read(self) -> bool:
        """False if a body runs or the helper reads."""
        with self._lock:
            self.running = self._hurries = False
            self._waits = self.helps
            return not self.helps

    def hurry(self) -> bool:
        """The body may wait for an answer; whether the helper must be woken."""
        with self._lock:
            self._hurries = self.running and not self.helps
            self._rests = self._rests and not self._hurries
            return self._hurries

    # the helper

    def look(self) -> Literal["read", "rest", "again"]:
        with self._lock:
            unchanged, self._seen = self._body == self._seen, self._body
            if self.running:
                self.helps = unchanged or self._hurries
                return "read" if self.helps else "again"
            self._rests = unchanged
            return "rest" if unchanged else "again"

    def hand_back(self) -> bool:
        """Whether the main thread reads from now on, and must be woken."""
        with self._lock:
            if not self._waits:
                return False
            self.helps = self._waits = False
            return True
