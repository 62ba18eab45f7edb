"""The runner processes of one node: ordered from the fork server, spoken to over sockets, listened to through pipes.

It knows how to start, reach and end them, and calls nobody: what the selector keeps for it are functions that return
what happened. What runners are for, and what it means when one ends, is the agent's business.
"""

from __future__ import annotations

import json
import logging
import os
import select
import selectors
import signal
import socket
from functools import partial
from typing import Any, NamedTuple

from skyward.node import stack_dump
from skyward.node.marked_lines import readable
from skyward.node.orders import AgentToForkServer, ForkServerToAgent
from skyward.node.receiver import Message, Receiver
from skyward.node.status_page import ID_BYTES, StatusPage, page_size
from skyward.transport.frames import Frame, FrameReader, FrameWriter, Malformed, encode

__all__ = ["Ended", "Event", "Pipe", "Printed", "RunnerProcess", "Runners", "Said"]

log = logging.getLogger("skyward.engine")

_READ = 1 << 16
_SHORT = 1 << 14  # after a read that gave less, the next would find nothing
_STDERR_TAIL = 4096
_STDERR_KEPT = 4 * _STDERR_TAIL  # of which reports of progress are left out
_DRAIN = 2 << 20  # two pipes hold no more, however large they were made


class Pipe:
    """The reading end of a runner's stdout or stderr."""

    def __init__(self, stream: str, fd: int) -> None:
        self.stream, self.fd = stream, fd
        self.open, self.paused = True, False
        self.tail = b""
        self.call: str | None = None
        self._rest = b""

    def read(self) -> bytes | None:
        """What is there now: None when nothing is, empty bytes when the writers are gone."""
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
        """The data with the runner's marks taken out; each piece with the call that the last mark named."""
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
    """One runner as its agent sees it: socket, pipes, status page."""

    def __init__(self, name: str, sock: socket.socket, out: Pipe, err: Pipe, status: StatusPage, threads: int) -> None:
        self.name, self.sock, self.out, self.err, self.status, self.threads = name, sock, out, err, status, threads
        self.pid: int | None = None
        self.eof = self.malformed = self.paused = False
        self._output = select.poll()
        for pipe in (out, err):
            self._output.register(pipe.fd, select.POLLIN)
        self._reader = FrameReader()
        self._writer = FrameWriter()

    def send(self, messages: list[Any], buffers: list[Any]) -> bool:
        """Sends messages; False when some bytes wait for the socket."""
        self._writer.add(encode(messages, buffers))
        return self.flush()

    def flush(self) -> bool:
        """Goes on sending; True when nothing waits."""
        try:
            return self._writer.write(self.sock.send)
        except OSError:
            self._writer.clear()  # it is dying; the fork server tells how
            return True

    def read(self, *, ended: bool = False) -> list[Frame]:
        """The frames that have arrived; of a process that has ended, all that it said."""
        frames: list[Frame] = []
        while not self.eof:
            try:
                got, alive = self._reader.read(self.sock.recv_into)
            except BlockingIOError:
                break
            except OSError:
                got, alive = [], False
            except Malformed as exc:
                log.warning("a runner sent what is no frame of ours, and is listened to no more: %s", exc)
                got, alive = [], False
                self.malformed = True
            frames += got
            self.eof = not alive
            if self._reader.last < _SHORT and not ended:
                break
        return frames

    def unread(self) -> list[Pipe]:
        """The pipes in which something lies, or whose writers are gone; one system call that does not fail."""
        ready = [fd for fd, _ in self._output.poll(0)]
        return [pipe for pipe in (self.out, self.err) if pipe.fd in ready and pipe.open] if ready else []

    def new_call(self, mark: bytes) -> None:
        """A call has ended: what stderr says from here on is the next one's, where only one runs at a time."""
        if self.threads == 1:
            self.err.tail = self._after(mark, b"")

    def stderr_tail(self, mark: bytes) -> str:
        """The last lines that the current call wrote to stderr."""
        tail = self._after(mark, self.err.tail)
        if len(self.err.tail) == _STDERR_KEPT and tail is self.err.tail:
            tail = tail.partition(b"\n")[2] or tail  # its first line is half a line
        return stack_dump.of_the_user(readable(tail.decode("utf-8", "replace"))).strip()[-_STDERR_TAIL:]

    def _after(self, mark: bytes, otherwise: bytes) -> bytes:
        """What stderr says after the last mark, which tells where a call begins."""
        tail = self.err.tail
        return tail.rpartition(mark)[2][ID_BYTES + 1 :] if mark in tail else otherwise

    def close(self) -> None:
        """Closes socket, pipes and status page."""
        self.sock.close()
        os.close(self.out.fd)
        os.close(self.err.fd)
        self.status.close()


class Said(NamedTuple):
    """A runner has sent messages."""

    messages: list[Message]
    buffers: list[Any]
    runner: RunnerProcess


class Printed(NamedTuple):
    """A runner has written something to stdout or stderr."""

    runner: RunnerProcess
    pipe: Pipe
    data: bytes


