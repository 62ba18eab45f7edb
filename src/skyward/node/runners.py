"""The runner processes of one node: forked by the fork server, reached over sockets and pipes."""

from __future__ import annotations

import json
import logging
import os
import select
import selectors
import signal
import socket
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

from skyward.node import stack_dump
from skyward.node.agent_calls import AgentCalls
from skyward.node.agent_slots import Slot
from skyward.node.logs import readable
from skyward.node.orders import AgentToForkServer, ForkServerToAgent, written
from skyward.node.protocol import AgentToClient, AgentToRunner, Body, ClientToAgent, RunnerToAgent
from skyward.node.status_page import ID_BYTES, StatusPage, page_size
from skyward.node.timers import Timers
from skyward.node.usage import UsageMeter
from skyward.transport.codec import Buffers, Message, Raw, Receiver, halves, handles
from skyward.transport.frames import Frame, FrameReader, FrameWriter, Malformed, TooLarge, encode, nbytes

__all__ = ["Ended", "Event", "Pipe", "Printed", "RunnerProcess", "Runners", "Said", "StackSampler", "Stream"]


log = logging.getLogger("skyward.engine")

_READ = 1 << 16
_TOGETHER, _MOST_BYTES = 64, 16 << 20  # in one frame to a runner: messages, and bytes of their buffers
_SHORT = 1 << 14  # after a read that gave less, the next would find nothing
_STDERR_TAIL = 4096
_STDERR_KEPT = 4 * _STDERR_TAIL  # of which reports of progress are left out
_DRAIN = 2 << 20  # two pipes hold no more, however large they were made


Stream = Literal["stdout", "stderr"]


class Pipe:
    def __init__(self, stream: Stream, fd: int) -> None:
        self.stream: Stream = stream
        self.fd = fd
        self.open, self.paused = True, False
        self.tail = b""
        self.call: str | None = None
        self._rest = b""

    def read(self) -> bytes | None:
        """None when nothing is available, empty at end of file."""
        try:
            data = os.read(self.fd, _READ)
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        if not data:
            self.open = False
        elif self.stream == "stderr":
            self.tail = (self.tail + data)[-_STDERR_KEPT:]
        return data

    def take_apart(self, data: bytes, mark: bytes) -> list[tuple[str | None, bytes]]:
        whole = self._rest + data
        self._rest = b""
        pieces: list[tuple[str | None, bytes]] = []
        while True:
            at = whole.find(b"\0")
            while at >= 0 and not mark.startswith(whole[at : at + len(mark)]):
                at = whole.find(b"\0", at + 1)
            if at < 0:
                break
            if at:
                pieces.append((self.call, whole[:at]))
            end = at + len(mark) + ID_BYTES + 1
            if len(whole) < end:
                self._rest = whole[at:]  # the rest of the mark is still in the pipe
                return pieces
            self.call = whole[at + len(mark) : end - 1].decode()
            whole = whole[end:]
        if whole:
            pieces.append((self.call, whole))
        return pieces


