"""The shell of a local machine: runs programs on this computer. And what shells have in common: how they copy."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from skyward.api.secret import looks_secret
from skyward.api.shell import Finished, Process
from skyward.errors import BootstrapError

__all__ = ["RECEIVE", "LocalShell", "Program", "end_program", "inherited", "not_copied", "send"]

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

# Nodes run elsewhere: what is relative to this program's directory would not be found there.
_PATHS = frozenset(
    """
    PATH LD_LIBRARY_PATH PYTHONPATH TMPDIR VIRTUAL_ENV
    HF_HOME HF_HUB_CACHE HF_DATASETS_CACHE TRANSFORMERS_CACHE TORCH_HOME KERAS_HOME
    SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE CURL_CA_BUNDLE
    """.split()
)


def inherited(environ: Mapping[str, str], directory: str | None = None) -> dict[str, str]:
    """What programs need of our environment, without secrets. Relative paths are made absolute against `directory`."""
    return {
        name: _absolute(value, directory) if name in _PATHS else value
        for name, value in environ.items()
        if (name in _PASSED or name.startswith(_PASSED_PREFIXES)) and not looks_secret(name)
    }


def _absolute(paths: str, directory: str | None) -> str:
    return os.pathsep.join(
        os.path.normpath(os.path.join(directory or os.getcwd(), path)) if path and path[0] not in "/~" else path
        for path in paths.split(os.pathsep)
    )


class Program(subprocess.Popen[bytes]):
    """A process in its own session, or at least its own process group: out of reach of Ctrl-C, killed as a group."""

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        stdin: IO[bytes] | int = subprocess.PIPE,
        stdout: int = subprocess.PIPE,
        stderr: IO[bytes] | int = subprocess.PIPE,
        cwd: str | None = None,
        own_session: bool = True,
    ) -> None:
        super().__init__(
            argv,
            env=env,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            cwd=cwd,
            start_new_session=own_session,
            process_group=None if own_session else 0,
        )

    def kill(self) -> None:
        if self.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)

    def finish(self, name: Sequence[str], data: bytes | None, timeout: float | None) -> tuple[bytes, str]:
        """Output, and errors as text, once it ends. `name` is what a timeout calls it."""
        with self:
            try:
                out, err = self.communicate(data, timeout)
            except BaseException as exc:
                self.kill()
                if isinstance(exc, subprocess.TimeoutExpired):
                    raise subprocess.TimeoutExpired(list(name), exc.timeout) from None
                raise
        return out, err.decode("utf-8", "replace")


def end_program(process: Process, seconds: float | None) -> None:
    """Closes its input, and kills it if it has not ended after `seconds`; None: kills it at once."""
    if seconds is None:
        process.kill()
    else:
        _close(process.stdin)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    _close(process.stdin)
    _close(process.stdout)


def _close(pipe: IO[bytes] | None) -> None:
    try:
        if pipe is not None:
            pipe.close()
    except OSError:
        pass  # what was still to be written


class LocalShell:
    """Linux shares busy cores out among sessions first (sched_autogroup). Without a session of its own, what is started
    here and this process can wake each other without waiting for the turns of other sessions.
    """

    name = "this computer"

    def __init__(self, own_session: bool = True) -> None:
        self._own_session = own_session

    def connect(self, deadline: float, booting: bool = False, report: Callable[[str], None] | None = None) -> None:
        """Nothing to do."""

    def start(self, argv: Sequence[str], env: Mapping[str, str], stderr: IO[bytes]) -> Process:
        return Program(argv, dict(env), stderr=stderr, cwd=os.sep, own_session=self._own_session)

    def run(self, argv: Sequence[str], data: bytes = b"", timeout: float = 60.0) -> Finished:
        from skyward.api.secret import installer_environment  # most pools on this computer run no commands

        env = {**inherited(os.environ), **installer_environment(os.environ)}
        done = subprocess.run(argv, env=env, input=data, capture_output=True, timeout=timeout, check=False)
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

    def command(self, argv: Sequence[str]) -> list[str]:
        return list(argv)

    def ending(self) -> tuple[list[str], str | None]:
        return [], None

    def said(self) -> str:
        return ""

    def close(self) -> None:
        """Nothing to do."""


# The end of a broken connection looks like the end of the file: hence the size, and no signal that comes with it.
RECEIVE = (
    'umask 077; trap "" HUP PIPE; cat > "$2" && '
    '{ test "$(wc -c < "$2")" -eq "$3" || { echo "cut short" >&2; false; }; } && '
    'mv -f -- "$2" "$1" && exit 0; code=$?; rm -f -- "$2"; exit "$code"'
)
_REASONS = {
    "No space left": "the disk there is full. Free some space, or set SKYWARD_CACHE there to a directory on another.",
    "quota exceeded": "the user's share of the disk there is used up. Free some space, or ask for more.",
    "Read-only file system": "the disk there cannot be written to. Set SKYWARD_CACHE there to a directory on another.",
    "Permission denied": "the user may not write there. Choose a directory of the user's own.",
    "nonexistent": "the directory does not exist there.",
    "No such file": "the directory does not exist there.",
    "cut short": "not all of it arrived: the file changed while it was read, or the connection broke. Try again.",
}


def send(
    run: Callable[[Sequence[str], bytes | IO[bytes], float | None], Finished],
    name: str,
    source: bytes | Path,
    dest: str,
) -> None:
    receive = ["sh", "-c", RECEIVE, "sh", dest, f"{dest}.{uuid.uuid4().hex[:8]}.part"]
    if isinstance(source, Path):
        with source.open("rb") as file:
            done = run([*receive, str(os.fstat(file.fileno()).st_size)], file, None)
    else:
        done = run([*receive, str(len(source))], source, None)
    if done.code != 0:
        raise not_copied(name, dest, done)


def not_copied(name: str, dest: str, done: Finished) -> BootstrapError:
    why = next((words for sign, words in _REASONS.items() if sign in done.err), "")
    return BootstrapError(f"copying to {name}:{dest}", f"{why}\n{done.err}".strip(), None, done.code)
