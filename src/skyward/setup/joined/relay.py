"""Runs the relay on a host that both sides reach over ssh, and restarts it when that breaks."""

from __future__ import annotations

import json
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from skyward.api.shell import Process, SshTarget
from skyward.errors import BootstrapError, SkywardError
from skyward.node import join_relay
from skyward.setup.local_shell import end_program
from skyward.setup.ssh.shell import SshShell
from skyward.transport.backoff import backoff

__all__ = ["RelayClient"]

_START = "import sys; exec(sys.stdin.buffer.read(int(sys.argv[1])).decode())"
_CONNECT = 60.0
_PAUSES = 0.5, 10.0  # between attempts: the first one, and the longest
_FETCHING = 32  # connections that are fetched at the same time
_STEP = "meeting machines"


class RelayClient:
    """`take` gets each connection, with its source address."""

    def __init__(
        self,
        target: SshTarget,
        lease: float,
        port: int,
        take: Callable[[socket.socket, str], None],
        warn: Callable[[str], None],
    ) -> None:
        self._shell, self._lease, self._take, self._warn = SshShell(target), lease, take, warn
        self._closed = threading.Event()
        self._fetching = threading.BoundedSemaphore(_FETCHING)
        self._process: Process | None = None
        self._thread: threading.Thread | None = None
        self.port, self._pid, self._path = port, 0, ""
        self.addresses: list[str] = []
        try:
            self._shell.connect(time.monotonic() + _CONNECT)
            self._start()
        except BaseException:
            self._shell.close()
            raise
        self._thread = threading.Thread(target=self._serve, name="skyward-relay", daemon=True)
        self._thread.start()

    def if_we_die(self) -> tuple[list[str], list[str], str | None]:
        return self._shell.command(["sh", "-c", f"kill {self._pid} 2>/dev/null; true"]), *self._shell.ending()

    def close(self) -> None:
        self._closed.set()
        self._end_old()
        process = self._process
        if process is not None:
            process.kill()
        if self._thread is not None:
            self._thread.join(10)  # it closes the process's pipes
        self._shell.close()

    def _start(self) -> None:
        program = Path(join_relay.__file__).read_bytes()
        with tempfile.TemporaryFile() as errors:
            process = self._shell.start(["python3", "-c", _START, str(len(program))], {}, errors)
            assert process.stdin is not None
            assert process.stdout is not None
            self._process = process
            try:
                process.stdin.write(program)
                process.stdin.write(json.dumps({"port": self.port, "lease": self._lease}).encode() + b"\n")
                process.stdin.flush()
                said = _message(
                    process.stdout.readline(1 << 16), {"port": int, "pid": int, "socket": str, "addresses": list}
                )
            except (OSError, ValueError, RecursionError):
                errors.seek(0)
                why = errors.read()[-1000:].decode("utf-8", "replace").strip()
                end_program(process, None)
                text = f"{self._shell.name}: the relay did not start; the host needs python3 of version 3.8 or newer."
                raise BootstrapError(_STEP, f"{text}\n{why}") from None
        port, self._pid, self._path = said["port"], said["pid"], said["socket"]
        if self.addresses and port != self.port:
            self._warn(
                f"the relay on {self._shell.name} had to take port {port}: {self.port} is in use there by now. "
                "Machines that lost their connection do not find it, and end when their lease is over."
            )
        self.port, self.addresses = port, [str(name)[:255] for name in said["addresses"][:64]]
        try:
            self._check_way()
        except BaseException:
            self._end_old()  # else it would wait for us until the lease is over
            end_program(process, None)
            raise

    def _check_way(self) -> None:
        answer = b""
        try:
            with self._claim(0) as sock:
                while piece := sock.recv(16):
                    answer += piece
        except OSError:
            pass
        if answer != b"here":
            said = self._shell.said()
            raise BootstrapError(
                _STEP,
                f"{self._shell.name}: its sshd does not let us reach a socket there, through which machines would "
                f"connect. "
                "Set AllowStreamLocalForwarding yes (or local) in its sshd_config, or open the pool on a computer that "
                f"the machines can connect to.\nssh said: {said or 'nothing'}",
            )

    def _serve(self) -> None:
        while not self._closed.is_set():
            self._listen()
            pauses = backoff(*_PAUSES)
            while not self._closed.wait(next(pauses)):
                try:
                    self._end_old()
                    self._start()
                    break
                except (SkywardError, OSError):
                    pass  # it is tried again
            else:
                return

    def _listen(self) -> None:
        process = self._process
        assert process is not None
        assert process.stdout is not None
        try:
            while line := process.stdout.readline(1 << 16):
                said = _message(line, {"new": int, "from": str})
                self._fetching.acquire()  # meanwhile the relay sends newcomers away
                threading.Thread(target=self._fetch, args=(said["new"], said["from"][:64]), daemon=True).start()
        except (OSError, ValueError, RecursionError):
            pass
        end_program(process, None)

    def _fetch(self, number: int, address: str) -> None:
        try:
            self._take(self._claim(number), address)
        except OSError:
            pass  # it is gone; the machine tries again
        finally:
            self._fetching.release()

    def _claim(self, number: int) -> socket.socket:
        sock = self._shell.reach_file(self._path)
        try:
            sock.sendall(f"{number:08d}".encode())
        except BaseException:
            sock.close()
            raise
        return sock

    def _end_old(self) -> None:
        try:
            if self._pid:
                self._shell.run(["kill", str(self._pid)], timeout=5)
        except Exception:  # it ends by itself when the lease is over
            pass


def _message(line: bytes, fields: dict[str, type]) -> dict[str, Any]:
    said: Any = json.loads(line)
    if type(said) is not dict:
        raise ValueError("no message")
    known = cast("dict[str, Any]", said)
    for name, kind in fields.items():
        value: Any = known.get(name)
        if type(value) is not kind or (kind is int and not 0 < value < 10**8) or (kind is str and "\0" in value):
            raise ValueError(f"no message: {name}")
    return known
