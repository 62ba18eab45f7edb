"""One master connection of OpenSSH, over which others run commands and reach ports.

It ends with a pipe from us. Its sockets are in a directory that only this user can enter.
"""

from __future__ import annotations

import math
import os
import re
import select
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from skyward.api.secret import ssh_environment
from skyward.api.shell import SshTarget
from skyward.errors import BootstrapError, HostUnreachable, InvalidArgument
from skyward.transport import private

__all__ = ["READY", "Connection", "options", "private_directory", "remote_line", "would_send"]

READY = "skyward-ready"
"""Printed after any output of start-up files."""

_PLAIN = re.compile(r"[A-Za-z0-9_./:,-]+")
_OPTIONS = """
    BatchMode=yes ConnectionAttempts=1 ServerAliveInterval=5 ServerAliveCountMax=3
    ForwardAgent=no ForwardX11=no ClearAllForwardings=yes ExitOnForwardFailure=no PermitLocalCommand=no Tunnel=no
    RequestTTY=no RemoteCommand=none EscapeChar=none Compression=no ControlPersist=no UpdateHostKeys=no
    NoHostAuthenticationForLocalhost=no VerifyHostKeyDNS=no ForwardX11Trusted=no GatewayPorts=no AddKeysToAgent=no
    StreamLocalBindMask=0177 LogLevel=INFO
""".split()
# What ssh itself works with, here. A path or a user's name is no secret.
_NEEDED = frozenset("PATH HOME USER LOGNAME SHELL TMPDIR XDG_RUNTIME_DIR SSH_AUTH_SOCK KRB5CCNAME".split())
_LISTENING = 10.0
_MOST_NOISE = 1 << 20
_LONGEST_PATH = 60  # of a temporary directory: a socket's path has room for about 100 characters


def options(target: SshTarget, limit: float, fast: bool = True) -> list[str]:
    chosen = [*_OPTIONS, f"StrictHostKeyChecking={'accept-new' if target.host_keys == 'accept-new' else 'yes'}"]
    chosen.append(f"ConnectTimeout={max(1, math.ceil(limit))}")
    if fast:
        chosen.append("Ciphers=^aes128-gcm@openssh.com")
    if target.known_hosts is not None:
        chosen += [f'UserKnownHostsFile="{target.known_hosts}"', "GlobalKnownHostsFile=/dev/null"]
    if target.key is not None:
        chosen.append("IdentitiesOnly=yes")
    if target.proxy is not None:
        chosen.append(f"ProxyCommand={target.proxy}")
    argv = ["-k"] if target.config else ["-k", "-F", "none"]  # -k: no Kerberos ticket of the user's goes there
    for option in chosen:
        argv += ["-o", option]
    argv += ["-i", target.key] if target.key is not None else []
    argv += ["-l", target.user] if target.user is not None else []
    argv += ["-p", str(target.port)] if target.port is not None else []
    return argv


