"""Joins this machine to a pool: dials the client, runs what it orders, ends everything when the place is gone.

    SKYWARD_JOIN=... python3 join.py [--file FILE] [--place N] [--stdin]

Connections to the client: one for control, with lines of JSON; one for each program that runs here, in frames; one for
each connection to an agent, which begins with a one-time id. All but the last use the pool's TLS. One file, standard
library, any Python from 3.8 on.
"""

from __future__ import annotations

import argparse
import base64
import binascii
import hashlib
import hmac
import json
import os
import random
import resource
import select
import signal
import socket
import ssl
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

__all__ = [
    "MARK",
    "STDERR",
    "STDIN",
    "STDOUT",
    "VARIABLE",
    "WAIT",
    "Over",
    "Pump",
    "clean_up",
    "kill",
    "main",
    "read_text",
    "splice",
    "token",
]


# Cleans up after a joiner that was killed: a second small process, which lives as long as a pipe stays open.


def start_guard() -> int:
    """It cleans up if the joiner is killed."""
    reads, writes = os.pipe()
    child = os.fork()
    if child:
        os.close(reads)
        os.waitpid(child, 0)
        return writes
    os.setsid()
    if os.fork():
        os._exit(0)
    os.close(writes)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    running: dict[int, str] = {}
    at_end: list[list[str]] = []
    try:
        with open(reads, "rb") as lines:
            for message in map(json.loads, lines):
                if "program" in message:
                    running[message["program"]] = message["started"]
                elif "at_end" in message:
                    at_end.append(message["at_end"])
                elif "gone" in message:
                    running.pop(message["gone"], None)
        clean_up(running, at_end)
    finally:
        os._exit(0)


def clean_up(running: dict[int, str], at_end: list[list[str]]) -> None:
    for argv in at_end:
        try:
            subprocess.run(argv, stdin=subprocess.DEVNULL, timeout=30, check=False)
        except (OSError, subprocess.TimeoutExpired):
            pass
    for pid, started in list(running.items()):
        kill(pid, started)


def kill(pid: int, started: str) -> None:
    """Its whole group, unless its pid was reused."""
    try:
        if started_at(pid) == started:
            os.killpg(pid, signal.SIGKILL)
    except OSError:
        pass


def started_at(pid: int) -> str:
    """In clock ticks since boot."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[19]
    except OSError:
        return ""


# How a joiner and its client pass bytes on: frames of a program's input and output, and plain connections.


STDIN, STDOUT, STDERR, _EXIT = range(4)
"""Channels of a program's connection: its files, and finally the exit code."""
WAIT = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
_MOST = 1 << 20
_HEADER = struct.Struct("!BI")


def splice(left: socket.socket, right: socket.socket) -> None:
    """Copies both ways until both sides have ended, then closes."""
    other, waiting, speaking = {left: right, right: left}, {left: b"", right: b""}, {left, right}
    with left, right:
        try:
            for end in other:
                end.setblocking(False)
            while speaking or any(waiting.values()):
                poll = select.poll()
                for end in other:
                    reads = end in speaking and not waiting[other[end]]
                    if reads or waiting[end]:
                        poll.register(end, (select.POLLIN if reads else 0) | (select.POLLOUT if waiting[end] else 0))
                ready = {fd for fd, _ in poll.poll()}
                for end in [end for end in other if end.fileno() in ready]:
                    if waiting[end]:
                        waiting[end] = _sent(end, waiting[end])
                    if end in speaking and not waiting[other[end]]:
                        _pass_on(end, other[end], waiting, speaking)
        except OSError:
            pass  # one side is gone; the other learns it by the end of its connection


def _pass_on(
    end: socket.socket, other: socket.socket, waiting: dict[socket.socket, bytes], speaking: set[socket.socket]
) -> None:
    try:
        piece = end.recv(_PIECE)
    except BlockingIOError:
        return
    if piece:
        waiting[other] = _sent(other, piece)
    else:
        speaking.discard(end)
        other.shutdown(socket.SHUT_WR)


