"""A pod reached by `kubectl exec`: programs and connections are commands whose input and output is piped.

     this computer                                              the pod
PodShell ── pipes ── kubectl exec ══ WebSocket ══ API server ══ kubelet ── a program
         ── socket ─ kubectl exec ══════════════════════════════════════── pod.py reach HOST PORT ── TCP
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from skyward.api.shell import Finished, PodTarget, Process
from skyward.errors import BootstrapError, HostUnreachable
from skyward.node.pod import REACHED
from skyward.setup.kubectl import Forbidden, Kubectl, KubernetesRefused, LoginExpired, environment
from skyward.setup.local_shell import Program, send
from skyward.transport.backoff import backoff

__all__ = ["CONTAINER", "PROGRAM", "PodShell"]

log = logging.getLogger("skyward.kubernetes")

CONTAINER = "skyward"
PROGRAM = "/etc/skyward/pod.py"
_ATTEMPT = 20.0
_CONNECTING = 20.0
_PAUSES = 0.5, 10.0
# What is run comes as the first line of input: a command is part of the address of a request otherwise, which proxies
# limit and clusters write down.
_LINE = 'IFS= read -r line && eval "set -- $(printf %b "$line")" && '
_START = _LINE + 'exec "$@"'
# Says by itself how the program ended: a stream that was cut looks like the end of a program.
_MARK = "skyward-exit:"
_RUN = f'"$@"; code=$?; printf "\\n{_MARK}%s\\n" "$code" >&2; exit "$code"'
_RUN_LINE = _LINE + "{ " + _RUN + "; }"


class PodShell:
    """Thread-safe."""

    def __init__(self, target: PodTarget) -> None:
        self._target = target
        self._kubectl = Kubectl(target.namespace, target.context)
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._processes: list[Program] = []
        self._said = ""

    @property
    def name(self) -> str:
        return self._target.pod

    def connect(self, deadline: float, booting: bool = False, report: Callable[[str], None] | None = None) -> None:
        """Waits until commands run; errors that cannot pass are final."""
        for pause in backoff(*_PAUSES):
            try:
                done = self.run(["true"], timeout=_ATTEMPT)
                if done.code == 0:
                    return
                raise BootstrapError("connecting", f"{self.name}: its container has no programs: {done.err}")
            except subprocess.TimeoutExpired:
                why: Exception = HostUnreachable("connecting", f"{self.name} did not answer within {_ATTEMPT:.0f} s.")
            except (LoginExpired, Forbidden):
                raise
            except (HostUnreachable, KubernetesRefused) as exc:
                why = exc
                if isinstance(exc, KubernetesRefused) and exc.kind == "missing" and f'"{self.name}"' in exc.message:
                    raise HostUnreachable("connecting", f"{self.name}: the pod does not exist any more.") from exc
                if "in a completed pod" in str(exc):
                    raise HostUnreachable("connecting", f"{self.name}: the pod has ended.") from exc
            left = deadline - time.monotonic()
            if left <= 0 or self._closed.wait(min(pause, left)):
                raise HostUnreachable("connecting", f"{self.name}: {why}") from why
            if report is not None:
                report(str(why).partition("\n")[0])

    def start(self, argv: Sequence[str], env: Mapping[str, str], stderr: IO[bytes]) -> Process:
        """Ignores `env`: others could read it on the command line."""
        process = self._keep(Program(self._exec("sh", "-c", _START), environment(), stderr=stderr))
        assert process.stdin is not None
        try:
            process.stdin.write(_line(argv))
            process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended; whoever uses it says why
        return process

    def run(self, argv: Sequence[str], data: bytes = b"", timeout: float = 60.0) -> Finished:
        return self._run(argv, data, timeout)

    def upload(self, source: bytes | Path, dest: str) -> None:
        send(self._run, self.name, source, dest)

    def reach(self, host: str, port: int) -> socket.socket:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                end, command = theirs.fileno(), self._exec("python3", PROGRAM, "reach", host, str(port))
                self._keep(Program(command, environment(), end, end, subprocess.DEVNULL))
            ours.settimeout(_CONNECTING)
            if (first := ours.recv(1)) != REACHED:
                why = (first + ours.recv(1 << 10)).decode("utf-8", "replace") if first else ""
                kind = ConnectionRefusedError if "refused" in why else ConnectionResetError
                raise kind(f"{self.name}: {why or 'kubectl exec ended before there was a connection'}")
            return ours
        except BaseException:
            ours.close()
            raise

    def command(self, argv: Sequence[str]) -> list[str]:
        """Nothing: whoever ends the pod ends what runs in it."""
        return []

    def ending(self) -> tuple[list[str], str | None]:
        return [], None

    def said(self) -> str:
        return self._said

    def close(self) -> None:
        """A forked child leaves the parent's programs alone."""
        self._closed.set()
        with self._lock:
            processes, self._processes = self._processes, []
        if os.getpid() != self._owner:
            return
        for process in processes:
            process.kill()
            process.wait()

    def _exec(self, *argv: str) -> list[str]:
        return self._kubectl.command("exec", "-i", self.name, f"--container={CONTAINER}", "--", *argv)

    def _keep(self, process: Program) -> Program:
        with self._lock:
            self._processes = [known for known in self._processes if known.poll() is None]
            self._processes.append(process)
        if self._closed.is_set():
            process.kill()
        return process

    def _run(self, argv: Sequence[str], data: bytes | IO[bytes], timeout: float | None) -> Finished:
        if isinstance(data, bytes):
            process = self._keep(Program(self._exec("sh", "-c", _RUN_LINE), environment()))
            out, err = process.finish(argv, _line(argv) + data, timeout)
        else:
            process = self._keep(Program(self._exec("sh", "-c", _RUN, "sh", *argv), environment(), data))
            out, err = process.finish(argv, None, timeout)
        found = list(re.finditer(rf"\n{_MARK}(\d+)\n", err))
        if not found:
            self._said = err.strip()
            raise self._lost(argv[0], err)
        return Finished(int(found[-1][1]), out, err[: found[-1].start()])

    def _lost(self, program: str, said: str) -> Exception:
        """kubectl could not start the command, or the stream was cut."""
        error = self._kubectl.refused(f"running {program} in {self.name}", said)
        if error.kind in ("credentials", "permission", "missing"):
            return error
        if 'exec: "sh"' in said or "no such file" in said:
            return BootstrapError("kubectl exec", f"{self.name}: its image has no shell. Give another image=. {said}")
        text = f"the connection was lost while {program} ran there. kubectl said: {said.strip() or 'nothing'}"
        return HostUnreachable("kubectl exec", f"{self.name}: {text}")


def _line(argv: Sequence[str]) -> bytes:
    """One line that `printf %b` undoes."""
    return shlex.join(argv).replace("\\", "\\\\").replace("\n", "\\n").encode() + b"\n"
