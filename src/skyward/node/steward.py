"""Keeps a detached run on node 0: starts its program, keeps journal and output, renews leases, enforces the deadline.

    keeper --order, go--> steward --starts--> driver (the user's program)
    agents <--terms-- steward <--adopt-- driver          a socket in the run's own directory
                      steward <--stop, status-- viewer   the same socket

It runs no user code, and holds the pool's client identity in memory only. `node/run_table.py` decides; this does it.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pkgutil
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from skyward.errors import SkywardError
from skyward.node import processes
from skyward.node.orders import KeeperToClient, RunOrder, written
from skyward.node.peers import accept_all
from skyward.node.run_files import fetch
from skyward.node.run_folder import (
    FOLDER,
    JOURNAL,
    OUTPUT,
    PROGRAM,
    RESERVE,
    RESULTS,
    RETURNED,
    RUN,
    RUN_NAME,
    RunFolder,
)
from skyward.node.run_table import Action, Event, Run
from skyward.transport import includes, local_sockets, private
from skyward.transport.codec import Message
from skyward.transport.journal import Journal
from skyward.transport.link import greet

__all__ = ["Agents", "Leases", "OutputFile", "main"]

_NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}  # they are for the nodes' processes
_REACH = 10.0
_AT_ONCE = 16
_LONGEST = 3e8
_PAUSES = 0.0, 1.0, 5.0  # before other machines are told to end, should one not have heard it
_CLOSING = 5.0  # before the deadline, beside the pool's grace
_COPYING = 60.0  # before the deadline, with `results=`; less in a short run
_AGAIN = 10.0  # between copies once the machine is being taken away
_LONGEST_QUESTION = 1 << 20


class Agents(Protocol):
    def tell(self, node: int, word: dict[str, Any]) -> None:
        """OSError or PermissionError if it was not taken."""
        ...


class Leases:
    """Tells agents how long they live, in words with growing numbers; `end` is the last."""

    def __init__(self, nodes: Sequence[int], agents: Agents) -> None:
        self._nodes, self._agents, self._lock = tuple(nodes), agents, threading.Lock()
        self.epoch, self._serial, self.since = 0, 0, ""

    def tell(self, left: float, drain: float, end: bool = False, nodes: Sequence[int] | None = None) -> dict[int, str]:
        """Which nodes did not take it, and why."""
        with self._lock:
            self._serial += 1
            word = {"terms": self.epoch, "serial": self._serial, "left": float(left), "drain": float(drain)}
            word |= {"end": end, "by": self.since}
        told: tuple[int, ...] = self._nodes if nodes is None else tuple(nodes)
        with ThreadPoolExecutor(_AT_ONCE, "skyward-terms") as threads:
            answers = threads.map(partial(self._tell, word), told)
            return {node: why for node, why in zip(told, answers, strict=True) if why}

    def _tell(self, word: dict[str, Any], node: int) -> str:
        try:
            self._agents.tell(node, word)
        except (OSError, ValueError) as exc:
            return str(exc) or type(exc).__name__
        return ""


class _Agents:
    """Over local sockets, or TLS with the pool's client identity."""

    def __init__(self, order: RunOrder) -> None:
        self._places = {agent["node"]: agent["place"] for agent in order.agents}
        self._context: Any = None
        if order.identity is not None:
            from skyward.transport.certificates import Identity, context

            self._context = context(Identity(**order.identity), server=False)

    def tell(self, node: int, word: dict[str, Any]) -> None:
        with contextlib.closing(self._connected(node)) as sock:
            answer = greet(sock, word, time.monotonic() + _REACH)
        if "refused" in answer:
            raise PermissionError(answer["refused"])

    def _connected(self, node: int) -> socket.socket:
        place = self._places[node]
        if self._context is None:
            return local_sockets.connect(place[0], _REACH)
        from skyward.transport.certificates import secure
        from skyward.transport.roles import node_role

        reached = socket.create_connection((place[0], place[1]), timeout=_REACH)
        return secure(reached, self._context, _REACH, node_role(node))


