"""One machine's keeper, as the client sees it: started over a shell, ordered about in JSON."""

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
from collections.abc import Mapping, Sequence
from typing import Any

from skyward.api.shell import Shell
from skyward.errors import BootstrapError

__all__ = ["KeeperClient"]

log = logging.getLogger("skyward.engine")


class KeeperClient:
    """A keeper and what it has started."""

    def __init__(
        self,
        shell: Shell,
        python: str,
        env: Mapping[str, str],
        directory: str,
        lease: float,
        ttl: float,
        lease_file: str | None = None,
    ) -> None:
        self.shell, self.directory = shell, directory
        self.ports: dict[int, tuple[str, int]] = {}
        """Where the agents of nodes on other machines listen."""
        self.sockets: dict[int, str] = {}
        """The socket files of the agents of nodes on this computer."""
        self.scratch = directory
        self.scheduler: str | None = None
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed in end()
        # -P: the client's working directory must not become a place to import from
        argv = [python, "-P", "-m", "skyward.node.keeper", directory, str(lease), str(ttl)]
        argv += [lease_file] if lease_file else []
        self._process = shell.start(argv, env, self._errors)
        self._said: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._listen, name="skyward-keeper", daemon=True).start()

    @property
    def pid(self) -> int:
        """The keeper's process id, or that of the ssh program that leads to it."""
        return self._process.pid

    def ask(self, do: str, deadline: float, **order: Any) -> dict[str, Any]:
        """Gives an order and returns the answer."""
        self._tell({"do": do, **order})
        return self._answer(deadline)

    def order(self, do: str, **order: Any) -> None:
        """Gives an order that has no answer."""
        self._tell({"do": do, **order})

    def start(self, nodes: Sequence[Mapping[str, Any]], own_scratch: bool, deadline: float) -> None:
        """Says whom to start, and waits until every agent listens."""
        self._tell({"do": "start", "nodes": nodes, "own_scratch": own_scratch})
        while len(self.ports) + len(self.sockets) < len(nodes):
            said = self._answer(deadline)
            if "agent" in said:
                if "socket" in said:
                    self.sockets[said["agent"]] = said["socket"]
                else:
                    self.ports[said["agent"]] = (said["host"], said["port"])
                self.scratch = said["scratch"]

    def start_scheduler(self, scheduler: Mapping[str, Any], deadline: float) -> str:
        """Has a dask scheduler started; when it runs, `scheduler` is its address, otherwise this returns why not."""
        while not self._said.empty():
            self._said.get()  # of an earlier scheduler, of agents
        try:
            self._tell({"do": "dask_scheduler", "scheduler": scheduler})
            while True:
                said = self._answer(deadline)
                if "scheduler" in said:
                    self.scheduler = said["scheduler"]
                    return ""
                if "scheduler_failed" in said:
                    return said["scheduler_failed"]
                if "scheduler_died" in said:
                    return f"it ended with code {said['scheduler_died']}.\n{self._stderr()}"
        except BootstrapError:
            if self._process.poll() is None:
                raise
            return "the connection broke after the pool was opened, and the keeper there takes no more orders"

    def end(self, seconds: float) -> bool:
        """Waits for the keeper, which goes when its agents have taken leave; False if it had to be left behind."""
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
        return process.returncode == 0

    def after_fork(self) -> None:
        """Closes a forked child's copy of the pipe: the keeper must see when the parent goes."""
        if self._process.stdin is not None:
            os.close(self._process.stdin.fileno())

    def _tell(self, order: dict[str, Any]) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        try:
            stdin.write(json.dumps(order).encode() + b"\n")
            stdin.flush()
        except BrokenPipeError:
            raise self._failure() from None

    def _answer(self, deadline: float) -> dict[str, Any]:
        try:
            said = self._said.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise BootstrapError("keeper", f"the processes of {self.shell.name} did not start in time.") from None
        if "eof" in said:
            raise self._failure()
        return said

    def _listen(self) -> None:
        stdout = self._process.stdout
        assert stdout is not None
        try:
            for line in stdout:
                said = json.loads(line)
                log.debug("keeper: %s", said)
                self._said.put(said)
                if "scheduler_died" in said:
                    self.scheduler = None
        except ValueError:
            pass  # closed while we were reading
        self._said.put({"eof": True})

    def _failure(self) -> BootstrapError:
        code = self._process.wait(5)
        text = f"the first process on {self.shell.name} ended at once.\n{self._stderr()}"
        return BootstrapError("keeper", text, None, code)

    def _stderr(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode("utf-8", "replace")[-4000:]
