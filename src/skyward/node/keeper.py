"""The first process on a machine: starts fork server and agents, ends everything when the client is gone.

    client --stdin-->  keeper    lines of JSON: addresses, listen, probe peers; whom to start; dask
    client <--stdout-- keeper    lines of JSON: answers, ports, deaths
    keeper --fork--> fork server --fork--> runners
    keeper --fork--> one agent for each node

Arguments: the pool's directory here, which it removes at the end; the lease and the longest life in seconds; optionally
a file that it touches while the machine is needed.

It ends when its time is over, when all agents have ended, on SIGTERM, and when the client is gone: without a lease (0)
at the end of standard input; with one, when no agent has heard from the client for that long. A detached run has a
steward (`node/steward.py`) in the client's place. On a joined machine (`node/join.py`) it ends with its parent instead
of on SIGTERM, which a scheduler may send to every process.

It imports what runners need before it forks the fork server, then what agents need: forks share memory. It stays
single-threaded, and restarts a dead agent on the same port.
"""

from __future__ import annotations

import errno
import gc
import importlib
import json
import os
import resource
import selectors
import signal
import socket
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from skyward.node import fork_server, processes
from skyward.node.orders import UNANSWERED, ClientToKeeper, KeeperToClient, SchedulerOrder, WorkerOrder, written
from skyward.node.settings import AgentOrder
from skyward.node.terms import Terms, TermsPage
from skyward.transport import blobs, local_sockets
from skyward.transport.backoff import backoff
from skyward.transport.codec import Message, Receiver, handles

if TYPE_CHECKING:
    import subprocess
    from subprocess import Popen

__all__ = ["DaskProcesses", "main", "probe"]


_DASK_RESTARTS = 20
_SCHEDULER = "scheduler"


@dataclass
class _Process:
    popen: Popen[bytes]
    order: SchedulerOrder | WorkerOrder
    restarts: int = 0


