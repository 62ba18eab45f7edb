"""Joins this machine to a pool: dials the client, runs what it orders, ends everything when the place is gone.

    SKYWARD_JOIN=... python3 join.py [--file FILE] [--place N] [--stdin]

    joiner ══ TLS ══ client     control: lines of JSON; orders one way, what became of them the other
    joiner ══ TLS ══ client     one for each program that it runs: input, output and exit code, in frames
    joiner ───────── client     one for each connection to an agent, which has TLS of its own; begins with a one-time id

It is the first thing of ours on a machine: one file, the standard library only, any Python from 3.8 on. A second small
process in a session of its own cleans up when the joiner was killed.
"""

from __future__ import annotations

import argparse
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
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

from skyward.node.join_guard import clean_up, kill, start_guard, started_at
from skyward.node.join_streams import STDERR, STDIN, STDOUT, WAIT, Pump, splice
from skyward.node.join_text import VARIABLE, Over, read_text

__all__ = ["main", "token"]

_PLACES = ("SKYWARD_PLACE", "SLURM_PROCID", "JOB_COMPLETION_INDEX", "PMI_RANK", "OMPI_COMM_WORLD_RANK")
_DROPPED = (VARIABLE, "OMP_NUM_THREADS")
_DIAL, _FIRST, _SILENT = 5.0, 60.0, 20.0
_TAKEN = 300.0  # a place becomes free when a machine is lost
_PIECE = 1 << 18


def token(secret: str, pool: str, place: int | None) -> str:
    """Proves that somebody was told the secret of a pool: for one place or, without a number, for any."""
    text = f"{pool}:{'' if place is None else place}"
    return hmac.new(bytes.fromhex(secret), text.encode(), "sha256").hexdigest()


class _Taken(ConnectionError):
    """Every place is taken, for now."""