class _Adoption:
    """Who has the run's machines: one living process at a time."""

    def __init__(self, order: RunOrder) -> None:
        self._order, self._lock, self._pid = order, threading.Lock(), 0

    @property
    def pid(self) -> int:
        """0 if nobody has them."""
        return self._pid

    def ask(self, pid: int, wanted: dict[str, Any], epoch: int) -> dict[str, Any]:
        with self._lock:
            if self._pid and _lives(self._pid):
                return {
                    "refused": f"process {self._pid} has the machines of this run. A run has one pool at a time: in a "
                    "function of sky.detach it is open already, as `>> sky`."
                }
            other = {name: (value, self._order.wanted.get(name)) for name, value in wanted.items()}
            differing = [f"{name}={new!r} instead of {old!r}" for name, (new, old) in other.items() if new != old]
            if differing:
                text = f"the pool asks for {', '.join(differing)}: the run was started with other machines"
                return {
                    "refused": f"{text}. Open the pool that it was started for; a second one cannot be opened here."
                }
            self._pid = pid
            placed = {**self._order.placed, "identity": self._order.identity}
            return {"epoch": epoch, "placed": placed}

    def release(self, pid: int) -> None:
        with self._lock:
            if self._pid == pid:
                self._pid = 0


class Steward:
    def __init__(self, order: RunOrder, keeper: int, clock: Callable[[], float]) -> None:
        self._order, self._keeper, self._clock = order, keeper, clock
        self._run, self._epoch = Run(restarts=order.restarts), 0
        self._end = clock() + min(order.left, _LONGEST)
        self._hold, self._copying = order.hold, threading.Lock()
        self._closing = order.grace + _CLOSING + (min(_COPYING, order.left / 10) if order.results else 0.0)
        self._since = clock()  # of the present state
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._driver: subprocess.Popen[bytes] | None = None
        folder = private.make(Path(order.folder).parent, Path(order.folder).name)
        private.make(folder, RESULTS)
        self._cwd = order.cwd
        if order.program:
            self._cwd = str(folder / PROGRAM)
            with open(order.program, "rb") as archive:
                includes.unpack(archive, folder / PROGRAM)
            os.unlink(order.program)
        self._journal = Journal(folder / JOURNAL, create=True)
        self._output = OutputFile(folder / OUTPUT)
        self._leases = Leases([agent["node"] for agent in order.agents], _Agents(order))
        self._adoption = _Adoption(order)
        self._others = [agent["node"] for agent in order.agents if agent["node"] not in order.here]  # to be ended
        self._sleep: Callable[[float], None] = time.sleep
        self._socket = local_sockets.listen(order.socket)

    def serve(self) -> None:
        head = {"socket": self._order.socket, "results": self._order.results, **self._order.head}
        self._journal.append({"fact": "head", "time": time.time(), **head})
        self._raise_epoch()
        failed = [f"node {node}: {why}" for node, why in self._renew().items()]
        if why := self._copied(over=False):
            failed.append(f"results= cannot be used: {why}")
        if failed:
            say(KeeperToClient.RunRefused("; ".join(failed)))
            return
        if self._order.results and self._order.notices:
            threading.Thread(target=self._copy_at_notice, name="skyward-notice", daemon=True).start()
        for act in (self._hear_keeper, self._accept, self._keep_leases):
            threading.Thread(target=act, name=f"skyward-{act.__name__.strip('_')}", daemon=True).start()
        say(KeeperToClient.RunHeld())
        while self._run.state != "over":
            self.handle(self._next())

    def stop(self) -> None:
        self._events.put(Event("stop"))

    def handle(self, event: Event) -> None:
        before = self._run.state
        self._run, actions = self._run.step(event)
        if self._run.state != before:
            self._since = self._clock()
        for action in actions:
            self._do(action)

    def _next(self) -> Event:
        order, state = self._order, self._run.state
        limits = {"deadline": self._end - (0.0 if state in ("held", "holding") else self._closing)}
        match state:
            case "held":
                limits["late"] = self._since + order.go_within
            case "stopping":
                limits = {"grace": min(self._since + order.grace + _CLOSING, self._end)}
            case "holding":
                limits["hold"] = self._since + self._hold
            case _:
                pass
        name = min(limits, key=limits.__getitem__)
        try:
            return self._events.get(timeout=max(0.0, min(limits[name] - self._clock(), 1e6)))
        except queue.Empty:
            if state == "stopping":
                self._since = self._clock()  # once more, should it not be gone
            return Event(name)  # type: ignore[arg-type]

    def _do(self, action: Action) -> None:
        match action.act:
            case "write":
                self._write(action)
            case "raise epoch":
                self._raise_epoch()
                self._renew()
            case "start driver":
                self._start_driver()
            case "stop driver":
                self._signal(signal.SIGTERM)
            case "kill driver":
                self._signal(signal.SIGKILL)
            case "end others":
                self._end_others()
            case "copy" if self._order.results:
                why = self._copied(over=True)
                self._hold = self._order.hold if why else self._order.hold_copied
                self._output.make_room()
                self._journal.append({"fact": "copied", "time": time.time(), "why": why})
                self._since = self._clock()
            case "copy":
                pass
            case "end all":
                self._end_others()
                self._tell_end(self._order.here)  # the last ones: their keeper ends us, too

    def _write(self, action: Action) -> None:
        fact: dict[str, Any] = {"fact": action.why.partition(":")[0], "time": time.time(), "epoch": self._epoch}
        if action.why.startswith(("ended", "restarted")):
            self._output.settle()
            fact |= {"why": action.why.partition(": ")[2], "code": action.code, "output": self._output.size}
            fact["result"] = Path(self._order.folder, RETURNED).exists()
        self._output.make_room()
        self._journal.append(fact)
        if action.why.startswith("ended"):
            self._output.end()
        if action.why == "started":
            say(KeeperToClient.RunStarted())

    def _copied(self, over: bool) -> str:
        """Why the run's files could not be copied to where its user wants them; empty if they are on disk there."""
        if not self._order.results:
            return ""
        to = Path(self._order.results).expanduser()
        try:
            with self._copying:
                fetch(self._order.head["name"], RunFolder(self._order.folder, ""), to, over)
                for path in (to, *to.rglob("*")) if over else ():
                    if not path.is_symlink():
                        fd = os.open(path, os.O_RDONLY)
                        os.fsync(fd)
                        os.close(fd)
        except (OSError, SkywardError) as exc:
            return str(exc)
        return ""

    def _copy_at_notice(self) -> None:
        pkgutil.resolve_name(self._order.notices)()
        while True:
            self._copied(over=False)
            time.sleep(_AGAIN)

    def _raise_epoch(self) -> None:
        """On disk before anybody knows it: a steward never repeats a number."""
        self._epoch += 1
        self._journal.append({"fact": "epoch", "time": time.time(), "epoch": self._epoch})
        self._leases.epoch = self._epoch
        self._leases.since = f"start {self._epoch} of the run's program, at {time.strftime('%H:%M:%S')}"

    def _renew(self) -> dict[int, str]:
        return self._leases.tell(max(0.0, self._end - self._clock()), self._order.drain)

    def _end_others(self) -> None:
        """A node that cannot be told ends with its lease."""
        for pause in _PAUSES:
            self._sleep(pause if self._others else 0.0)
            self._others = self._tell_end(self._others)

    def _tell_end(self, nodes: Sequence[int]) -> list[int]:
        return list(self._leases.tell(0.0, 0.0, end=True, nodes=nodes)) if nodes else []

    def _start_driver(self) -> None:
        order = self._order
        env = {**os.environ, **order.env, RUN: order.socket, FOLDER: order.folder, "PYTHONUNBUFFERED": "1"}
        env |= {RUN_NAME: order.head["name"], **_NO_GPU}
        env["SKYWARD_RESTART"] = str(order.restarts - self._run.restarts)
        read, write = os.pipe()
        stdin = self._input()
        try:
            self._driver = subprocess.Popen(
                order.argv,
                cwd=self._cwd,
                env=env,
                stdin=stdin,
                stdout=write,
                stderr=write,
                start_new_session=True,
                umask=order.umask,
            )
        except OSError as exc:
            os.write(write, f"the program could not be started: {exc}\n".encode())
            self._events.put(Event("exited", 127))
        else:
            threading.Thread(target=self._wait, args=(self._driver,), name="skyward-driver", daemon=True).start()
        finally:
            os.close(write)
            if stdin >= 0:
                os.close(stdin)
        self._output.follow(read)

    def _input(self) -> int:
        """The driver's input, in memory: it may hold secrets."""
        if not self._order.payload:
            return subprocess.DEVNULL
        made = os.memfd_create("skyward-call")
        with open(made, "wb", closefd=False) as file:
            file.write(base64.b64decode(self._order.payload))
        os.lseek(made, 0, os.SEEK_SET)
        return made

    def _wait(self, driver: subprocess.Popen[bytes]) -> None:
        self._events.put(Event("exited", driver.wait()))

    def _signal(self, number: int) -> None:
        """The program first, at the end its group: a child of it may be what stopped it."""
        if self._driver is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._driver.pid, number) if number == signal.SIGKILL else os.kill(self._driver.pid, number)

    # threads

    def _hear_keeper(self) -> None:
        for line in sys.stdin.buffer:
            if line.strip() == b"go":
                self._events.put(Event("go"))

    def _keep_leases(self) -> None:
        while True:
            time.sleep(self._order.lease / 8)
            self._renew()

    def _accept(self) -> None:
        def take(sock: socket.socket, _: str) -> None:
            threading.Thread(target=self._answer, args=(sock,), name="skyward-answer", daemon=True).start()

        accept_all(self._socket, take)

    def _answer(self, sock: socket.socket) -> None:
        pid = 0
        try:
            with sock, sock.makefile("rb") as file:
                local_sockets.check_peer(sock)
                question: dict[str, Any] = json.loads(file.readline(_LONGEST_QUESTION))
                answer: dict[str, Any] = {"state": self._run.state, "epoch": self._epoch, "now": time.time()}
                match question.get("do"):
                    case "adopt":
                        pid = local_sockets.peer_pid(sock)
                        answer = self._adoption.ask(pid, question["wanted"], self._epoch)
                        pid = 0 if "refused" in answer else pid
                    case "stop":
                        self.stop()
                    case _:
                        answer |= {"left": self._end - self._clock(), "pid": self._adoption.pid}
                sock.sendall(json.dumps(answer).encode() + b"\n")
                if pid:
                    file.read()  # until its pool is closed, or it has ended
                    self._adoption.release(pid)  # before it hears that we have let go
        except (OSError, ValueError, KeyError, AttributeError):
            pass  # whoever asked has gone, or is none of ours
        finally:
            if pid:
                self._adoption.release(pid)