class RunnerProcess:
    def __init__(self, name: str, sock: socket.socket, out: Pipe, err: Pipe, status: StatusPage, threads: int) -> None:
        self.name, self.sock, self.out, self.err, self.status, self.threads = name, sock, out, err, status, threads
        self.pid: int | None = None
        self.eof = self.malformed = self.paused = False
        self._output = select.poll()
        for pipe in (out, err):
            self._output.register(pipe.fd, select.POLLIN)
        self._reader = FrameReader()
        self._writer = FrameWriter()
        self._messages: list[Raw] = []
        self._buffers: list[Any] = []
        self._size = 0

    def add(self, message: Message) -> bool:
        """With the next `flush`; True if that should not wait for more."""
        raw, buffers = message.encoded()
        self._messages.append(raw)
        if buffers:
            self._buffers += buffers
            self._size += sum(map(nbytes, buffers))
        return len(self._messages) >= _TOGETHER or self._size >= _MOST_BYTES

    def flush(self) -> bool:
        """False when bytes remain unsent."""
        if self._messages:
            messages, self._messages = self._messages, []
            buffers, self._buffers, self._size = self._buffers, [], 0
            self._write(messages, buffers)
        try:
            return self._writer.write(self.sock.send)
        except OSError:
            self._writer.clear()  # it is dying; the fork server tells how
            return True

    def _write(self, messages: list[Raw], buffers: Buffers) -> None:
        try:
            self._writer.add(encode(messages, buffers))
        except TooLarge as exc:
            if len(messages) == 1:  # senders see to it that this does not happen; if it does, the agent lives on
                log.error("a message %.80r cannot be sent to a runner: %s", messages[0][0], exc)
                return
            for half in halves(messages, buffers):
                self._write(*half)

    def read(self, *, ended: bool = False) -> list[Frame]:
        """Frames received; after the process `ended`, all remaining ones."""
        frames: list[Frame] = []
        while not self.eof:
            try:
                got, alive = self._reader.read(self.sock.recv_into)
            except BlockingIOError:
                break
            except OSError:
                got, alive = [], False
            except Malformed as exc:
                log.warning("a runner sent something that is not a frame, and is ignored from now on: %s", exc)
                got, alive = [], False
                self.malformed = True
            frames += got
            self.eof = not alive
            if self._reader.last < _SHORT and not ended:
                break
        return frames

    def unread(self) -> list[Pipe]:
        ready = [fd for fd, _ in self._output.poll(0)]
        return [pipe for pipe in (self.out, self.err) if pipe.fd in ready and pipe.open] if ready else []

    def new_call(self, mark: bytes) -> None:
        if self.threads == 1:
            self.err.tail = self._after(mark, b"")

    def stderr_tail(self, mark: bytes) -> str:
        tail = self._after(mark, self.err.tail)
        if len(self.err.tail) == _STDERR_KEPT and tail is self.err.tail:
            tail = tail.partition(b"\n")[2] or tail  # its first line is half a line
        return stack_dump.of_the_user(readable(tail.decode("utf-8", "replace"))).strip()[-_STDERR_TAIL:]

    def _after(self, mark: bytes, otherwise: bytes) -> bytes:
        tail = self.err.tail
        return tail.rpartition(mark)[2][ID_BYTES + 1 :] if mark in tail else otherwise

    def close(self) -> None:
        self.sock.close()
        os.close(self.out.fd)
        os.close(self.err.fd)
        self.status.close()


class Said(NamedTuple):
    messages: list[Raw]
    buffers: list[Any]
    runner: RunnerProcess


class Printed(NamedTuple):
    runner: RunnerProcess
    pipe: Pipe
    data: bytes


class Ended(NamedTuple):
    runner: RunnerProcess
    status: int


Event = Said | Printed | Ended