def _sent(sock: socket.socket, data: bytes) -> bytes:
    try:
        return data[sock.send(data) :]
    except BlockingIOError:
        return data


class Pump:
    """Copies between a framed TLS connection and files, in one thread: TLS allows one at a time."""

    def __init__(self, sock: ssl.SSLSocket, sources: dict[int, int], sinks: dict[int, int]) -> None:
        self._sock, self._sources, self._sinks = sock, dict(sources), dict(sinks)
        self._outgoing, self._received = bytearray(), bytearray()
        self._backlog: deque[list[Any]] = deque()  # what has come, as channel and piece
        self._code: int | None = None
        sock.setblocking(False)
        for fd in [*self._sources.values(), *self._sinks.values()]:
            os.set_blocking(fd, False)

    def run(self, finish: Callable[[], int] | None = None) -> int | None:
        """Until an exit code comes; None if the connection is lost. With `finish` this side ends, and sends its result
        as exit code.
        """
        finished = False
        try:
            # The side that ends waits for the other to close: what is unread here would take the exit code with it.
            while self._code is None or self._backlog:
                if finish is not None and not self._sources and not finished:
                    self._outgoing += _frame(_EXIT, str(finish()).encode())
                    finished = True
                self._step()
        except OSError:
            pass
        finally:
            for fd in [*self._sources.values(), *self._sinks.values()]:
                os.close(fd)
        return self._code

    def _step(self) -> None:
        poll = select.poll()
        reads = not self._backlog
        poll.register(self._sock, (select.POLLIN if reads else 0) | (select.POLLOUT if self._outgoing else 0))
        for fd in self._sources.values() if len(self._outgoing) < _MOST else ():
            poll.register(fd, select.POLLIN)
        if self._backlog and self._backlog[0][0] in self._sinks:
            poll.register(self._sinks[self._backlog[0][0]], select.POLLOUT)
        ready = dict(poll.poll(0 if reads and self._sock.pending() else None))
        for channel in [channel for channel, fd in self._sources.items() if fd in ready]:
            self._read_source(channel)
        try:
            if self._outgoing:
                del self._outgoing[: self._sock.send(self._outgoing)]
        except WAIT:
            pass
        if reads:
            self._receive()
        elif ready.get(self._sock.fileno(), 0) & (select.POLLHUP | select.POLLERR):
            raise ConnectionError("the connection was lost")
        while self._backlog and self._written(self._backlog[0]):
            self._backlog.popleft()

    def _read_source(self, channel: int) -> None:
        fd = self._sources[channel]
        piece = os.read(fd, _PIECE)
        self._outgoing += _frame(channel, piece)
        if not piece:
            del self._sources[channel]
            os.close(fd)

    def _receive(self) -> None:
        try:
            piece = self._sock.recv(_PIECE)
        except WAIT:
            return
        if not piece:
            raise ConnectionError("the connection has ended")
        self._received += piece
        while len(self._received) >= _HEADER.size:
            channel, size = _HEADER.unpack_from(self._received)
            if size > _MOST:
                raise ConnectionError("what came is not a frame")
            if len(self._received) < _HEADER.size + size:
                return
            data = bytes(self._received[_HEADER.size : _HEADER.size + size])
            del self._received[: _HEADER.size + size]
            if channel == _EXIT:
                self._code = _exit_code(data)
            else:
                self._backlog.append([channel, data])

    def _written(self, entry: list[Any]) -> bool:
        channel, piece = entry
        fd = self._sinks.get(channel)
        if fd is None:
            return True
        try:
            if piece:
                entry[1] = piece[os.write(fd, piece) :]
                return not entry[1]
        except BlockingIOError:
            return False
        except OSError:
            pass
        os.close(self._sinks.pop(channel))
        return True


def _exit_code(data: bytes) -> int:
    try:
        if len(data) < 12:
            return int(data)
    except ValueError:
        pass
    raise ConnectionError("what came is not an exit code")


def _frame(channel: int, data: bytes) -> bytes:
    return _HEADER.pack(channel, len(data)) + data


# What a pool tells a machine that is to join, and where the machine finds it.