class DaskProcesses:
    def __init__(self, umask: int) -> None:
        self._umask = umask
        self._running: dict[str, _Process] = {}  # by dask's name

    def start_scheduler(self, order: SchedulerOrder) -> None:
        """Replaces any other; it reports its address to the client itself."""
        self._start(_SCHEDULER, order)

    def start_worker(self, order: WorkerOrder) -> None:
        name = f"node-{order['node']}"
        known = self._running.get(name)
        if known is None or known.order.get("scheduler") != order["scheduler"]:
            self._start(name, order)

    def ended(self, pid: int, code: int) -> bool:
        name = next((name for name, known in self._running.items() if known.popen.pid == pid), None)
        if name is None:
            return False
        known = self._running.pop(name)
        known.popen.returncode = code
        if name != _SCHEDULER and known.restarts < _DASK_RESTARTS:
            self._start(name, known.order, known.restarts + 1)
        return name == _SCHEDULER

    def end(self) -> None:
        for name in list(self._running):
            self._kill(name)

    def _start(self, name: str, order: SchedulerOrder | WorkerOrder, restarts: int = 0) -> None:
        import subprocess

        self._kill(name)
        popen = subprocess.Popen(
            [sys.executable, "-P", "-m", "skyward.node.dask_worker"],
            stdin=subprocess.PIPE,
            stdout=None if name == _SCHEDULER else subprocess.DEVNULL,  # the keeper's own
            start_new_session=True,
            umask=self._umask if name != _SCHEDULER else -1,
        )
        assert popen.stdin is not None
        try:
            popen.stdin.write(json.dumps({**order, "keeper": os.getpid()}).encode() + b"\n")
            popen.stdin.close()
        except BrokenPipeError:
            pass  # it has just died; `ended` is told next
        self._running[name] = _Process(popen, order, restarts)

    def _kill(self, name: str) -> None:
        known = self._running.pop(name, None)
        if known is not None:
            try:
                os.killpg(known.popen.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            known.popen.wait()


_RESTARTS = 20
_PAUSES = 0.2, 5.0  # between attempts: the first one, and the longest
_FILES = 65536


@dataclass
class _Node:
    node: int
    listener: socket.socket
    index: int
    order: AgentOrder
    pid: int = 0
    restarts: int = 0
    left: bool = False


class _Keeper:
    def __init__(
        self,
        directory: str,
        lease: float,
        ttl: float,
        file: str | None,
        fork_server: _ForkServerProcess,
        umask: int,
        joiner: int = 0,
    ) -> None:
        self._joiner = joiner
        self._directory = self._scratch = directory
        self._fork_server, self._umask, self._dask = fork_server, umask, DaskProcesses(umask)
        self._listener: socket.socket | None = None
        self._nodes: list[_Node] = []
        self._lease, self._ttl, self._file, self._born = lease, ttl, file, time.monotonic()
        self._renewed = 0.0
        self._page = TermsPage(0)  # shared with the agents: when one last heard of the client, and until when it lasts
        self._ending = False
        self._steward: subprocess.Popen[bytes] | None = None
        self._pauses, self._next_try = backoff(*_PAUSES), 0.0  # after what could not be started
        self._receiver = Receiver(ClientToKeeper, self)
        self._wake, self._wake_write = socket.socketpair()
        for end in (self._wake, self._wake_write):
            end.setblocking(False)

    def serve(self) -> None:
        processes.adopt_orphans()
        signal.signal(signal.SIGCHLD, _notice)
        signal.signal(signal.SIGTERM, self._on_sigterm)
        if self._joiner:
            processes.die_with_parent(self._joiner, signal.SIGTERM)
        signal.set_wakeup_fd(self._wake_write.fileno(), warn_on_full_buffer=False)
        selector = selectors.DefaultSelector()
        selector.register(0, selectors.EVENT_READ)
        selector.register(self._wake, selectors.EVENT_READ)
        received = b""
        while not self._over():
            for key, _ in selector.select(self._wait()):
                if key.fileobj != 0:
                    try:
                        self._wake.recv(4096)
                    except BlockingIOError:
                        pass
                    continue
                piece = os.read(0, 1 << 16)
                if not piece:
                    if not self._lease or not self._nodes:
                        return  # the client is gone
                    selector.unregister(0)  # its connection is; the lease says how long we wait for another
                *lines, received = (received + piece).split(b"\n")
                for line in lines:
                    self._receiver.receive(json.loads(line), [])
            self._reap()

    def _wait(self) -> float:
        """Until something is due, or a signal."""
        terms = self._terms
        due = [time.monotonic() + 60.0, terms.deadline]
        if self._lease:
            due.append(terms.heard + self._lease)
        if self._next_try and not self._fork_server.killed:
            due.append(self._next_try)
        if self._file:
            due.append(max(time.monotonic() + 1.0, self._renewed + self._lease / 8))
        return max(0.0, min(due) - time.monotonic())

    def _over(self) -> bool:
        now, terms = time.monotonic(), self._terms
        why = "end" if self._ending else terms.over(now, self._lease)
        if self._file and not why and now - terms.heard < self._lease / 2 and now - self._renewed > self._lease / 8:
            self._renewed = now
            _touch(self._file)
        if why == "deadline":
            _say(KeeperToClient.Over())
        if self._file and terms.over(now, 0.0):
            _write_end(self._file)
        return bool(why) or (bool(self._nodes) and all(node.left for node in self._nodes))

    @property
    def _terms(self) -> Terms:
        found = self._page.read().hear(self._born)
        return replace(found, deadline=min(found.deadline, self._born + self._ttl))

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        meant = os.getppid() != self._joiner or os.path.exists(os.path.join(self._directory, "ending"))
        self._ending = self._ending or not self._joiner or meant

    @handles(ClientToKeeper.Look)
    def _look(self, order: ClientToKeeper.Look) -> None:
        from skyward.node.check_network import addresses  # not for a pool on one machine

        _say(KeeperToClient.Addresses(addresses()))

    @handles(ClientToKeeper.Probe)
    def _probe(self, order: ClientToKeeper.Probe) -> None:
        ends = {name: (host, port) for name, (host, port) in order.peers.items()}
        _say(KeeperToClient.Probed(probe(ends, order.timeout)))

    @handles(ClientToKeeper.Run)
    def _hold_run(self, order: ClientToKeeper.Run) -> None:
        import subprocess

        argv = [sys.executable, "-P", "-m", "skyward.node.steward"]
        self._steward = subprocess.Popen(argv, stdin=subprocess.PIPE, umask=0o077)
        self._tell_steward(json.dumps({**order.order, "umask": self._umask}).encode())

    @handles(ClientToKeeper.Go)
    def _start_run(self, order: ClientToKeeper.Go) -> None:
        self._tell_steward(b"go")

    def _tell_steward(self, line: bytes) -> None:
        if self._steward is not None and self._steward.stdin is not None:
            try:
                self._steward.stdin.write(line + b"\n")
                self._steward.stdin.flush()
            except BrokenPipeError:
                pass  # its end is seen next

    @handles(ClientToKeeper.DaskScheduler)
    def _start_scheduler(self, order: ClientToKeeper.DaskScheduler) -> None:
        self._dask.start_scheduler(order.scheduler)

    @handles(ClientToKeeper.DaskWorker)
    def _start_worker(self, order: ClientToKeeper.DaskWorker) -> None:
        self._dask.start_worker(order.worker)

    @handles(ClientToKeeper.Listen)
    def _listen(self, order: ClientToKeeper.Listen) -> None:
        if self._listener is not None:
            self._listener.close()
        try:
            self._listener = _listener(order.host)
        except OSError:
            self._listener = None
        _say(KeeperToClient.Listening(self._listener.getsockname()[1] if self._listener is not None else None))

    @handles(ClientToKeeper.Start)
    def _start(self, order: ClientToKeeper.Start) -> None:
        if order.own_scratch:
            self._scratch = blobs.make_directory()
            Path(self._directory, "scratch").write_text(self._scratch)  # for whoever cleans up if we are killed
        work = Path(self._directory, "work")  # on other machines, where bodies start
        if os.path.exists(archive := os.path.join(self._directory, "includes.tar")):
            from skyward.transport import includes

            with open(archive, "rb") as file:
                includes.unpack(file, work)
            os.unlink(archive)
        work.mkdir(0o700, exist_ok=True)
        self._page = TermsPage(len(order.nodes))  # before they are forked
        for index, node in enumerate(order.nodes):
            place: list[Any]
            if node["local"]:
                path = os.path.join(self._directory, f"agent-{node['node']}")
                listener, place = local_sockets.listen(path), [path]
            else:
                listener, self._listener = self._listener, None
                if listener is None or listener.getsockname()[0] != node["host"]:
                    listener = _listener(node["host"])
                place = [node["host"], listener.getsockname()[1]]
            self._page.slot(index).hear(time.monotonic())
            self._nodes.append(_Node(node["node"], listener, index, node))
            _say(KeeperToClient.Agent(node["node"], place, self._scratch))
        self._start_missing()

    def _reap(self) -> None:
        for pid, code in processes.ended_children():
            if pid == self._fork_server.pid:
                self._fork_server.forget()
                self._fork_server.pid, self._fork_server.killed = 0, False
                for node in self._nodes:
                    _kill(node.pid)  # their runners are gone with it
            elif self._steward is not None and pid == self._steward.pid:
                self._steward.returncode, self._ending = code, True  # nobody keeps the run, nor its journal
            elif self._dask.ended(pid, code):
                _say(KeeperToClient.SchedulerDied(code))
            else:
                for node in self._nodes:
                    if node.pid == pid:
                        self._agent_died(node, code)
        self._start_missing()

    def _agent_died(self, node: _Node, code: int) -> None:
        node.pid = 0
        if code == 0:
            node.left = not self._terms.epoch  # after the client's `bye`; a run may open its pool again
            return
        _say(KeeperToClient.AgentDied(node.node, code))
        node.restarts += 1
        if code == UNANSWERED:
            self._fork_server.kill()
        if node.restarts > _RESTARTS:
            node.listener.close()  # whoever connects is refused, and does not wait for an answer
        time.sleep(0.05 * (min(node.restarts, _RESTARTS) - 1))

    def _start_missing(self) -> None:
        if time.monotonic() < self._next_try or self._fork_server.killed:
            return
        try:
            if not self._fork_server.pid:
                self._fork_server = _ForkServerProcess(self._umask)
            for node in self._nodes:
                if not node.pid and not node.left and node.restarts <= _RESTARTS:
                    self._start_agent(node)
            self._pauses, self._next_try = backoff(*_PAUSES), 0.0
        except OSError as exc:
            print(f"a process could not be started: {exc}", file=sys.stderr, flush=True)
            self._next_try = time.monotonic() + next(self._pauses)

    def _start_agent(self, node: _Node) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._fork_server.admit(theirs)
            pid = os.fork()
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        if pid == 0:
            self._become_agent(node, ours)
        ours.close()
        node.pid = pid

    def _become_agent(self, node: _Node, fork_server: socket.socket) -> NoReturn:
        try:
            self._enter_child()
            self._fork_server.forget()
            for other in self._nodes:
                if other is not node:
                    other.listener.close()
            processes.rename("skyward-agent")
            from skyward.node.agent import run_agent

            slot = self._page.slot(node.index, self._wake_keeper)
            run_agent(node.order, self._scratch, node.listener, fork_server, slot)
        finally:
            os._exit(1)

    def _enter_child(self) -> None:
        parent = os.getppid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends with the keeper
        self._wake.close()
        _detach()
        processes.die_with_parent(parent)

    def _wake_keeper(self) -> None:
        try:
            self._wake_write.send(b"x")
        except OSError:
            pass  # full: it will wake anyway

    def end(self) -> NoReturn:
        for node in self._nodes:
            _kill(node.pid)
        self._dask.end()
        if self._steward is not None and self._steward.returncode is None:
            _kill(self._steward.pid)  # and its program with it
        self._fork_server.end()
        processes.end_children()
        blobs.remove_directory(self._scratch)
        blobs.remove_directory(self._directory)
        if self._joiner and os.getppid() != self._joiner:  # it was killed, and whoever cleans up for it may be, too
            blobs.remove_directory(os.path.dirname(os.environ["SKYWARD_NOTICE"]))
        os._exit(0)


class _ForkServerProcess:
    """The first is forked; later ones are new processes, because the keeper holds keys by then."""

    def __init__(self, umask: int | None = None) -> None:
        self.killed = False  # and not reaped yet: an agent that begins now would have to end with it
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if umask is None:
            self.pid = os.fork()
            if self.pid == 0:
                self._control.close()
                _detach()
                fork_server.serve(theirs)
                os._exit(0)
        else:
            import subprocess

            argv = [sys.executable, "-P", "-m", "skyward.node.fork_server"]
            try:
                process = subprocess.Popen(argv, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, umask=umask)
            except OSError:
                self._control.close()
                theirs.close()
                raise
            self.pid, process.returncode = process.pid, 0  # the keeper waits for all its children by itself
        theirs.close()

    def admit(self, agent: socket.socket) -> None:
        try:
            socket.send_fds(self._control, [b"agent"], [agent.fileno()])
        except OSError:
            pass  # it has just died; _reap starts another one, and the agents again

    def kill(self) -> None:
        self.killed = self.pid > 0
        _kill(self.pid)

    def forget(self) -> None:
        self._control.close()

    def end(self) -> None:
        self._control.close()
        deadline = time.monotonic() + 3
        while self.pid and time.monotonic() < deadline:
            try:
                if os.waitpid(self.pid, os.WNOHANG)[0]:
                    return
            except ChildProcessError:
                return
            time.sleep(0.005)
        _kill(self.pid)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    processes.leave_terminal()  # before anything is forked
    directory = sys.argv[1]
    _allow_many_files()
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))  # it would hold keys
    gc.collect()
    gc.freeze()  # pages that the collector does not touch stay shared with what is forked
    fork_server = _ForkServerProcess()
    joiner = int(os.environ.get("SKYWARD_JOINER", "0"))  # runners look at it, too
    umask = os.umask(0o077)  # after the fork server: user code keeps the user's own
    Path(directory, "keeper.pid").write_text(str(os.getpid()))
    file = sys.argv[4] if len(sys.argv) > 4 else None
    keeper = _Keeper(directory, float(sys.argv[2]), float(sys.argv[3]), file, fork_server, umask, joiner)
    importlib.import_module("skyward.node.agent")  # once for all agents, while the client prepares its order
    gc.collect()
    gc.freeze()
    try:
        keeper.serve()
    finally:
        keeper.end()