class Runners:
    def __init__(self, selector: selectors.BaseSelector, fork_server: socket.socket) -> None:
        self._selector, self._fork_server = selector, fork_server
        self.full = False
        """Whether output stays in the pipes: the client does not keep up."""
        self._processes: dict[str, RunnerProcess] = {}
        self._unsent: dict[str, RunnerProcess] = {}
        self._receiver = Receiver(ForkServerToAgent, self)
        self._paused = False
        self._orders = self._looks = 0  # which the fork server has not answered, and how often that was seen
        fork_server.setblocking(False)
        selector.register(fork_server, selectors.EVENT_READ, self._on_fork_server)

    @property
    def gone(self) -> bool:
        return not self._processes

    def pids(self) -> list[int]:
        return [process.pid for process in self._processes.values() if process.pid]

    def spawn(self, name: str, threads: int, env: dict[str, str], cwd: str) -> None:
        ours, theirs = socket.socketpair()
        out, out_write = os.pipe()
        err, err_write = os.pipe()
        order = written(AgentToForkServer.Spawn(name, cwd))
        variables = os.memfd_create("skyward-env")  # in memory, and of any size: a message has a limit
        status = os.memfd_create("skyward-status")
        os.ftruncate(status, page_size(threads))
        page = StatusPage(status, threads)
        try:
            with open(variables, "wb", closefd=False) as file:
                file.write(json.dumps(env).encode())
            self._fork_server.setblocking(True)
            socket.send_fds(self._fork_server, [order], [theirs.fileno(), out_write, err_write, variables, status])
            self._orders += 1
        except OSError:
            pass  # the fork server is gone: _on_fork_server sees it next
        finally:
            self._fork_server.setblocking(False)
            theirs.close()
            for fd in (out_write, err_write, variables, status):
                os.close(fd)
        process = RunnerProcess(name, ours, Pipe("stdout", out), Pipe("stderr", err), page, threads)
        self._processes[name] = process
        ours.setblocking(False)
        self._selector.register(ours, selectors.EVENT_READ, partial(self._on_runner, process))
        for pipe in (process.out, process.err):
            os.set_blocking(pipe.fd, False)
            self._listen(process, pipe)

    def send(self, name: str, message: Message) -> None:
        """With the next `flush`, in one frame with others; ignored if the runner is gone."""
        process = self._processes.get(name)
        if process is None or process.eof:
            return
        self._unsent[name] = process
        if process.add(message):
            self.flush()

    def flush(self) -> None:
        unsent, self._unsent = self._unsent, {}
        for name, process in unsent.items():
            if not process.flush() and self._processes.get(name) is process:
                self._watch(process, selectors.EVENT_READ | selectors.EVENT_WRITE)

    def send_all(self, message: Message) -> None:
        for name in list(self._processes):
            self.send(name, message)

    def status(self, name: str) -> list[tuple[str, float, float]]:
        process = self._processes.get(name)
        return process.status.read() if process is not None else []

    def ask_stack(self, name: str, call: str | None) -> str:
        process = self._processes.get(name)
        if process is None or process.pid is None or process.eof:
            return "its process has ended, or has not started yet"
        thread = process.pid if call is None else process.status.native_ids().get(call)
        if not thread:
            return "it has not begun, or has just ended"
        process.status.clear_dump()
        return stack_dump.ask(process.pid, thread)

    def stack(self, name: str) -> str:
        process = self._processes.get(name)
        return process.status.dump() if process is not None else ""

    def pid(self, name: str) -> int | None:
        process = self._processes.get(name)
        return process.pid if process is not None else None

    def kill(self, name: str) -> None:
        """With what its bodies started; `Ended` follows."""
        try:
            self._fork_server.send(written(AgentToForkServer.Kill(name, int(signal.SIGKILL))))
            self._orders += 1
        except OSError:
            pass  # as in spawn

    def kill_all(self) -> None:
        for name in self._processes:
            self.kill(name)

    def unanswered(self) -> int:
        self._looks = self._looks + 1 if self._orders else 0
        return self._looks

    def _answered(self) -> None:
        self._orders, self._looks = self._orders - 1, 0

    def drain(self, process: RunnerProcess) -> list[Printed]:
        printed: list[Printed] = []
        size = 0
        while size < _DRAIN and (pipes := process.unread()):
            for pipe in pipes:
                printed += self._read(process, pipe)
                size += len(printed[-1].data) if printed else 0
        return printed

    def resume(self) -> None:
        """Reads pipes again that were held while the client did not keep up."""
        if not self._paused or self.full:
            return
        self._paused = False
        for process in self._processes.values():
            if process.paused and not process.eof:
                self._watch(process, selectors.EVENT_READ)
            for pipe in (process.out, process.err):
                if pipe.paused and pipe.open:
                    pipe.paused = False
                    self._listen(process, pipe)

    def forget(self, process: RunnerProcess) -> None:
        for fileobj in (process.sock, process.out.fd, process.err.fd):
            self._unregister(fileobj)
        del self._processes[process.name]
        process.close()

    def _listen(self, process: RunnerProcess, pipe: Pipe) -> None:
        self._selector.register(pipe.fd, selectors.EVENT_READ, partial(self._on_output, process, pipe))

    def _watch(self, process: RunnerProcess, events: int) -> None:
        process.paused = False
        known = process.sock in self._selector.get_map()
        (self._selector.modify if known else self._selector.register)(
            process.sock, events, partial(self._on_runner, process)
        )

    def _on_output(self, process: RunnerProcess, pipe: Pipe, _: int) -> list[Printed]:
        if self._processes.get(process.name) is not process:
            return []  # it ended in the same turn; its pipes have been read to their end
        if self.full:
            self._selector.unregister(pipe.fd)
            pipe.paused = self._paused = True
            return []
        return self._read(process, pipe)

    def _read(self, process: RunnerProcess, pipe: Pipe) -> list[Printed]:
        data = pipe.read()
        if data:
            return [Printed(process, pipe, data)]
        if data is not None:
            self._unregister(pipe.fd)
        return []

    def _on_runner(self, process: RunnerProcess, events: int, *, ended: bool = False) -> list[Said]:
        if self._processes.get(process.name) is not process:
            return []  # it ended in the same turn; what it said has been heard
        if events & selectors.EVENT_WRITE and process.flush():
            self._watch(process, selectors.EVENT_READ)
        if self.full and process.threads > 1 and not ended and not events & selectors.EVENT_WRITE:
            self._selector.unregister(process.sock)  # its output comes this way
            process.paused = self._paused = True
            return []
        said = [Said(messages, buffers, process) for messages, buffers in process.read(ended=ended)]
        if process.eof:
            self._unregister(process.sock)
        if process.malformed or (process.eof and not ended):
            self.kill(process.name)  # mostly it is gone; if the fork server does not say so, this has no answer
        return said

    def _on_fork_server(self, _: int) -> list[Event]:
        happened: list[Event] = []
        while True:
            try:
                data = self._fork_server.recv(1 << 16)
            except BlockingIOError:
                return happened
            except OSError:
                data = b""
            if not data:
                os._exit(3)  # without a fork server there are no runners; the keeper starts this agent again
            happened += self._receiver.receive(json.loads(data), [])

    @handles(ForkServerToAgent.Forked)
    def _forked(self, message: ForkServerToAgent.Forked) -> list[Event]:
        self._answered()
        if message.name in self._processes:
            self._processes[message.name].pid = message.pid or None
        return []

    @handles(ForkServerToAgent.Killed)
    def _killed(self, message: ForkServerToAgent.Killed) -> list[Event]:
        self._answered()
        return []

    @handles(ForkServerToAgent.Ended)
    def _ended(self, message: ForkServerToAgent.Ended) -> list[Event]:
        """Output comes before messages, and those before the end."""
        process = self._processes.get(message.name)
        if process is None:
            return []
        said = self._on_runner(process, selectors.EVENT_READ, ended=True)
        return [*self.drain(process), *said, Ended(process, message.status)]

    def _unregister(self, fileobj: Any) -> None:
        if fileobj in self._selector.get_map():
            self._selector.unregister(fileobj)


