"""A machine reached by ssh. The user's ssh settings apply; none of our environment is sent."""

from __future__ import annotations

import logging
import math
import os
import re
import shlex
import shutil
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from skyward.api.secret import ssh_environment
from skyward.api.shell import Finished, Process, SshTarget
from skyward.errors import AuthenticationFailed, BootstrapError, HostKeyMismatch, HostUnreachable, InvalidArgument
from skyward.setup.local_shell import Program, send
from skyward.setup.ssh.connection import READY, Connection, options, private_directory, remote_line, would_send
from skyward.transport.backoff import backoff

__all__ = ["SshShell", "by_hand", "cause_of", "explain", "summary"]

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
        """Retries hosts that may still be starting until `deadline`; one `booting` may refuse keys at first."""
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
        """Ignores `env`: every user of the host could read it on the command line."""
        connection = self._connected()
        process = Program(connection.session(argv), ssh_environment(os.environ), stderr=stderr)
        if connection.noisy:
            self._skip_noise(process)
        return process

    def run(self, argv: Sequence[str], data: bytes = b"", timeout: float = 60.0) -> Finished:
        return self._run(argv, data, timeout)

    def upload(self, source: bytes | Path, dest: str) -> None:
        send(self._run, self.name, source, dest)

    def reach(self, host: str, port: int) -> socket.socket:
        """Reconnects once, for about ten seconds. A port without a listener shows as end of file."""
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
        """Over our connection while it lives, then over its own."""
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
        """A forked child leaves the parent's connection open."""
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
        """Returns what ssh printed on failure. Threads share one attempt."""
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
        given = (subprocess.PIPE, data) if isinstance(data, bytes) else (data, None)
        process = Program(connection.session(argv), ssh_environment(os.environ), stdin=given[0])
        out, err = process.finish(argv, given[1], timeout)
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


# What ssh says of a failure, as errors that say what to do.


@dataclass(frozen=True)
class Cause:
    pattern: str
    error: type[BootstrapError]
    tries: int | None
    words: str
    lasting: float = math.inf
    """Seconds after which it is final."""


_KEY = "Give the right one with key=..., or add it to your agent with ssh-add (a key with a passphrase must be there)"
_NEVER = Cause("", BootstrapError, 1, "ssh ended without a connection.")