def _notice(number: int, frame: FrameType | None) -> None:
    """The signal only has to wake the selector."""


def _detach() -> None:
    """Closes the client's pipes in a child: each side must notice when the other ends."""
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.close(null)


def _touch(path: str) -> None:
    try:
        os.utime(path)
    except OSError:
        pass  # a machine without such a file, or one that we may not write


def _write_end(path: str) -> None:
    """Has the machine shut down at once (`machines/cloud.py: lease_script`)."""
    try:
        Path(path).write_text("end\n")
    except OSError:
        pass  # it ends when nobody renews its lease


def _allow_many_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def _listener(host: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=64)


def probe(peers: dict[str, tuple[str, int]], timeout: float) -> dict[str, str]:
    selector = selectors.DefaultSelector()
    answers: dict[str, str] = {}
    for name, (host, port) in peers.items():
        sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        sock.setblocking(False)
        code = sock.connect_ex((host, port))
        if code in (0, errno.EINPROGRESS):
            selector.register(sock, selectors.EVENT_WRITE, name)
        else:
            answers[name] = os.strerror(code)
            sock.close()
    deadline = time.monotonic() + timeout
    while selector.get_map() and (left := deadline - time.monotonic()) > 0:
        for key, _ in selector.select(left):
            sock = key.fileobj
            assert isinstance(sock, socket.socket)
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            answers[key.data] = os.strerror(code) if code else ""
            selector.unregister(sock)
            sock.close()
    for key in list(selector.get_map().values()):
        answers[key.data] = f"no answer within {timeout:g} s"
        assert isinstance(key.fileobj, socket.socket)
        key.fileobj.close()
    selector.close()
    return answers


def _say(message: Message) -> None:
    try:
        os.write(1, written(message) + b"\n")
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