# Where the bodies of a node are: asked for by the client, found out from outside their processes.
#
#     client --where--> sampler --signal, then `facts`--> runners --stacks, facts--> sampler --standing--> client
#
# Nothing happens here until somebody asks. Questions are answered one after the other, and each of them soon: a
# runner that does not answer is reported as such.


_LOOK = 0.02
_MOST_FRAMES = 12_000  # in one answer, which has to fit into a frame of the link
_PATIENCE = 1.0  # for one stack, and for what runners say of themselves


class StackSampler:
    def __init__(
        self,
        calls: AgentCalls,
        runners: Runners,
        usage: UsageMeter,
        timers: Timers,
        tell: Callable[[Message], None],
    ) -> None:
        self._calls, self._runners, self._usage, self._tell = calls, runners, usage, tell
        self._timers, self._clock = timers, timers.clock
        self._questions: deque[tuple[int, list[str] | None]] = deque()
        self._request = 0
        self._answer: list[Body] = []
        self._waiting: dict[str, deque[Body]] = {}  # by runner: bodies whose stacks are still to be taken, in turn
        self._silent: set[str] = set()  # runners that have not said their facts
        self._since: dict[str, float] = {}
        self._busy = False

    @handles(ClientToAgent.Where)
    def _where(self, message: ClientToAgent.Where) -> None:
        self._questions.append((message.request, message.ids))
        if not self._busy:
            self._begin()

    @handles(RunnerToAgent.Facts)
    def _facts(self, message: RunnerToAgent.Facts, runner: RunnerProcess) -> None:
        self._silent.discard(runner.name)
        for body in self._answer:
            if body.get("runner") == runner.name:
                body["facts"] = message.facts

    def _begin(self) -> None:
        self._busy = True
        self._request, ids = self._questions.popleft()
        self._answer, self._waiting, self._since = [], {}, {}
        for slot in self._calls.slots.values():
            if slot.state == "ready" and ids is not None:  # a person who looks does not wait for what bodies know
                self._silent.add(slot.name)
                self._runners.send(slot.name, AgentToRunner.Facts())
            bodies = self._bodies(slot, ids)
            self._answer += bodies
            asked = deque(body for body in bodies if body["state"] != "idle")
            if asked:
                self._waiting[slot.name] = asked
                self._ask(slot.name)
        self._since["facts"] = self._clock()
        self._go_on()

    def _bodies(self, slot: Slot, ids: list[str] | None) -> list[Body]:
        now, pid = self._clock(), self._runners.pid(slot.name)
        cpu = self._usage.cpu_seconds(pid) if pid is not None else 0.0
        runner: Body = {"runner": slot.name, "place": slot.place, "cpu": cpu, "state": "idle"}
        if slot.state in ("starting", "failed"):
            return [{**runner, "state": "starting", "seconds": now - slot.since}] if ids is None else []
        found: list[Body] = [
            {**runner, "state": call.state, "call": call.id, "name": call.header["name"], "seconds": now - call.began}
            for call in slot.calls.values()
            if call.began is not None and (ids is None or call.id in ids)
        ]
        return found or [runner]

    def _ask(self, name: str) -> None:
        waiting = self._waiting[name]
        while waiting:
            problem = self._runners.ask_stack(name, waiting[0].get("call"))
            if not problem:
                self._since[name] = self._clock()
                return
            waiting.popleft()["problem"] = problem
        del self._waiting[name]

    def _go_on(self) -> None:
        now = self._clock()
        for name in list(self._waiting):
            text = self._runners.stack(name)
            late = now - self._since[name] > _PATIENCE
            if stack_dump.complete(text) or late:
                body = self._waiting[name].popleft()
                body["frames"] = stack_dump.parse(text)
                if not body["frames"] and late:
                    body["problem"] = "its thread does not answer: it is stopped, or waits in the kernel"
                self._ask(name)
        self._silent &= self._calls.slots.keys()
        if self._waiting or (self._silent and now - self._since["facts"] < _PATIENCE):
            self._timers.after(_LOOK, self._go_on)
            return
        self._tell(AgentToClient.Standing(self._request, _shortened(self._answer)))
        self._answer, self._busy = [], False
        self._silent.clear()
        if self._questions:
            self._begin()


def _shortened(bodies: list[Body]) -> list[Body]:
    threads = [thread or [] for body in bodies for thread in body.get("facts", {}).get("threads") or ()]
    if sum(len(body.get("frames") or ()) for body in bodies) + sum(map(len, threads)) > _MOST_FRAMES:
        most = max(1, _MOST_FRAMES // len(bodies))
        for body in bodies:
            body["frames"] = (body.get("frames") or [])[-most:]
            body.get("facts", {}).pop("threads", None)
    return bodies