MARK = "# skyward-join: "
"""Starts the line with the pool's text in a generated file."""
VARIABLE = "SKYWARD_JOIN"


class Over(Exception):
    """There is no reason to be here any more."""


def read_text(file: str | None, stdin: bool, own: str) -> dict[str, Any]:
    given = os.environ.pop(VARIABLE, "")
    if file is not None:
        given = _first_line(file)
    elif not given and stdin:
        while not given.endswith("\n"):
            piece = os.read(0, 1)  # not one byte more than the line
            if not piece:
                break
            given += piece.decode()
    elif not given and os.path.isfile(own):
        given = _first_line(own, MARK)
    given = given[len(MARK) :] if given.startswith(MARK) else given
    if not given.strip():
        raise Over(f"no pool to join: give --file FILE, or set {VARIABLE}")
    try:
        return json.loads(base64.urlsafe_b64decode(given.strip()))
    except (ValueError, binascii.Error):
        raise Over("this is not the text that a pool has written; copy all of it and nothing else") from None


def _first_line(path: str, mark: str = "") -> str:
    try:
        with open(path) as file:
            line = file.readline()
            found = os.fstat(file.fileno())
            if line.startswith(mark) and found.st_uid not in (0, os.geteuid()):
                raise Over(
                    f"{path} belongs to another user (uid {found.st_uid}), who could lead this machine to a pool of "
                    "theirs. Use a file of your own"
                )
            if line.startswith(mark) and found.st_mode & 0o077:
                raise Over(f"others can read {path}, which holds a secret. Run: chmod 600 {path}")
    except OSError as exc:
        raise Over(f"{path} cannot be read: {exc.strerror}") from None
    return line if line.startswith(mark) else ""


