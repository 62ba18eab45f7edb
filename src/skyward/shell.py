"""Run a program on a machine and reach its ports. The contract, and how it is kept on this computer."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal, Protocol

__all__ = ["Access", "Finished", "LocalShell", "Shell", "SshTarget", "inherited"]

_PASSED = frozenset(
    """
    PATH HOME USER LOGNAME SHELL LANG LANGUAGE TZ TMPDIR VIRTUAL_ENV LD_LIBRARY_PATH
    PYTHONPATH PYTHONHASHSEED PYTHONUTF8
    HF_HOME HF_HUB_CACHE HF_HUB_OFFLINE HF_DATASETS_CACHE HF_DATASETS_OFFLINE TRANSFORMERS_OFFLINE TRANSFORMERS_CACHE
    HTTP_PROXY HTTPS_PROXY NO_PROXY ALL_PROXY http_proxy https_proxy no_proxy all_proxy
    SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE CURL_CA_BUNDLE
    """.split()
)
_PASSED_PREFIXES = tuple(
    """
    LC_ XDG_ CUDA_ NVIDIA_ ROCR_ HIP_ OMP_ MKL_ OPENBLAS_ NUMEXPR_ VECLIB_
    XLA_ JAX_ TF_ TORCH_ PYTORCH_ KERAS_ NCCL_ GLOO_ CONDA_ SKYWARD_
    """.split()
)
_SECRET = ("TOKEN", "SECRET", "PASSWORD", "_KEY")


def inherited(environ: Mapping[str, str]) -> dict[str, str]:
    """The part of an environment that nodes on this computer get: what programs need to run, and no secrets."""
    return {
        name: value
        for name, value in environ.items()
        if (name in _PASSED or name.startswith(_PASSED_PREFIXES)) and not any(s in name for s in _SECRET)
    }


@dataclass(frozen=True)
class SshTarget:
    """A machine as the ssh program is told of it; what is left out comes from the user's own ssh settings."""

    host: str
    user: str | None = None
    port: int | None = None
    key: str | None = None
    host_keys: Literal["strict", "accept-new"] = "strict"
    known_hosts: str | None = None
    config: bool = True
    """Whether the user's ~/.ssh/config counts; machines of a cloud are reached without it."""

    def __str__(self) -> str:
        return f"{self.user}@{self.host}" if self.user else self.host


@dataclass(frozen=True)
class Access:
    """How a provider's machines are got at, beyond their addresses."""

    lease: float = 0.0
    """How long machines go on when they hear nothing of us; 0 for this computer, whose fate they share."""
    ssh_timeout: float = 60.0
    network: Literal["auto", "mesh", "star"] = "auto"
    lease_file: str | None = None
    """A file on each machine that must be touched within every lease, or the machine shuts itself down."""
    notices: str | None = None
    """What, on a machine, waits until that is to be taken away, as "module:function"; it returns the seconds left."""
    settle: Callable[[Shell, SshTarget], str | None] | None = None
    """Done once a machine lets us in, beside the rest of setting it up; what it returns the user is told."""


@dataclass(frozen=True)
class Finished:
    """What a program on a machine has come to."""

    code: int
    out: bytes
    err: str


class Shell(Protocol):
    """One machine. Paths and arguments are data: whoever implements this quotes them."""

    @property
    def name(self) -> str:
        """What the machine is called in messages."""
        ...

    def connect(self, deadline: float) -> None:
        """Makes the machine reachable, or says in words why it is not; tries until `deadline` (monotonic)."""
        ...

    def start(self, argv: Sequence[str], env: Mapping[str, str], stderr: IO[bytes]) -> subprocess.Popen[bytes]:
        """Starts a program with pipes to its standard input and output, out of reach of Ctrl-C in our terminal."""
        ...

    def run(self, argv: Sequence[str], data: bytes = b"", timeout: float = 60.0) -> Finished:
        """Runs a program to its end, with `data` as its standard input."""
        ...

    def upload(self, source: bytes | Path, dest: str) -> None:
        """Puts a file there, mode 0600; half a file is never seen under its name."""
        ...

    def reach(self, host: str, port: int) -> socket.socket:
        """A connection to an address that the machine itself can connect to."""
        ...

    def forward(self, host: str, port: int) -> tuple[str, int]:
        """An address on this computer that leads to one there."""
        ...

    def command(self, argv: Sequence[str]) -> list[str]:
        """What another process of this computer has to run to have `argv` run there, once we are gone."""
        ...

    def said(self) -> str:
        """What the way to the machine has complained of last."""
        ...

    def close(self) -> None:
        """Lets go of the machine."""
        ...


class LocalShell:
    """This computer."""

    name = "this computer"

    def connect(self, deadline: float) -> None:
        """Nothing to do: we are there."""

    def start(self, argv: Sequence[str], env: Mapping[str, str], stderr: IO[bytes]) -> subprocess.Popen[bytes]:
        """Starts a program in a session of its own, so that Ctrl-C in the terminal is ours to handle, not its."""
        return subprocess.Popen(
            argv,
            env=dict(env),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            start_new_session=True,
            cwd=os.sep,
        )

    def run(self, argv: Sequence[str], data: bytes = b"", timeout: float = 60.0) -> Finished:
        done = subprocess.run(argv, input=data, capture_output=True, timeout=timeout, check=False)
        return Finished(done.returncode, done.stdout, done.stderr.decode("utf-8", "replace"))

    def upload(self, source: bytes | Path, dest: str) -> None:
        part = f"{dest}.part"
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with open(fd, "wb") as file:
            if isinstance(source, Path):
                with source.open("rb") as content:
                    shutil.copyfileobj(content, file)
            else:
                file.write(source)
        os.rename(part, dest)

    def reach(self, host: str, port: int) -> socket.socket:
        return socket.create_connection((host, port), timeout=10)

    def forward(self, host: str, port: int) -> tuple[str, int]:
        return host, port

    def command(self, argv: Sequence[str]) -> list[str]:
        return list(argv)

    def said(self) -> str:
        return ""

    def close(self) -> None:
        """Nothing to let go of."""