class Ended(NamedTuple):
    """A runner is gone, and all that it said and wrote was returned before; `Runners.forget` closes what is left."""

    runner: RunnerProcess
    status: int


Event = Said | Printed | Ended


class Runners:
    """All runner processes of an agent, those that are being ended included."""

    def __init__(self, selector: selectors.BaseSelector, fork_server: socket.socket) -> None:
        self._selector, self._fork_server = selector, fork_server
        self.full = False
        """Whether output is left in the pipes, since the client does not keep up."""
        self._processes: dict[str, RunnerProcess] = {}
        self._receiver = Receiver(ForkServerToAgent, self)
        self._paused = False
        fork_server.setblocking(False)
        selector.register(fork_server, selectors.EVENT_READ, self._on_fork_server)

    @property
    def gone(self) -> bool:
        """Whether no runner is left, not even one that is being ended."""
        return not self._processes

    def pids(self) -> list[int]:
        """The process ids of all runners."""
        return [process.pid for process in self._processes.values() if process.pid]

    def spawn(self, name: str, threads: int, env: dict[str, str], cwd: str) -> None:
        """Has the fork server fork a runner."""
        ours, theirs = socket.socketpair()
        out, out_write = os.pipe()
        err, err_write = os.pipe()
        order = json.dumps(AgentToForkServer.spawn(name, cwd)).encode()
        variables = os.memfd_create("skyward-env")  # in memory, and of any size: a message has a limit
        status = os.memfd_create("skyward-status")
        os.ftruncate(status, page_size(threads))
        page = StatusPage(status, threads)
        try:
            with open(variables, "wb", closefd=False) as file:
                file.write(json.dumps(env).encode())
            self._fork_server.setblocking(True)
            socket.send_fds(self._fork_server, [order], [theirs.fileno(), out_write, err_write, variables, status])
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

    def send(self, name: str, message: Message, buffers: list[Any] | None = None) -> None:
        """Sends a message to a runner; one that is gone gets none."""
        process = self._processes.get(name)
        if process is None or process.eof:
            return
        if not process.send([message], buffers or []):
            self._watch(process, selectors.EVENT_READ | selectors.EVENT_WRITE)

    def send_all(self, message: Message) -> None:
        """Sends a message to every runner."""
        for name in list(self._processes):
            self.send(name, message)

    def status(self, name: str) -> list[tuple[str, float]]:
        """What a runner says on its status page."""
        process = self._processes.get(name)
        return process.status.read() if process is not None else []

    def ask_stack(self, name: str, call: str | None) -> str:
        """Has the thread of a call, or else the main thread, write down its stack; if that cannot work, says why."""
        process = self._processes.get(name)
        if process is None or process.pid is None or process.eof:
            return "its process is gone, or not there yet"
        thread = process.pid if call is None else process.status.native_ids().get(call)
        if not thread:
            return "it has not begun, or has just ended"
        process.status.clear_dump()
        return stack_dump.ask(process.pid, thread)

    def stack(self, name: str) -> str:
        """What was written down of the stack that a runner was asked for last."""
        process = self._processes.get(name)
        return process.status.dump() if process is not None else ""

    def pid(self, name: str) -> int | None:
        """The process id of a runner."""
        process = self._processes.get(name)
        return process.pid if process is not None else None

    def kill(self, name: str) -> None:
        """Kills a runner and what its bodies have started; when it is gone, it is `Ended`."""
        try:
            self._fork_server.send(json.dumps(AgentToForkServer.kill(name, int(signal.SIGKILL))).encode())
        except OSError:
            pass  # as in spawn

    def kill_all(self) -> None:
        """Kills every runner."""
        for name in self._processes:
            self.kill(name)

    def drain(self, process: RunnerProcess) -> list[Printed]:
        """Everything that a runner has written so far; not what processes that it has started go on to write."""
        printed: list[Printed] = []
        size = 0
        while size < _DRAIN and (pipes := process.unread()):
            for pipe in pipes:
                printed += self._read(process, pipe)
                size += len(printed[-1].data) if printed else 0
        return printed

    def resume(self) -> None:
        """Listens again to pipes that were left alone while the client did not keep up."""
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
        """Closes what is left of a runner that has ended."""
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
        if process.malformed:
            self.kill(process.name)
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
            happened += self._receiver.hear(json.loads(data), [])

    def _from_fork_server_forked(self, name: str, pid: int) -> list[Event]:
        if name in self._processes:
            self._processes[name].pid = pid
        return []

    def _from_fork_server_ended(self, name: str, status: int) -> list[Event]:
        """What the runner has written is heard before what it sent, and that before its end."""
        process = self._processes.get(name)
        if process is None:
            return []
        said = self._on_runner(process, selectors.EVENT_READ, ended=True)
        return [*self.drain(process), *said, Ended(process, status)]

    def _unregister(self, fileobj: Any) -> None:
        if fileobj in self._selector.get_map():
            self._selector.unregister(fileobj)
