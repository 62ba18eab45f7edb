"""The process from which runners are forked: small, single-threaded, and without user code.

    agent --its socket--> fork server     fork or kill a runner (AgentToForkServer)
    agent <--its socket-- fork server     a runner was forked, or has ended (ForkServerToAgent)

Forking is faster than a fresh interpreter and shares memory. When an agent or the keeper is gone, its runners end, with
all that their bodies started.
"""

from __future__ import annotations

import errno
import gc
import json
import os
import resource
import selectors
import signal
import socket
import sys
from contextlib import suppress
from types import FrameType
from typing import NoReturn

from skyward.node import processes
from skyward.node.orders import SCARCE, AgentToForkServer, ForkServerToAgent, written
from skyward.node.runner import Runner
from skyward.transport.codec import Message, Receiver, handles

__all__ = ["main", "serve"]


class _ForkServer:
    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._selector = selectors.DefaultSelector()
        self._agents: dict[int, socket.socket] = {}
        self._runners: dict[int, tuple[socket.socket, str]] = {}  # pid -> agent's socket, id
        self._receiver = Receiver(AgentToForkServer, self)
        self._wake, wake = socket.socketpair()
        for end in (self._wake, wake):
            end.setblocking(False)
        self._wake_write = wake

    def serve(self) -> None:
        processes.adopt_orphans()
        signal.signal(signal.SIGCHLD, _notice)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.set_wakeup_fd(self._wake_write.fileno(), warn_on_full_buffer=False)
        self._selector.register(self._control, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)
        gc.collect()
        gc.freeze()  # forked runners share these pages as long as nobody touches them
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._control:
                    if not self._admit():
                        self._end()
                        return
                elif key.fileobj is self._wake:
                    self._drain_wake()
                else:
                    self._obey(key.fileobj)  # type: ignore[arg-type]
            self._reap()

    def _admit(self) -> bool:
        data, fds, _, _ = socket.recv_fds(self._control, 16, 1)
        if not data:
            return False
        agent = socket.socket(fileno=fds[0])
        self._agents[agent.fileno()] = agent
        self._selector.register(agent, selectors.EVENT_READ)
        return True

    def _drain_wake(self) -> None:
        try:
            self._wake.recv(4096)
        except BlockingIOError:
            pass

    def _obey(self, agent: socket.socket) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(agent, 1 << 16, 5)
        except ConnectionError:
            data, fds = b"", []
        if not data:
            self._dismiss(agent)
            return
        self._receiver.receive(json.loads(data), [], agent, fds)

    @handles(AgentToForkServer.Spawn)
    def _spawn(self, order: AgentToForkServer.Spawn, agent: socket.socket, fds: list[int]) -> None:
        try:
            pid = os.fork()
            if pid == 0:
                self._become_runner(order.cwd, fds)
            self._runners[pid] = (agent, order.name)
            self._tell(agent, ForkServerToAgent.Forked(order.name, pid))
        except OSError as exc:  # too many processes, or no memory: the agent tries again
            with suppress(OSError):  # the agent may be gone; its socket says so next
                os.write(fds[2], f"skyward: no process could be started: {exc.strerror}.\n".encode())
            self._tell(agent, ForkServerToAgent.Forked(order.name, 0))
            self._tell(agent, ForkServerToAgent.Ended(order.name, SCARCE))
        finally:
            for fd in fds:
                os.close(fd)

    @handles(AgentToForkServer.Kill)
    def _kill(self, order: AgentToForkServer.Kill, agent: socket.socket, fds: list[int]) -> None:
        for pid, known in self._runners.items():
            if known == (agent, order.name):
                _kill_group(pid, order.signal)
        self._tell(agent, ForkServerToAgent.Killed(order.name))

    def _become_runner(self, cwd: str, fds: list[int]) -> NoReturn:
        status = 70
        try:
            parent = os.getppid()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._selector.close()
            for sock in [self._control, self._wake, self._wake_write, *self._agents.values()]:
                sock.close()
            os.setpgid(0, 0)  # no session of its own: calls would wait for those of others (see LocalShell)
            processes.rename("skyward-runner")
            processes.die_with_parent(parent)
            processes.adopt_orphans()
            processes.prefer_for_oom()
            os.dup2(fds[1], 1)
            os.dup2(fds[2], 2)
            os.close(fds[1])
            os.close(fds[2])
            with open(fds[3], "rb") as file:
                file.seek(0)
                os.environ.update(json.load(file))
            os.chdir(cwd)
            os.environ["PWD"] = cwd
            resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
            sys.argv = ["skyward-runner"]
            Runner(socket.socket(fileno=fds[0]), fds[4]).serve()
        except BaseException as exc:
            import traceback

            traceback.print_exc()
            status = SCARCE if _is_scarcity(exc) else status
        finally:
            os._exit(status)

    def _reap(self) -> None:
        for pid, code in processes.ended_children():
            known = self._runners.pop(pid, None)
            if known is not None:
                _kill_group(pid, signal.SIGKILL)
                processes.end_children(spare=set(self._runners))
                self._tell(known[0], ForkServerToAgent.Ended(known[1], code))

    def _tell(self, agent: socket.socket, message: Message) -> None:
        try:
            agent.send(written(message))
        except OSError:
            pass  # the agent is gone; its socket says so next

    def _dismiss(self, agent: socket.socket) -> None:
        self._selector.unregister(agent)
        self._agents.pop(agent.fileno(), None)
        agent.close()
        for pid, (owner, _) in list(self._runners.items()):
            if owner is agent:
                _kill_group(pid, signal.SIGKILL)

    def _end(self) -> None:
        for pid in self._runners:
            _kill_group(pid, signal.SIGKILL)
        processes.end_children()


def serve(control: socket.socket) -> None:
    processes.rename("skyward-forks")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends with the keeper
    _ForkServer(control).serve()


def main() -> None:
    control = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    serve(control)


def _notice(number: int, frame: FrameType | None) -> None:
    """The signal only has to wake the selector."""


def _is_scarcity(exc: BaseException) -> bool:
    scarce = isinstance(exc, OSError) and exc.errno in (errno.EAGAIN, errno.ENOMEM)
    return scarce or isinstance(exc, MemoryError) or "can't start new thread" in str(exc)


def _kill_group(pid: int, number: int) -> None:
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        try:
            os.kill(pid, number)  # before it has a group
        except ProcessLookupError:
            pass


if __name__ == "__main__":
    main()