_PLACES = ("SKYWARD_PLACE", "SLURM_PROCID", "JOB_COMPLETION_INDEX", "PMI_RANK", "OMPI_COMM_WORLD_RANK")
# Frameworks believe an engine's ranks before those of the pool, and the two differ: each place is a step of its own.
_DROPPED = (
    *(VARIABLE, "OMP_NUM_THREADS", "PMI_", "PMIX_", "OMPI_COMM_WORLD_"),
    *("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NNODES", "SLURM_JOB_NUM_NODES", "SLURM_NODELIST", "SLURM_STEP"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_GTIDS", "SLURM_TASK"),
)
_DIAL, _FIRST, _SILENT = 5.0, 60.0, 20.0
_TAKEN = 300.0  # a place becomes free when a machine is lost
_KNOCK = 2.0  # between attempts, while a detached run needs nobody at home
_PIECE = 1 << 18


def token(secret: str, pool: str, place: int | None) -> str:
    text = f"{pool}:{'' if place is None else place}"
    return hmac.new(bytes.fromhex(secret), text.encode(), "sha256").hexdigest()


class _Taken(ConnectionError):
    """Every place is taken, for now."""


class _Joiner:
    def __init__(self, text: dict[str, Any], place: int | None, stdin: bool, guard: int) -> None:
        self._addresses = [(str(host), int(port)) for host, port in text["addresses"]]
        self._pool, self._secret = str(text["pool"]), str(text["secret"])
        self._fingerprint, self._patience = str(text["fingerprint"]), float(text["patience"])
        self._place, self._key, self._guard = place, os.urandom(32).hex(), guard
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._tls.check_hostname, self._tls.verify_mode = False, ssl.CERT_NONE  # the fingerprint says who it is
        self._tls.minimum_version = ssl.TLSVersion.TLSv1_3
        self._joined, self._lease, self._heard = False, _FIRST, time.monotonic()
        self._until, self._dials = 0.0, True  # a detached run needs nobody at home until then
        self._grace, self._notice = 30.0, os.path.join(tempfile.mkdtemp(prefix="skyward-join-"), "notice")
        self._running: dict[int, str] = {}  # process ids of programs, with when they were started
        self._staying: set[int] = set()  # those that outlive their connection
        self._at_end = [["rm", "-rf", os.path.dirname(self._notice)]]
        self._outgoing, self._lock = bytearray(), threading.Lock()
        self._poll, (self._wake, self._waker) = select.poll(), socket.socketpair()
        for end in (self._wake, self._waker):
            end.setblocking(False)
        for fd in [self._wake.fileno(), *([0] if stdin else [])]:
            self._poll.register(fd, select.POLLIN)

    def serve(self) -> None:
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._on_notice)
        if signal.getsignal(signal.SIGHUP) is not _disregard:
            signal.signal(signal.SIGHUP, self._on_hangup)
        self._tell_guard({"at_end": self._at_end[0]})
        while True:
            with self._come_home() as control:
                try:
                    self._obey(control)
                except OSError:
                    pass  # the connection was lost
                except (Over, KeyboardInterrupt) as exc:
                    _leave(control, str(exc) or "it was interrupted")
                    raise
            with self._lock:
                self._outgoing.clear()

    def clean_up(self) -> None:
        clean_up(self._running, self._at_end)

    def say(self, kind: str, *fields: str) -> None:
        """Thread-safe; dropped if not connected."""
        with self._lock:
            self._outgoing += _message(kind, *fields)
        self._waker.send(b"x")

    def _on_notice(self, number: int, frame: Any) -> None:
        """A scheduler may send SIGTERM to all processes, which is not the end yet."""
        if not self._joined:
            raise Over("it was stopped before it joined")
        self._give_notice(self._grace)

    def _on_hangup(self, number: int, frame: Any) -> None:
        raise Over("the terminal was closed")

    def _give_notice(self, seconds: float) -> None:
        os.makedirs(os.path.dirname(self._notice), 0o700, exist_ok=True)
        with open(self._notice + ".part", "w") as file:
            file.write(str(time.time() + seconds))
        os.rename(self._notice + ".part", self._notice)

    def _come_home(self) -> ssl.SSLSocket:
        pause, began, refused, told = 0.1, time.monotonic(), 0.0, False
        while True:
            self._stay_away()
            try:
                control = self._dial()
                self._greet(control)
                return control
            except (OSError, ValueError) as exc:
                if self._until:
                    continue
                why, now, taken = str(exc), time.monotonic(), isinstance(exc, _Taken)
                refused = (refused or now) if isinstance(exc, ConnectionRefusedError) else 0.0
            if refused and now - refused > self._patience:
                raise Over(f"the pool is gone: {why}")
            if taken and not told:
                told = True
                _tell(f"the pool {self._pool} does not need this machine now ({why}); waiting for {_TAKEN:.0f} s")
            if taken and now - began > _TAKEN:
                raise Over(f"the pool {self._pool} did not need this machine: {why}")
            if not taken and now - (self._heard if self._joined else began) > self._lease:
                raise Over(f"the pool {self._pool} cannot be reached from here: {why}")
            self._wait(pause * random.uniform(0.5, 1.0))
            pause = min(pause * 2, 5.0)

    def _stay_away(self) -> None:
        """While a detached run has this machine: nobody is at home but at times those who look at the run."""
        until = time.monotonic() + _KNOCK
        while self._until and (not self._dials or time.monotonic() < until):
            self._check_run()
            self._wait(0.5)

    def _check_run(self) -> None:
        if not self._staying:
            raise Over("")
        if time.monotonic() > self._until:
            raise Over("the time of the detached run is over")

    def _dial(self) -> ssl.SSLSocket:
        reasons: list[OSError] = []
        for address in list(self._addresses):
            try:
                sock = self._secured(socket.create_connection(address, _DIAL))
            except OSError as exc:
                reasons.append(type(exc)(exc.errno, f"{address[0]} port {address[1]}: {exc.strerror or exc}"))
                continue
            self._addresses.sort(key=lambda known: known != address)
            return sock
        told = reasons[:1] if self._joined else reasons  # where the pool was comes first; it never was at the others
        kind = ConnectionRefusedError if all(isinstance(r, ConnectionRefusedError) for r in told) else OSError
        raise kind("; ".join(reason.strerror or str(reason) for reason in reasons))

    def _secured(self, sock: socket.socket) -> ssl.SSLSocket:
        try:
            _tune(sock)
            made = self._tls.wrap_socket(sock)
            found = hashlib.sha256(made.getpeercert(True) or b"").hexdigest()
            if not hmac.compare_digest(found, self._fingerprint):
                made.close()
                raise ConnectionError("another program answers there, not this pool (its certificate differs)")
            return made
        except BaseException:
            sock.close()
            raise

    def _greet(self, control: ssl.SSLSocket) -> None:
        proof = token(self._secret, self._pool, self._place)
        name = os.environ.get("SKYWARD_NAME") or socket.gethostname()
        hello = {"place": self._place, "token": proof, "key": self._key, "name": name}
        control.sendall(json.dumps({"join": hello}).encode() + b"\n")
        with control.makefile("rb") as lines:
            answer = json.loads(lines.readline(1 << 16) or b"{}")
        if answer.get("again") or (self._until and "refused" in answer):
            raise _Taken(answer["refused"])
        if "refused" in answer:
            raise Over(f"the pool {self._pool} refused this machine: {answer['refused']}")
        welcome = answer["welcome"]
        self._place, self._lease, self._grace = int(welcome["place"]), float(welcome["lease"]), float(welcome["grace"])
        self._heard = time.monotonic()
        if not self._joined:
            _tell(f"joined {self._pool} as place {self._place}")
        self._joined = True

    def _obey(self, control: ssl.SSLSocket) -> None:
        control.setblocking(False)
        received = b""
        while time.monotonic() - self._heard < _SILENT:
            if self._until:
                self._check_run()
            try:
                with self._lock:
                    if self._outgoing:
                        del self._outgoing[: control.send(self._outgoing)]
                piece = control.recv(_PIECE)
            except WAIT:
                self._wait(1.0, control)
                continue
            if not piece:
                return
            self._heard = time.monotonic()
            *lines, received = (received + piece).split(b"\n")
            for line in lines:
                self._order(*json.loads(line))

    def _wait(self, seconds: float, control: ssl.SSLSocket | None = None) -> None:
        if control is not None:
            self._poll.register(control, select.POLLIN | (select.POLLOUT if self._outgoing else 0))
        ready = {fd for fd, _ in self._poll.poll(seconds * 1000)}
        if control is not None:
            self._poll.unregister(control)
        if self._wake.fileno() in ready:
            self._wake.recv(1 << 12)
        if 0 in ready:
            self._hear(os.read(0, 1 << 12))

    def _hear(self, piece: bytes) -> None:
        if not piece:
            raise Over("the process that held its place has ended")
        for line in piece.splitlines():
            try:
                self._give_notice(float(json.loads(line)["notice"]))
            except (ValueError, KeyError, TypeError):
                pass  # not for us

    def _order(self, kind: str, *fields: Any) -> None:
        if kind == "run":
            self._run(*fields[:-1])
        elif kind == "connect":
            threading.Thread(target=self._connect, args=fields[:-1], daemon=True).start()
        elif kind == "at_end":
            self._at_end.append(fields[0])
            self._tell_guard({"at_end": fields[0]})
        elif kind == "detach":
            self._until, self._dials = time.monotonic() + fields[0], fields[1]
            self.say("detached")
        elif kind == "notice":
            self._give_notice(fields[0])
        elif kind == "end":
            raise Over("")
        elif kind == "ping":
            self.say("pong")

    def _run(self, id: str, argv: list[str], given: dict[str, str], keep: bool) -> None:
        """In this thread: the program dies with its parent, which for the kernel is a thread."""
        env = {name: value for name, value in os.environ.items() if not name.startswith(_DROPPED)}
        env.update(SKYWARD_JOINER=str(os.getpid()), SKYWARD_NOTICE=self._notice)
        pipe, home = subprocess.PIPE, os.environ.get("HOME", "")
        try:
            process = subprocess.Popen(
                argv,
                env={**env, **given},
                cwd=home if os.path.isdir(home) else "/",
                stdin=pipe,
                stdout=pipe,
                stderr=pipe,
                start_new_session=True,
                bufsize=0,
            )
        except OSError as exc:
            self.say("failed", id, f"{argv[0]}: {exc.strerror}")
            return
        self._running[process.pid] = started_at(process.pid)
        if keep:
            self._staying.add(process.pid)
        self._tell_guard({"program": process.pid, "started": self._running[process.pid]})
        threading.Thread(target=self._attend, args=(id, keep, process), daemon=True).start()

    def _attend(self, id: str, keep: bool, process: subprocess.Popen[bytes]) -> None:
        files = (process.stdin, process.stdout, process.stderr)
        stdin, stdout, stderr = (os.dup(file.fileno()) for file in files if file is not None)
        for file in files:
            if file is not None:
                file.close()
        try:
            with self._secured(socket.create_connection(self._addresses[0], _DIAL)) as home:
                home.sendall(json.dumps({"stream": id}).encode() + b"\n")
                Pump(home, {STDOUT: stdout, STDERR: stderr}, {STDIN: stdin}).run(process.wait)
        except OSError as exc:
            self.say("failed", id, f"the machine could not connect to the pool again: {exc}")
        if not keep:
            kill(process.pid, self._running[process.pid])
        process.wait()
        self._running.pop(process.pid, None)
        self._staying.discard(process.pid)
        self._tell_guard({"gone": process.pid})

    def _connect(self, id: str, host: str, port: int) -> None:
        try:
            near = socket.create_connection((host, port), _DIAL)
        except OSError as exc:
            self.say("failed", id, str(exc.strerror or exc))
            return
        try:
            far = socket.create_connection(self._addresses[0], _DIAL)
            far.sendall(id.encode())
        except OSError as exc:
            near.close()
            self.say("failed", id, f"the machine could not connect to the pool again: {exc}")
            return
        for sock in (near, far):
            _tune(sock)
        splice(near, far)

    def _tell_guard(self, message: dict[str, Any]) -> None:
        try:
            os.write(self._guard, json.dumps(message).encode() + b"\n")
        except OSError:
            pass  # it was killed