# The first that matches counts. Patterns begin where ssh begins its lines: what a host says in a banner must not be
# taken for the reason. "Connection closed" stands near the end: it also follows when a jump host fails on its own.
_CAUSES = (
    Cause(
        r"^Host key for (.+) has changed and you have requested strict checking",
        HostKeyMismatch,
        1,
        "its host key is not the one in your known_hosts file. Either the machine was installed again, or another one "
        "answers in its place. Nothing was sent to it. If you know that the key has changed, remove the old one with "
        "'ssh-keygen {file}-R {0}', connect once by hand and compare the fingerprint.",
    ),
    Cause(
        r"REVOKED HOST KEY DETECTED!",
        HostKeyMismatch,
        1,
        "its host key is marked as revoked in your known_hosts file. Nothing was sent to it. "
        "Ask whoever runs the machine for its new key.",
    ),
    Cause(
        r"^No .*host key is known for (.+) and you have requested strict checking|^Host key verification failed",
        HostKeyMismatch,
        1,
        "its host key is not known yet, so it could be an impostor's. Connect once by hand and compare "
        'the fingerprint, or give host_keys="accept-new" to trust each host at first sight.',
    ),
    Cause(
        r"^ssh: Could not resolve hostname (\S+): (?:Temporary failure in name resolution|.*[Tt]ry again)",
        HostUnreachable,
        None,
        "no name server answered for '{0}'. This computer may be offline.",
    ),
    Cause(
        r"^ssh: Could not resolve hostname (\S+): ",
        HostUnreachable,
        2,
        "'{0}' is not a known name of a machine. Check the spelling; a short name needs a Host entry in ~/.ssh/config.",
    ),
    Cause(
        r"^Bad owner or permissions on (.+)$",
        BootstrapError,
        1,
        "ssh does not trust {0}, since others may write to it. Run: chmod 600 {0}",
    ),
    Cause(
        r"^.+ line \d+: .*(?:[Bb]ad|[Uu]nsupported|[Ii]nvalid|[Mm]issing|extra)|: terminating, \d+ bad|^Bad (?:S|p)",
        BootstrapError,
        1,
        "ssh does not understand its settings. Correct the line that it names.",
    ),
    Cause(
        r"Too many authentication failures",
        AuthenticationFailed,
        1,
        "it closed the connection after too many keys, before the right one was tried. Your agent holds many: name "
        "one with key=...",
    ),
    Cause(
        r"^Load key \"(.+)\": bad permissions|^Permissions \d+ for '(.+)' are too open",
        AuthenticationFailed,
        1,
        "the key {0} was not used, since others on this computer may read it. Run: chmod 600 {0}",
    ),
    Cause(
        r"^Load key \"(.+)\": (?:invalid format|error in libcrypto|.*not a .*key)",
        AuthenticationFailed,
        1,
        "{0} is not a private key that ssh can read. " + _KEY + ".",
    ),
    Cause(
        r"^(\S+)@\S+: Permission denied \((.+)\)",
        AuthenticationFailed,
        1,
        "it knows no user '{0}' with {key} (it takes: {1}). "
        + _KEY
        + "; it must be in ~/.ssh/authorized_keys of that user. Is user=... right?",
    ),
    Cause(
        r"^ssh: connect to host (\S+) port (\d+): Connection refused",
        HostUnreachable,
        None,
        "nothing listens on port {1} of {0}: the connection was refused. The machine is on, so its sshd either uses "
        "another port (write '{0}:PORT', or give port=...) or does not run.",
        lasting=10.0,
    ),
    Cause(
        r"^ssh: connect to host (\S+) port (\d+): (?:No route to host|Network is unreachable|Host is down)",
        HostUnreachable,
        None,
        "there is no route to {0} from here. The machine may be off, or a VPN may be needed.",
    ),
    Cause(
        r"(?:Connection|Operation) timed out|^Connection to .* timed out|^Timeout, server",
        HostUnreachable,
        None,
        "it did not answer in time. The machine may be off or still starting, or a firewall drops what is sent to it.",
    ),
    Cause(
        r"^Unable to negotiate with .*: (no matching .+ found)",
        BootstrapError,
        1,
        "ssh here and sshd there have no method in common ({0}). One of them is very old, or its settings forbid it.",
    ),
    Cause(
        r"^(?:kex|ssh)_exchange_identification: |^banner exchange: |^Connection (?:closed|reset) by |"
        r"^Not allowed|^Received disconnect",
        HostUnreachable,
        None,
        "the connection was closed before the login. The machine may still be starting, its sshd may have too many "
        "connections (MaxStartups), or a jump host or ProxyCommand on the way does not work.",
    ),
    Cause(
        r"^skyward: closed",
        BootstrapError,
        1,
        "the connection was closed by this program while it was being made.",
    ),
    Cause(
        r"account is currently not available|^skyward: no answer after the login",
        BootstrapError,
        1,
        "the login worked, but no program can be run there. The user needs a shell that takes commands, and the key no "
        "forced command.",
    ),
)


def cause_of(said: str) -> Cause:
    return _match(said)[0]


def explain(said: str, target: SshTarget) -> BootstrapError:
    cause, found = _match(said)
    values = [value for value in (found.groups() if found else ()) if value]
    key = f"the key {target.key}" if target.key else "any key of your agent or of ~/.ssh"
    file = f"-f {shlex.quote(target.known_hosts)} " if target.known_hosts else ""
    words = cause.words.format(*values, key=key, file=file)
    last = "\n".join(_sentences(said)[-3:])
    return cause.error(f"ssh {target}", f"{words}\nssh said: {last or 'nothing'}\nTo try by hand: {by_hand(target)}")


def summary(said: str) -> str:
    return next(reversed(_sentences(said)), "no answer").removeprefix("ssh: ").rstrip(".")


def by_hand(target: SshTarget) -> str:
    argv = ["ssh"]
    argv += [] if target.config else ["-F", "none"]
    argv += ["-i", target.key, "-o", "IdentitiesOnly=yes"] if target.key else []
    argv += ["-o", f"UserKnownHostsFile={target.known_hosts}"] if target.known_hosts else []
    argv += ["-p", str(target.port)] if target.port else []
    argv += ["-o", f"ProxyCommand={target.proxy}"] if target.proxy else []
    return shlex.join([*argv, str(target), "true"])


def _match(said: str) -> tuple[Cause, re.Match[str] | None]:
    text = said.replace("\r", "")
    for cause in _CAUSES:
        found = re.search(cause.pattern, text, re.MULTILINE)
        if found:
            return cause, found
    return _NEVER, None


def _sentences(said: str) -> list[str]:
    lines = ["".join(c for c in line if c.isprintable()).strip() for line in said.splitlines()]
    return [line for line in lines if line and not line.startswith("@")]