def would_send(target: SshTarget) -> list[str]:
    """Our variables that the user's ssh settings would send: no option undoes `SendEnv`."""
    if not target.config:
        return []
    argv = ["ssh", *options(target, _LISTENING), "-G", "--", target.host]
    try:
        done = subprocess.run(
            argv, env=ssh_environment(os.environ), stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=_LISTENING,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return []  # the connection itself says what is wrong
    lines = [line.partition(" ") for line in done.stdout.splitlines()]
    patterns = [pattern for word, _, pattern in lines if word == "sendenv"]
    return [name for name in os.environ if name not in _NEEDED and any(fnmatchcase(name, p) for p in patterns)]


def remote_line(argv: Sequence[str]) -> str:
    """`argv` as one line that sh, bash, zsh and fish parse the same way."""
    return "exec " + " ".join(_quote(word) for word in argv)


def private_directory() -> str:
    bases = [base for base in (tempfile.gettempdir(), "/tmp", "/var/tmp") if len(base) <= _LONGEST_PATH]
    try:
        return private.fresh("sky-", *bases)
    except private.NotPrivate as exc:
        raise BootstrapError("ssh", str(exc)) from exc


def _quote(word: str) -> str:
    if "\0" in word:
        raise InvalidArgument(f"{word!r} holds a zero byte, which no command line can carry.")
    if _PLAIN.fullmatch(word):
        return word
    # Within single quotes fish reads backslashes, the others do not; within double quotes all of them agree.
    parts = [part for part in re.split(r"(['\\]+)", word) if part]
    quoted = ['"' + p.replace("\\", "\\\\") + '"' if p[0] in "'\\" else f"'{p}'" for p in parts]
    return "".join(quoted) or "''"


class Connection:
    """Ends when told, when we end, or when the other side is silent."""

    def __init__(
        self, target: SshTarget, directory: str, limit: float, fast: bool, without: Sequence[str] = ()
    ) -> None:
        """`without`: our variables that ssh must not see."""
        self._host = target.host
        self._directory = directory
        self.noisy = False
        for stale in os.listdir(directory):
            os.unlink(f"{directory}/{stale}")
        argv = ["ssh", *options(target, limit, fast), "-M", "-S", f"{directory}/m", "-T", "--", target.host]
        with open(f"{directory}/log", "wb") as errors:
            try:
                self._process = subprocess.Popen(
                    [*argv, f"echo {READY}; exec cat >/dev/null"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    start_new_session=True,
                    env={
                        **_less(ssh_environment(os.environ, target.proxy_logins), without),
                        "SSH_ASKPASS_REQUIRE": "never",
                    },
                    bufsize=0,
                )
            except FileNotFoundError:
                words = "there is no ssh program on this computer. Install the OpenSSH client."
                raise BootstrapError("ssh", words) from None

    @property
    def alive(self) -> bool:
        with socket.socket(socket.AF_UNIX) as control:
            return self._process.poll() is None and control.connect_ex(f"{self._directory}/m") == 0

    def wait_ready(self, limit: float) -> str:
        assert self._process.stdout is not None
        with self._process.stdout as stdout:
            noise = _before_mark(stdout.fileno(), time.monotonic() + limit)
        if noise is None:
            return f"{self.said()}\nConnection timed out\n"
        if noise.endswith(READY.encode()):
            self.noisy = len(noise) > len(READY)
            return "" if self.alive else f"{self.said()}\nskyward: no control socket\n"
        try:
            code = self._process.wait(2)
        except subprocess.TimeoutExpired:
            code = None  # whoever asked ends it
        if code == 255 and self.said():  # ssh's own failure, and not that of a program there
            return self.said()
        return f"{self.said()}\nskyward: no answer after the login\n{noise.decode('utf-8', 'replace')}"

    def through(self, *args: str) -> list[str]:
        """An ssh that uses this connection or fails."""
        told = ["-F", "none", "-o", "ProxyCommand=false", "-o", "BatchMode=yes", "-o", "LogLevel=ERROR"]
        return ["ssh", *told, "-S", f"{self._directory}/m", *args]

    def session(self, argv: Sequence[str]) -> list[str]:
        mark = f"echo {READY}; " if self.noisy else ""
        return self.through("-T", "--", self._host, mark + remote_line(argv))

    def listen(self, local: str, host: str, port: int | None) -> None:
        """Forwards the local socket `local` to an address, or without a port to a socket file."""
        far = host if port is None else f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        argv = self.through("-O", "forward", "-L", f"{local}:{far}", "--", self._host)
        env = ssh_environment(os.environ)
        done = subprocess.run(argv, env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=_LISTENING)
        if done.returncode != 0:
            words = (
                f"no way to {host}{'' if port is None else f' port {port}'} could be opened. ssh said: {self.said()}"
            )
            raise HostUnreachable(f"ssh {self._host}", words)

    def said(self) -> str:
        try:
            with open(f"{self._directory}/log", "rb") as file:
                return file.read()[-4000:].decode("utf-8", "replace").strip()
        except OSError:
            return ""

    def end(self) -> None:
        assert self._process.stdin is not None
        # ssh may overlook a signal that comes just before it waits, hence more than one
        for number in [signal.SIGTERM] * 10 + [signal.SIGKILL] * 2:
            try:
                if self._process.poll() is None:
                    os.killpg(self._process.pid, number)
                self._process.wait(0.2)
                break
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue
        self._process.stdin.close()

    def forget(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.returncode = 0


def _less(environ: Mapping[str, str], without: Sequence[str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in without}


def _before_mark(fd: int, deadline: float) -> bytes | None:
    got, poll = b"", select.poll()
    poll.register(fd, select.POLLIN)
    while len(got) < _MOST_NOISE:
        left = deadline - time.monotonic()
        if left <= 0 or not poll.poll(left * 1000):
            return None
        chunk = os.read(fd, 1 << 16)
        got += chunk
        found = re.search(rb"(?:^|\n)" + READY.encode() + rb"\r?\n", got)
        if found:
            return got[: found.start()].strip() + READY.encode()
        if not chunk:
            return got
    return got
