"""The way to a machine that has joined, for those who look at its detached run.

viewers --Unix socket--> this process <--TLS-- the joiner on node 0

It listens where the run was submitted, so there is one for all viewers: the first starts it, and it ends some seconds
after the last has left. Each viewer's connection is the input and output of a program on the machine.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from skyward.api.shell import Process, SshTarget
from skyward.errors import HostUnreachable, SkywardError
from skyward.node.join import STDERR, STDIN, STDOUT, Pump
from skyward.node.orders import ClientToJoiner
from skyward.setup.joined.arrivals import Arrivals
from skyward.setup.local_shell import LocalShell
from skyward.transport import local_sockets

__all__ = ["DoorShell", "keep"]

_WAY, _SOCKET = "way", "door"  # in the folder of the run's record
_IDLE = 10.0
_COMES = 12.0  # a machine tries every few seconds; another door may just be closing
_STARTS = 10.0
_PAUSE = 0.1
_LONGEST = 1 << 20
_AWAY = (
    "Its machine connects to {tried}: this computer must have one of these addresses, as when the run was submitted. "
    "The run continues without it; `sky attach NAME --host HOST` looks at it over ssh."
)


def keep(record: Path, kept: Mapping[str, Any]) -> None:
    """For later doors: what `Arrivals.kept` gives, for this user alone."""
    with open(record / _WAY, "x", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        json.dump(kept, file)


class DoorShell(LocalShell):
    """Starts programs on node 0 through the door of the run whose record is at `record`."""

    def __init__(self, record: Path) -> None:
        self._record = record
        self.name = "its machine"

    def connect(self, deadline: float, booting: bool = False, report: Callable[[str], None] | None = None) -> None:
        """Nothing to do: each program has a connection of its own."""

    def start(self, argv: Sequence[str], env: Mapping[str, str], stderr: IO[bytes]) -> Process:
        deadline, started = time.monotonic() + _STARTS, False
        while True:
            try:
                return _Entered(local_sockets.connect(str(self._record / _SOCKET), _COMES + _STARTS), argv)
            except (OSError, EOFError) as exc:  # none is there, or it is just closing
                if time.monotonic() > deadline:
                    raise HostUnreachable("looking at a run", f"the way to its machine did not open: {exc}") from exc
            if not started or not os.path.exists(self._record / _SOCKET):
                _start(self._record)
                started = True
            time.sleep(_PAUSE)


class _Entered:
    """A program behind the door; it ends with the connection."""

    def __init__(self, sock: socket.socket, argv: Sequence[str]) -> None:
        self._sock, self.pid, self._over = sock, os.getpid(), False
        self.stdin: IO[bytes] = sock.makefile("wb")
        self.stdout: IO[bytes] = sock.makefile("rb")
        try:
            self.stdin.write(json.dumps(list(argv)).encode() + b"\n")
            self.stdin.flush()
            if not (line := self.stdout.readline(_LONGEST)):
                raise EOFError("it has closed")
            if why := json.loads(line):
                raise HostUnreachable("looking at a run", why)
            sock.settimeout(None)
        except BaseException:
            self.kill()
            raise

    def poll(self) -> int | None:
        return 0 if self._over else None

    def wait(self, timeout: float | None = None) -> int:
        return 0

    def kill(self) -> None:
        self._over = True
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it has ended
        self._sock.close()


def _start(record: Path) -> None:
    """In a session of its own, so that it outlives whoever looks first."""
    argv = ["sh", "-c", '"$@" &', "sh", sys.executable, "-P", "-m", __name__, str(record)]
    null = subprocess.DEVNULL
    subprocess.run(argv, stdin=null, stdout=null, stderr=null, cwd=os.sep, start_new_session=True, check=True)


class _Door:
    def __init__(self, record: Path) -> None:
        self._kept: dict[str, Any] = json.loads((record / _WAY).read_text())
        self._arrivals: Arrivals | None = None
        self._why = ""
        self._opened, self._lock = threading.Event(), threading.Lock()
        self._visitors, self._left = 0, time.monotonic()
        path = record / _SOCKET
        path.unlink(missing_ok=True)
        self._listener = local_sockets.listen(str(path))
        self._listener.settimeout(1.0)

    def serve(self) -> None:
        threading.Thread(target=self._open, name="skyward-opening", daemon=True).start()
        while self._visitors or time.monotonic() - self._left < _IDLE:
            try:
                sock, _ = self._listener.accept()
            except TimeoutError:
                continue
            with self._lock:
                self._visitors += 1
            threading.Thread(target=self._visit, args=(sock,), name="skyward-visitor", daemon=True).start()
        self._listener.close()
        if self._arrivals is not None:
            self._arrivals.close(end=False)

    def _open(self) -> None:
        kept = self._kept
        made = Arrivals(kept["pool"], 0.0, kept["lease"], kept["grace"], kept=kept)
        deadline = time.monotonic() + _COMES
        while True:
            try:
                if kept["relay"] is None:
                    made.listen("", kept["port"], tuple(kept["addresses"]))
                else:
                    made.meet(SshTarget(**kept["relay"]), kept["port"], tuple(kept["addresses"]))
                self._arrivals = made
            except (OSError, SkywardError) as exc:
                self._why = f"its machine comes to port {kept['port']}, where we cannot listen: {exc}"
                if time.monotonic() < deadline:
                    time.sleep(1.0)
                    continue
            self._opened.set()
            return

    def _visit(self, sock: socket.socket) -> None:
        try:
            with sock:
                local_sockets.check_peer(sock)
                self._enter(sock)
        except (OSError, ValueError):
            pass  # whoever came has gone
        finally:
            with self._lock:
                self._visitors -= 1
                self._left = time.monotonic()

    def _enter(self, sock: socket.socket) -> None:
        argv: list[str] = json.loads(_line(sock))
        try:
            stream = self._program(argv)
        except (OSError, SkywardError) as exc:
            sock.sendall(json.dumps(str(exc)).encode() + b"\n")
            return
        sock.sendall(b'""\n')
        null = os.open(os.devnull, os.O_WRONLY)
        with stream:
            Pump(stream, {STDIN: os.dup(sock.fileno())}, {STDOUT: os.dup(sock.fileno()), STDERR: null}).run()

    def _program(self, argv: list[str]) -> Any:
        self._opened.wait()
        if self._arrivals is None:
            raise ConnectionError(self._why)
        try:
            member = self._arrivals.member(self._kept["place"], _COMES)
        except SkywardError:
            port, names = self._kept["port"], ", ".join(self._kept["addresses"])
            text = f"{self._kept['name']} has not come within {_COMES:.0f} s. "
            raise ConnectionError(text + _AWAY.format(tried=f"port {port} of {names}")) from None
        return member.stream(lambda id: ClientToJoiner.Run(id, argv, {}, False), secure=True)


def _line(sock: socket.socket) -> bytes:
    """Not one byte more: what follows is the program's input."""
    line = b""
    while not line.endswith(b"\n") and len(line) < _LONGEST:
        piece = sock.recv(1)
        if not piece:
            raise ConnectionError("it has gone")
        line += piece
    return line


def main() -> None:
    record = Path(sys.argv[1])
    with open(record / _WAY) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return  # there is one
        _Door(record).serve()


if __name__ == "__main__":
    main()