def _lives(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}") and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def say(message: Message) -> None:
    try:
        os.write(1, written(message) + b"\n")
    except OSError:
        pass  # whoever submitted the run has left


def _ignore(number: int, frame: object) -> None:
    """A handler: the program would inherit an ignored signal."""


def boot_clock() -> float:
    """Seconds, also while a computer sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def main() -> None:
    keeper = os.getppid()
    processes.die_with_parent(keeper)
    processes.rename("skyward-steward")
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, _ignore)
    order = RunOrder(**json.loads(sys.stdin.buffer.readline()))
    try:
        steward = Steward(order, keeper, boot_clock)
    except (OSError, SkywardError) as exc:
        say(KeeperToClient.RunRefused(f"the run's folder {order.folder} cannot be used: {exc}"))
        return
    if "SLURM_JOB_ID" in os.environ:  # scancel, and what has more priority, tell all processes of a job, then kill them
        signal.signal(signal.SIGTERM, lambda number, frame: steward.stop())
    steward.serve()


_MOST = 256 << 20
_TAIL = 1 << 20
_RESERVE = 16 << 20
_SETTLING = 2.0  # for a process that the program left, and that holds its output open


class OutputFile:
    """What the program prints, as a file that does not fill the disk: its beginning and its end.

    Reserves room for the end of the journal and the last lines.
    """

    def __init__(self, path: Path, most: int = _MOST, tail: int = _TAIL, reserve: int = _RESERVE) -> None:
        self._most, self._longest_tail, self.size = most, tail, 0
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._reserve = path.with_name(RESERVE)
        with contextlib.suppress(OSError), open(self._reserve, "xb") as file:
            os.posix_fallocate(file.fileno(), 0, reserve)
        self._tail: deque[bytes] = deque()
        self._left_out = self._tail_size = 0
        self._full = False
        self._follower: threading.Thread | None = None

    def follow(self, pipe: int) -> None:
        """Copies from the pipe, in a thread, until all its writers are gone."""
        self._follower = threading.Thread(target=self._copy, args=(pipe,), name="skyward-output", daemon=True)
        self._follower.start()

    def settle(self) -> None:
        """After the program's end: its last output is in the file."""
        if self._follower is not None:
            self._follower.join(_SETTLING)
        if self._tail:
            self.make_room()
            self._append(f"\n[{self._left_out - self._tail_size:,} bytes are left out here]\n".encode())
            self._append(b"".join(self._tail))
            self._tail.clear()

    def make_room(self) -> None:
        """If the disk is full, gives up the reserve for what is written next."""
        if self._full:
            self._reserve.unlink(missing_ok=True)
            self._full = False

    def end(self) -> None:
        """Nothing more is written: the reserve is of no use."""
        self._reserve.unlink(missing_ok=True)

    def write(self, data: bytes) -> None:
        if self.size + len(data) <= self._most and not self._full and self._append(data):
            return
        self._tail.append(data)
        self._left_out += len(data)
        self._tail_size += len(data)
        while self._tail_size - len(self._tail[0]) > self._longest_tail:
            self._tail_size -= len(self._tail.popleft())

    def _append(self, data: bytes) -> bool:
        try:
            self.size += os.write(self._fd, data)
        except OSError:
            self._full = True
            return False
        return True

    def _copy(self, pipe: int) -> None:
        with open(pipe, "rb", buffering=0) as file:
            while data := file.read(1 << 16):
                self.write(data)


if __name__ == "__main__":
    main()
