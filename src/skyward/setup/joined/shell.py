"""The shell of a joined machine: programs and connections are ordered, and come back as connections to us."""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from skyward.api.shell import Finished
from skyward.errors import BootstrapError, HostUnreachable
from skyward.node.join import STDERR, STDIN, STDOUT, Pump
from skyward.node.orders import ClientToJoiner
from skyward.setup.hosts import RECEIVE, not_copied
from skyward.setup.joined.members import MachineLeft, Member, NotStarted
from skyward.transport.codec import Message

__all__ = ["JoinShell"]

_MOST_OUTPUT = 64 << 20
_MOST_ERRORS = 1 << 20


class JoinShell:
    """Thread-safe."""

    def __init__(self, member: Member, if_we_die: Callable[[], tuple[list[str], list[str], str | None]]) -> None:
        self._member, self._if_we_die = member, if_we_die
        self._closed = threading.Event()

    @property
    def name(self) -> str:
        return self._member.name

    def connect(self, deadline: float, booting: bool = False, report: Callable[[str], None] | None = None) -> None:
        member = self._member
        with member.changed:
            done = lambda: member.connected or member.gone or self._closed.is_set()  # noqa: E731 - said once
            member.changed.wait_for(done, max(0.0, deadline - time.monotonic()))
            if not member.connected:
                why = member.gone or "its connection was lost, and it did not come back"
                raise HostUnreachable("connecting", f"{self.name}: {why}.")

    def start(self, argv: Sequence[str], env: Mapping[str, str], stderr: IO[bytes]) -> Joined:
        """The program outlives the connection to it."""
        return self._start(argv, env, stderr, keep=True)

    def run(self, argv: Sequence[str], data: bytes = b"", timeout: float = 60.0) -> Finished:
        return self._run(argv, data, timeout)

    def upload(self, source: bytes | Path, dest: str) -> None:
        receive = ["sh", "-c", RECEIVE, "sh", dest, f"{dest}.{uuid.uuid4().hex[:8]}.part"]
        size = len(source) if isinstance(source, bytes) else source.stat().st_size
        done = self._run([*receive, str(size)], source, None)
        if done.code != 0:
            raise not_copied(self.name, dest, done)

    def reach(self, host: str, port: int) -> socket.socket:
        try:
            return self._member.stream(lambda id: ClientToJoiner.Connect(id, host, port), secure=False)
        except NotStarted as exc:
            raise ConnectionRefusedError(f"{self.name}: {exc}") from exc

    def command(self, argv: Sequence[str]) -> list[str]:
        """Has the machine run this itself when we are gone: no other local process can reach it. The returned command
        only ends the relay, if there is one.
        """
        self._member.order(ClientToJoiner.AtEnd(list(argv)))
        return self._if_we_die()[0]

    def ending(self) -> tuple[list[str], str | None]:
        return self._if_we_die()[1:]

    def said(self) -> str:
        return self._member.gone

    def close(self) -> None:
        self._closed.set()
        with self._member.changed:
            self._member.changed.notify_all()

    def _start(self, argv: Sequence[str], env: Mapping[str, str], stderr: IO[bytes], keep: bool) -> Joined:
        def order(id: str) -> Message:
            return ClientToJoiner.Run(id, list(argv), dict(env), keep)

        try:
            return Joined(self._member.stream(order, secure=True), stderr)
        except NotStarted as exc:
            raise BootstrapError(f"starting {argv[0]}", f"{self.name}: {exc}.") from exc
        except OSError as exc:
            kind = MachineLeft if self._member.gone else HostUnreachable
            raise kind(f"starting {argv[0]}", f"{exc}.") from exc

    def _run(self, argv: Sequence[str], data: bytes | Path, timeout: float | None) -> Finished:
        deadline = None if timeout is None else time.monotonic() + timeout
        with tempfile.TemporaryFile() as errors:
            process = self._start(argv, {}, errors, keep=False)
            feeding = threading.Thread(target=_feed, args=(process.stdin, data), daemon=True)
            out: list[bytes] = []
            reading = threading.Thread(target=lambda: out.append(_read(process)), daemon=True)
            try:
                feeding.start()
                reading.start()
                try:
                    code = process.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    raise subprocess.TimeoutExpired(list(argv), timeout or 0.0) from None
            finally:
                process.kill()
                feeding.join()
                reading.join()
                process.stdout.close()
            if len(out[0]) > _MOST_OUTPUT:
                raise BootstrapError(f"running {argv[0]}", f"{self.name}: it wrote more than {_MOST_OUTPUT >> 20} MiB.")
            if code == Joined.LOST:
                raise HostUnreachable(f"running {argv[0]}", f"the connection of {self.name} was lost meanwhile.")
            errors.seek(max(0, errors.seek(0, os.SEEK_END) - _MOST_ERRORS))
            return Finished(code, out[0], errors.read().decode("utf-8", "replace"))


class Joined:
    LOST = 255

    def __init__(self, sock: socket.socket, stderr: IO[bytes]) -> None:
        self._sock = sock
        self.returncode: int | None = None
        self._ended = threading.Event()
        theirs_in, ours_in = os.pipe()
        ours_out, theirs_out = os.pipe()
        self.stdin: IO[bytes] = open(ours_in, "wb")  # noqa: SIM115 - closed by whoever uses it
        self.stdout: IO[bytes] = open(ours_out, "rb")  # noqa: SIM115 - as above
        assert isinstance(sock, ssl.SSLSocket)
        self._pump = Pump(sock, {STDIN: theirs_in}, {STDOUT: theirs_out, STDERR: os.dup(stderr.fileno())})
        threading.Thread(target=self._serve, name="skyward-program", daemon=True).start()

    @property
    def pid(self) -> int:
        """There is no local process; this is our own id."""
        return os.getpid()

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired("", timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        try:
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)
        except OSError:
            pass  # it has ended

    def _serve(self) -> None:
        code = self._pump.run()
        self.returncode = self.LOST if code is None else code
        self._sock.close()
        self._ended.set()


def _read(process: Joined) -> bytes:
    found = process.stdout.read(_MOST_OUTPUT + 1)
    if len(found) > _MOST_OUTPUT:
        process.kill()
        process.stdout.close()
    return found


def _feed(stdin: IO[bytes], data: bytes | Path) -> None:
    """The program may end before it has read everything."""
    try:
        with stdin:
            if isinstance(data, bytes):
                stdin.write(data)
            else:
                with data.open("rb") as file:
                    shutil.copyfileobj(file, stdin, 1 << 18)
    except OSError:
        pass
