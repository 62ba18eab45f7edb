"""The keeper's dask processes: started on request; workers that die are restarted."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the keeper needs it for dask only
    from subprocess import Popen

__all__ = ["DaskProcesses"]

_RESTARTS = 20
_SCHEDULER = "scheduler"


@dataclass
class _Process:
    popen: Popen[bytes]
    order: dict[str, Any]
    restarts: int = 0


class DaskProcesses:
    def __init__(self, umask: int) -> None:
        self._umask = umask
        self._running: dict[str, _Process] = {}  # by dask's name

    def start_scheduler(self, order: dict[str, Any]) -> None:
        """Replaces any other; it reports its address to the client itself."""
        self._start(_SCHEDULER, order)

    def start_worker(self, order: dict[str, Any]) -> None:
        name = f"node-{order['node']}"
        known = self._running.get(name)
        if known is None or known.order["scheduler"] != order["scheduler"]:
            self._start(name, order)

    def ended(self, pid: int, code: int) -> bool:
        name = next((name for name, known in self._running.items() if known.popen.pid == pid), None)
        if name is None:
            return False
        known = self._running.pop(name)
        known.popen.returncode = code
        if name != _SCHEDULER and known.restarts < _RESTARTS:
            self._start(name, known.order, known.restarts + 1)
        return name == _SCHEDULER

    def end(self) -> None:
        for name in list(self._running):
            self._kill(name)

    def _start(self, name: str, order: dict[str, Any], restarts: int = 0) -> None:
        import subprocess

        self._kill(name)
        popen = subprocess.Popen(
            [sys.executable, "-P", "-m", "skyward.node.dask_worker"],
            stdin=subprocess.PIPE,
            stdout=None if name == _SCHEDULER else subprocess.DEVNULL,  # the keeper's own
            start_new_session=True,
            umask=self._umask if name != _SCHEDULER else -1,
        )
        assert popen.stdin is not None
        try:
            popen.stdin.write(json.dumps({**order, "keeper": os.getpid()}).encode() + b"\n")
            popen.stdin.close()
        except BrokenPipeError:
            pass  # it has just died; `ended` is told next
        self._running[name] = _Process(popen, order, restarts)

    def _kill(self, name: str) -> None:
        known = self._running.pop(name, None)
        if known is not None:
            try:
                os.killpg(known.popen.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            known.popen.wait()