def _message(kind: str, *fields: str) -> bytes:
    return json.dumps([kind, *fields, 0]).encode() + b"\n"


def _leave(control: ssl.SSLSocket, why: str) -> None:
    try:
        control.settimeout(1.0)
        control.sendall(_message("leaving", why))
    except OSError:
        pass


def _tune(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _tell(text: str) -> None:
    print(f"skyward: {text}", file=sys.stderr, flush=True)


def _disregard(number: int, frame: Any) -> None:
    """A handler: child processes would inherit an ignored signal."""


def _reset() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, _disregard)  # nohup: it stays when the terminal is closed; its programs choose
    for number in signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ}:  # Python itself ignores those
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    resource.setrlimit(
        resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1])
    )  # it would hold the secret
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("0")
    except OSError:
        pass  # it may only be raised here


def main(argv: list[str] | None = None) -> int:
    _reset()
    parser = argparse.ArgumentParser(prog="sky join", description="Makes this machine a node of a pool.")
    parser.add_argument("--file", help="the file, mode 0600, with the text that the pool has given")
    parser.add_argument("--place", type=int, help="which place this is, from 0 on (default: the scheduler's variable)")
    parser.add_argument("--stdin", action="store_true", help="end when standard input ends; may hold the text")
    given = parser.parse_args(argv)
    numbers = [os.environ[name] for name in _PLACES if os.environ.get(name, "").isdigit()]
    place = given.place if given.place is not None else int(numbers[0]) if numbers else None
    joiner: _Joiner | None = None
    try:
        text = read_text(given.file, given.stdin, globals().get("__file__", ""))
        joiner = _Joiner(text, place, given.stdin, start_guard())
        joiner.serve()
    except (Over, KeyboardInterrupt) as exc:
        if str(exc):
            _tell(str(exc))
        return 1 if str(exc) else 0
    finally:
        if joiner is not None:
            joiner.clean_up()
    return 0


if __name__ == "__main__":
    sys.exit(main())