class _Joiner:
    """One place of a pool: keeps a control connection, and serves the orders that come over it."""

    def __init__(self, text: dict[str, Any], place: int | None, stdin: bool, guard: int) -> None:
        self._addresses = [(str(host), int(port)) for host, port in text["addresses"]]
        self._pool, self._secret = str(text["pool"]), str(text["secret"])
        self._fingerprint, self._patience = str(text["fingerprint"]), float(text["patience"])
        self._place, self._key, self._guard = place, os.urandom(32).hex(), guard
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._tls.check_hostname, self._tls.verify_mode = False, ssl.CERT_NONE  # the fingerprint says who it is
        self._tls.minimum_version = ssl.TLSVersion.TLSv1_3
        self._joined, self._lease, self._heard = False, _FIRST, time.monotonic()
        self._grace, self._notice = 30.0, os.path.join(tempfile.mkdtemp(prefix="skyward-join-"), "notice")
        self._running: dict[int, str] = {}  # process ids of programs, with when they were started
        self._at_end = [["rm", "-rf", os.path.dirname(self._notice)]]
        self._outgoing, self._lock = bytearray(), threading.Lock()
        self._poll, (self._wake, self._waker) = select.poll(), socket.socketpair()
        for end in (self._wake, self._waker):
            end.setblocking(False)
        for fd in [self._wake.fileno(), *([0] if stdin else [])]:
            self._poll.register(fd, select.POLLIN)

    def serve(self) -> None:
        """Comes home, again and again; raises Over with the reason when that is of no use any more."""
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
        """Ends everything that was started here."""
        clean_up(self._running, self._at_end)

    def say(self, kind: str, *fields: str) -> None:
        """Tells home, from any thread; what cannot be told now is not told later."""
        with self._lock:
            self._outgoing += _message(kind, *fields)
        self._waker.send(b"x")

    def _on_notice(self, number: int, frame: Any) -> None:
        """The engine is about to take the place away; it may send SIGTERM to all processes, which is no end yet."""
        if not self._joined:
            raise Over("it was ended before it had joined")
        self._give_notice(self._grace)

    def _on_hangup(self, number: int, frame: Any) -> None:
        raise Over("the terminal was closed")

    def _give_notice(self, seconds: float) -> None:
        """Tells the node, which waits for this file (`node/join_notice.py`), when the place is taken away."""
        os.makedirs(os.path.dirname(self._notice), 0o700, exist_ok=True)
        with open(self._notice + ".part", "w") as file:
            file.write(str(time.time() + seconds))
        os.rename(self._notice + ".part", self._notice)

    def _come_home(self) -> ssl.SSLSocket:
        """The control connection; tries until the lease is over, or nobody listens there any more."""
        pause, began, refused, told = 0.1, time.monotonic(), 0.0, False
        while True:
            try:
                control = self._dial()
                self._greet(control)
                return control
            except (OSError, ValueError) as exc:
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

    def _dial(self) -> ssl.SSLSocket:
        """A connection to the pool, by the first of its addresses at which it answers; it comes first from then on."""
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
        """TLS over a new connection; nothing is said before it is known that the pool is at the other end."""
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
        """Says who we are, and hears which place that is."""
        proof = token(self._secret, self._pool, self._place)
        hello = {"place": self._place, "token": proof, "key": self._key, "name": socket.gethostname()}
        control.sendall(json.dumps({"join": hello}).encode() + b"\n")
        with control.makefile("rb") as lines:
            answer = json.loads(lines.readline(1 << 16) or b"{}")
        if answer.get("again"):
            raise _Taken(answer["refused"])
        if "refused" in answer:
            raise Over(f"the pool {self._pool} does not let this machine in: {answer['refused']}")
        welcome = answer["welcome"]
        self._place, self._lease, self._grace = int(welcome["place"]), float(welcome["lease"]), float(welcome["grace"])
        self._heard = time.monotonic()
        if not self._joined:
            _tell(f"joined {self._pool} as place {self._place}")
        self._joined = True

    def _obey(self, control: ssl.SSLSocket) -> None:
        """Serves orders until the connection is lost."""
        control.setblocking(False)
        received = b""
        while time.monotonic() - self._heard < _SILENT:
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
        """Waits for something to do; raises Over when standard input ends, and with it our place."""
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
        """Whoever holds the place says when it is taken away, in a line of JSON; it is gone when the pipe ends."""
        if not piece:
            raise Over("standard input has ended: this place is gone")
        for line in piece.splitlines():
            try:
                self._give_notice(float(json.loads(line)["notice"]))
            except (ValueError, KeyError, TypeError):
                pass  # not for us

    def _order(self, kind: str, *fields: Any) -> None:
        """Does what `node/orders.py: ClientToJoiner` says; the last field is of no use here."""
        if kind == "run":
            self._run(*fields[:-1])
        elif kind == "connect":
            threading.Thread(target=self._connect, args=fields[:-1], daemon=True).start()
        elif kind == "at_end":
            self._at_end.append(fields[0])
            self._tell_guard({"at_end": fields[0]})
        elif kind == "notice":
            self._give_notice(fields[0])
        elif kind == "end":
            raise Over("")
        elif kind == "ping":
            self.say("pong")

    def _run(self, id: str, argv: list[str], given: dict[str, str], keep: bool) -> None:
        """Starts a program, from this thread: it is to die with its parent, which for the kernel is a thread."""
        env = {name: value for name, value in os.environ.items() if name not in _DROPPED}
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
        self._tell_guard({"program": process.pid, "started": self._running[process.pid]})
        threading.Thread(target=self._attend, args=(id, keep, process), daemon=True).start()

    def _attend(self, id: str, keep: bool, process: subprocess.Popen[bytes]) -> None:
        """Connects a program's files with home; one that is not to be kept ends with that connection."""
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
        self._tell_guard({"gone": process.pid})

    def _connect(self, id: str, host: str, port: int) -> None:
        """Connects an address here with home."""
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
    """A message of `node/orders.py: JoinerToClient`, as a line."""
    return json.dumps([kind, *fields, 0]).encode() + b"\n"


def _leave(control: ssl.SSLSocket, why: str) -> None:
    """Says goodbye, so that nobody waits for us."""
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
    """For signals that are to do nothing here, and are not ignored in what is started here."""


def _reset() -> None:
    """Undoes what an engine may have set for the processes that it starts."""
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
    """Joins a pool, and stays until that is over."""
    _reset()
    parser = argparse.ArgumentParser(prog="sky join", description="Makes this machine a node of a pool.")
    parser.add_argument("--file", help="the file, mode 0600, with the text that the pool has given")
    parser.add_argument("--place", type=int, help="which place this is, from 0 on (default: the engine's variables)")
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
