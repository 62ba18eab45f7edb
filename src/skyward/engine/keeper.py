"""What runs on one machine, and its watchdog: started by the client, ends everything when the client is gone.

    client --stdin--> keeper       one line of JSON: who to start; end of file means the client is gone. Its argument is
                                   the pool's directory, which it removes when it ends.
    client <--stdout-- keeper      lines of JSON: ports, the scheduler's address, deaths
    keeper --fork--> scheduler (on the head), one agent for each node
    keeper --exec--> nursery --fork--> runners

It imports distributed once and forks from there, which is what makes a pool open fast. It stays single-threaded, and
starts an agent that has died again, on the same port.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn, TextIO

from skyward import blobs, leftovers

__all__ = ["main"]

_RESTARTS = 20


@dataclass
class _Node:
    node: int
    listener: socket.socket
    order: dict[str, Any]
    pid: int = 0
    restarts: int = 0


class _Keeper:
    def __init__(self, order: dict[str, Any], nursery: _NurseryProcess) -> None:
        self._order = order
        self._nursery = nursery
        self._nodes: list[_Node] = []
        self._scheduler = 0
        self._closing = False
        self._wake, self._wake_write = socket.socketpair()
        for end in (self._wake, self._wake_write):
            end.setblocking(False)

    def serve(self) -> None:
        leftovers.adopt_orphans()
        signal.signal(signal.SIGCHLD, _notice)
        signal.set_wakeup_fd(self._wake_write.fileno(), warn_on_full_buffer=False)
        for order in self._order["nodes"]:
            listener = socket.create_server((order["host"], order.get("port", 0)), backlog=16)
            self._nodes.append(_Node(order["node"], listener, order))
            _say({"agent": order["node"], "host": order["host"], "port": listener.getsockname()[1]})
        address = self._start_scheduler(self._order["scheduler"]) if self._order.get("scheduler") else None
        for node in self._nodes:
            self._start_agent(node)
        if address is not None:
            with address:
                _say({"scheduler": address.readline().strip()})
        self._watch()

    def _watch(self) -> None:
        selector = selectors.DefaultSelector()
        selector.register(0, selectors.EVENT_READ)
        selector.register(self._wake, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj == 0:
                    line = os.read(0, 4096)
                    if not line:
                        return
                    self._closing = True  # the client closes in order: agents end by themselves
                else:
                    try:
                        self._wake.recv(4096)
                    except BlockingIOError:
                        pass
            self._reap()

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            code = os.waitstatus_to_exitcode(status)
            if self._closing:
                continue
            if pid == self._nursery.pid:
                self._nursery = _NurseryProcess()
                for node in self._nodes:
                    _kill(node.pid)  # their runners are gone with the old one
            elif pid == self._scheduler:
                _say({"scheduler_died": code})
            else:
                for node in self._nodes:
                    if node.pid == pid:
                        self._agent_died(node, code)

    def _agent_died(self, node: _Node, code: int) -> None:
        _say({"agent_died": node.node, "code": code})
        node.restarts += 1
        if node.restarts <= _RESTARTS:
            time.sleep(0.05 * (node.restarts - 1))
            self._start_agent(node)

    def _start_scheduler(self, order: dict[str, Any]) -> TextIO:
        read, write = os.pipe()
        self._scheduler = os.fork()
        if self._scheduler == 0:
            self._enter_child()
            os.close(read)
            from skyward.engine import membership

            membership.run_scheduler(order, write)
            os._exit(0)
        os.close(write)
        return os.fdopen(read)

    def _start_agent(self, node: _Node) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._nursery.admit(theirs)
        theirs.close()
        pid = os.fork()
        if pid == 0:
            self._enter_child()
            self._nursery.forget()
            for other in self._nodes:
                if other is not node:
                    other.listener.close()
            from skyward.engine import membership

            membership.run_agent(node.order, node.listener, ours)
        ours.close()
        node.pid = pid

    def _enter_child(self) -> None:
        """Makes a forked child its own: no wake-ups of the keeper's, and it dies when the keeper does."""
        parent = os.getppid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._wake.close()
        self._wake_write.close()
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)
        os.close(null)
        leftovers.die_with_parent(parent)

    def end(self) -> NoReturn:
        """Ends everything on this machine that belongs to the pool."""
        for pid in [*(node.pid for node in self._nodes), self._scheduler]:
            _kill(pid)
        self._nursery.end()
        leftovers.end_children()
        blobs.remove_directory(sys.argv[1])
        os._exit(0)


class _NurseryProcess:
    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "skyward.nursery"], stdin=theirs.fileno(), stdout=subprocess.DEVNULL
        )
        theirs.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def admit(self, agent: socket.socket) -> None:
        try:
            socket.send_fds(self._control, [b"agent"], [agent.fileno()])
        except OSError:
            pass  # it has just died; _reap starts another one, and the agents again

    def forget(self) -> None:
        self._control.close()

    def end(self) -> None:
        """Closes the nursery's socket, upon which it kills all runners and goes."""
        self._control.close()
        deadline = time.monotonic() + 3
        while time.monotonic() < deadline:
            try:
                if os.waitpid(self._process.pid, os.WNOHANG)[0]:
                    return
            except ChildProcessError:
                return
            time.sleep(0.005)
        _kill(self._process.pid)


def main() -> None:
    """Reads its order from standard input and serves until that is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    nursery = _NurseryProcess()
    os.umask(0o077)  # after the nursery, whose runners keep the user's own
    from skyward.engine import membership

    membership.configure(sys.argv[1])
    line = _read_line()
    if not line:
        nursery.end()
        blobs.remove_directory(sys.argv[1])
        return
    keeper = _Keeper(json.loads(line), nursery)
    try:
        keeper.serve()
    finally:
        keeper.end()


def _notice(number: int, frame: FrameType | None) -> None:
    """Does nothing: the signal only has to wake the selector."""


def _read_line() -> bytes:
    """One line from standard input, and not a byte more: the rest is watched with a selector."""
    data = bytearray()
    while not data.endswith(b"\n"):
        piece = os.read(0, 1 << 16)
        if not piece:
            return b""
        data += piece
    return bytes(data)


def _say(message: dict[str, Any]) -> None:
    try:
        os.write(1, json.dumps(message).encode() + b"\n")
    except OSError:
        pass  # the client is gone; standard input says so next


def _kill(pid: int) -> None:
    if pid > 0:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


if __name__ == "__main__":
    main()
