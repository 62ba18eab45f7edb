"""One machine's keeper, as the client sees it: started over a shell, ordered about in JSON, ended by closing a pipe."""

from __future__ import annotations

import json
import logging
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping
from typing import Any

from skyward.errors import BootstrapError
from skyward.shell import LocalShell

__all__ = ["Site"]

log = logging.getLogger("skyward.engine")


class Site:
    """A keeper and what it has started."""

    def __init__(self, shell: LocalShell, python: str, env: Mapping[str, str], directory: str) -> None:
        # -P: the client's working directory must not become a place to import from
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed in end()
        self._process = shell.start([python, "-P", "-m", "skyward.engine.keeper", directory], env, self._errors)
        self._said: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.ports: dict[int, tuple[str, int]] = {}
        self.scheduler: str | None = None
        threading.Thread(target=self._listen, name="skyward-keeper", daemon=True).start()

    @property
    def pid(self) -> int:
        """The keeper's process id."""
        return self._process.pid

    def order(self, order: dict[str, Any], deadline: float) -> None:
        """Says what to start, and waits until every agent listens and the scheduler has an address."""
        stdin = self._process.stdin
        assert stdin is not None
        try:
            stdin.write(json.dumps(order).encode() + b"\n")
            stdin.flush()
        except BrokenPipeError:
            raise self._failure() from None
        while len(self.ports) < len(order["nodes"]) or (order.get("scheduler") and self.scheduler is None):
            try:
                said = self._said.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise BootstrapError("keeper", "the node's processes did not start in time.") from None
            if "agent" in said:
                self.ports[said["agent"]] = (said["host"], said["port"])
            elif "scheduler" in said:
                self.scheduler = said["scheduler"]
            elif "eof" in said:
                raise self._failure()

    def closing(self) -> None:
        """Tells the keeper that agents which end now do so on purpose."""
        stdin = self._process.stdin
        assert stdin is not None
        try:
            stdin.write(b"closing\n")
            stdin.flush()
        except (BrokenPipeError, ValueError):
            pass  # it is gone already

    def end(self, seconds: float) -> None:
        """Closes the pipe, upon which the keeper ends everything; after `seconds` it is killed."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.close()
        except BrokenPipeError:
            pass
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        process.stdout.close()
        self._errors.close()

    def after_fork(self) -> None:
        """Closes a forked child's copy of the pipe: the keeper must see when the parent goes."""
        if self._process.stdin is not None:
            os.close(self._process.stdin.fileno())

    def _listen(self) -> None:
        stdout = self._process.stdout
        assert stdout is not None
        try:
            for line in stdout:
                said = json.loads(line)
                log.debug("keeper: %s", said)
                self._said.put(said)
        except ValueError:
            pass  # closed while we were reading
        self._said.put({"eof": True})

    def _failure(self) -> BootstrapError:
        code = self._process.wait(5)
        return BootstrapError("keeper", f"the node's first process ended at once.\n{self._stderr()}", None, code)

    def _stderr(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode("utf-8", "replace")[-4000:]
