"""A machine reached by ssh. The user's ssh settings apply; none of our environment is sent."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import IO

from skyward.api.secret import ssh_environment
from skyward.api.shell import Finished, Process, SshTarget
from skyward.errors import AuthenticationFailed, BootstrapError, HostUnreachable, InvalidArgument
from skyward.setup.hosts import RECEIVE, not_copied
from skyward.setup.local_shell import Program
from skyward.setup.ssh.connection import READY, Connection, options, private_directory, remote_line, would_send
from skyward.setup.ssh.errors import cause_of, explain, summary
from skyward.transport.backoff import backoff

__all__ = ["SshShell"]

log = logging.getLogger("skyward.ssh")

_ATTEMPT = 10.0
_LAST = 2.0
_MOST_NOISE = 1 << 20
_FIRST_BOOT = 120.0  # seconds in which a new machine may refuse our key
_LONGEST_PAUSE = 15.0
_CLOSED = "skyward: closed"


class SshShell:
    """Thread-safe."""

    def __init__(self, target: SshTarget) -> None:
        if target.host.startswith("-") or (target.user or "").startswith("-"):
            raise InvalidArgument(f"{target}: a host or user that begins with '-' would be read as an option of ssh.")
        self._target = target
        self._owner = os.getpid()
        self._lock = threading.RLock()
        self._closed = threading.Event()
        self._directory: str | None = None
        self._connection: Connection | None = None
        self._dialled: Connection | None = None
        self._attempt: Future[str] | None = None
        self._sockets: dict[tuple[str, int | None], str] = {}
        self._fast = True
        self._at_home: list[str] | None = None

    @property
    def name(self) -> str:
        return str(self._target)

    def connect(self, deadline: float, booting: bool = False, report: Callable[[str], None] | None = None) -> None:
        """Logs in.

        Hosts that may still be starting are retried until `deadline`; other failures are final. A machine `booting` for
        the first time may refuse keys at first. `report` gets the reason for each retry.
        """
        began = since = time.monotonic()
        last = None
        if self._target.host_keys == "accept-new":
            log.info('%s: with host_keys="accept-new" a host key that is not known yet is trusted.', self.name)
        try:
            for tries, pause in enumerate(backoff(1.0, _LONGEST_PAUSE), 1):
                said = self._revive(min(_ATTEMPT, max(1.0, deadline - time.monotonic())))
                if not said:
                    return
                cause, now = cause_of(said), time.monotonic()
                left, most = deadline - now - _LAST, cause.tries
                if cause is not last:
                    since, last = now, cause
                    if report is not None and most != 1:
                        report(summary(said))
                if booting and cause.error is AuthenticationFailed and now - began < _FIRST_BOOT:
                    most = None
                left = left if booting else min(left, since + cause.lasting - now)
                if (most is not None and tries >= most) or left <= 0 or self._closed.wait(min(pause, left)):
                    raise _repeated(explain(said, self._target), tries, time.monotonic() - began)
        except BaseException:
            self._release()
            raise

    def start(self, argv: Sequence[str], env: Mapping[str, str], stderr: IO[bytes]) -> Process:
        """`env` is ignored: every user of the host could read it on the command line."""
        connection = self._connected()
        pipe = subprocess.PIPE
        process = Program(
            connection.session(argv),
            env=ssh_environment(os.environ),
            stdin=pipe,
            stdout=pipe,
            stderr=stderr,
            start_new_session=True,
        )
        if connection.noisy:
            self._skip_noise(process)
        return process

    def run(self, argv: Sequence[str], data: bytes = b"", timeout: float = 60.0) -> Finished:
        return self._run(argv, data, timeout)

    def upload(self, source: bytes | Path, dest: str) -> None:
        receive = ["sh", "-c", RECEIVE, "sh", dest, f"{dest}.{uuid.uuid4().hex[:8]}.part"]
        if isinstance(source, Path):
            with source.open("rb") as file:
                done = self._run([*receive, str(os.fstat(file.fileno()).st_size)], file, None)
        else:
            done = self._run([*receive, str(len(source))], source, None)
        if done.code != 0:
            raise not_copied(self.name, dest, done)

    def reach(self, host: str, port: int) -> socket.socket:
        """A connection through the machine; reconnects once, for about ten seconds. A port without a listener shows as
        end of file.
        """
        return self._reach(host, port)

    def reach_file(self, path: str) -> socket.socket:
        return self._reach(path, None)

    def _reach(self, host: str, port: int | None) -> socket.socket:
        known = self._sockets.get((host, port))
        if known is not None:
            try:
                return _connect(known)
            except (ConnectionRefusedError, FileNotFoundError):
                pass  # the connection is gone, and what it listened on with it
        try:
            connection = self._connected()
            with self._lock:
                path = self._sockets.get((host, port))
                if path is None or path == known:
                    path = f"{self._directory}/{uuid.uuid4().hex[:8]}"
                    connection.listen(path, host, port)
                    self._sockets[host, port] = path
            return _connect(path)
        except BootstrapError as exc:
            raise _as_os_error(exc) from exc
        except (ConnectionRefusedError, FileNotFoundError) as exc:
            raise ConnectionResetError(f"the connection to {self.name} was lost at once.") from exc

    def command(self, argv: Sequence[str]) -> list[str]:
        """A local command for `argv` there: over our connection while it lives, then over its own."""
        control = f"{self._directory}/m" if self._directory else "none"
        told = options(self._target, _ATTEMPT, self._fast)
        kept = [word for name in self._kept() for word in ("-u", name)]
        ssh = ["env", *kept, "ssh"] if kept else ["ssh"]
        return [*ssh, *told, "-S", control, "-T", "--", self._target.host, remote_line(argv)]

    def ending(self) -> tuple[list[str], str | None]:
        with self._lock:
            if self._connection is None:
                return [], self._directory
            return self._connection.through("-O", "exit", "--", self._target.host), self._directory

    def said(self) -> str:
        connection = self._connection
        return connection.said() if connection is not None else ""

    def close(self) -> None:
        """In a forked child the parent's connection stays open."""
        if os.getpid() != self._owner:
            self.after_fork()
            return
        self._closed.set()
        self._release()

    def after_fork(self) -> None:
        self._lock = threading.RLock()
        self._closed.set()
        for connection in (self._connection, self._dialled):
            if connection is not None:
                connection.forget()
        self._connection = self._dialled = self._directory = None

    def _kept(self) -> list[str]:
        if self._at_home is None:
            self._at_home = would_send(self._target)
        return self._at_home

    def _connected(self) -> Connection:
        said = self._revive(_ATTEMPT)
        connection = self._connection
        if said or connection is None:
            raise explain(said, self._target)
        return connection

    def _revive(self, limit: float) -> str:
        """Reconnects if needed; returns what ssh printed if that failed. Threads share one attempt."""
        with self._lock:
            if self._connection is not None and self._connection.alive:
                return ""
            mine = self._attempt is None
            attempt = self._attempt = self._attempt or Future()
        if mine:
            said = "skyward: interrupted"
            try:
                said = self._dial(limit)
            finally:
                with self._lock:
                    self._attempt = None
                attempt.set_result(said)
        return attempt.result()

    def _dial(self, limit: float) -> str:
        with self._lock:
            if self._closed.is_set():
                return _CLOSED
            lost, self._connection = self._connection, None
            if lost is not None:
                log.info("%s: the connection was lost and is made again. %s", self.name, lost.said())
                lost.end()
            self._sockets.clear()
            self._directory = self._directory or private_directory()
            self._dialled = dialled = Connection(self._target, self._directory, limit, self._fast, self._kept())
        try:
            said = dialled.wait_ready(limit + 1.0)
            with self._lock:
                self._dialled = None
                if not said and not self._closed.is_set():
                    self._connection = dialled
                    return ""
        finally:
            if self._connection is not dialled:
                dialled.end()
        if self._closed.is_set():
            return _CLOSED
        if "cipher" in said and self._fast:
            self._fast = False  # one side is old: let them agree on their own
            return self._dial(limit)
        return said

    def _run(self, argv: Sequence[str], data: bytes | IO[bytes], timeout: float | None) -> Finished:
        connection = self._connected()
        process = subprocess.Popen(
            connection.session(argv),
            env=ssh_environment(os.environ),
            stdin=subprocess.PIPE if isinstance(data, bytes) else data,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        with process:
            try:
                out, errors = process.communicate(data if isinstance(data, bytes) else None, timeout)
            except BaseException as exc:
                process.kill()
                if isinstance(exc, subprocess.TimeoutExpired):
                    raise subprocess.TimeoutExpired(list(argv), exc.timeout) from None
                raise
        err = errors.decode("utf-8", "replace")
        if process.returncode == 255:
            self._check_whole(connection, argv[0], err)
        if connection.noisy:
            out = out.partition(f"{READY}\n".encode())[2]
        return Finished(process.returncode, out, err)

    def _skip_noise(self, process: Program) -> None:
        assert process.stdout is not None
        skipped = 0
        while (line := process.stdout.readline(_MOST_NOISE)) and line.strip() != READY.encode():
            skipped += len(line)
            if skipped > _MOST_NOISE:
                process.kill()
                with process:  # closes its pipes
                    process.stdout.close()
                words = "its shell prints without end before it does anything. Look at the start-up files there."
                raise BootstrapError(f"ssh {self.name}", words)

    def _check_whole(self, connection: Connection, program: str, err: str) -> None:
        if "Session open refused by peer" in err:
            words = (
                "the host lets too few programs run over one connection. Raise MaxSessions in its sshd_config to 10."
            )
            raise BootstrapError(f"ssh {self.name}", words)
        if "UNKNOWN port 65535" in err or not connection.alive:
            words = f"the connection was lost while {program} ran there. {connection.said()}"
            raise HostUnreachable(f"ssh {self.name}", words.strip())

    def _release(self) -> None:
        with self._lock:
            ended, directory = (self._connection, self._dialled), self._directory
            self._connection = self._dialled = self._directory = None
            self._sockets.clear()
        for connection in ended:
            if connection is not None:
                connection.end()
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)


def _connect(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.settimeout(_ATTEMPT)
        sock.connect(path)
    except BaseException:
        sock.close()
        raise
    return sock


def _repeated(error: BootstrapError, tries: int, seconds: float) -> BootstrapError:
    if tries == 1:
        return error
    return type(error)(error.step, f"{error.detail}\nTried {tries} times in {seconds:.0f} s.")


def _as_os_error(error: BootstrapError) -> OSError:
    if not isinstance(error, HostUnreachable):
        return OSError(str(error))
    if "Connection refused" in error.detail:
        return ConnectionRefusedError(str(error))
    return TimeoutError(str(error)) if "timed out" in error.detail else OSError(str(error))
