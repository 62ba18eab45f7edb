"""The client's side of a keeper: started over a shell, with orders and answers in JSON."""

from __future__ import annotations

import json
import logging
import os
import queue
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import IO, Any, cast

from skyward.api.secret import hide
from skyward.api.shell import Shell
from skyward.errors import BootstrapError, SkywardError
from skyward.node.orders import ClientToKeeper, KeeperToClient, RunOrder, SchedulerOrder, written
from skyward.node.settings import AgentOrder
from skyward.setup.local_shell import end_program
from skyward.transport.codec import Message, Receiver, handles
from skyward.transport.frames import Malformed

__all__ = ["Keeper", "KeeperClient", "PlacedKeeper"]

log = logging.getLogger("skyward.engine")

_LONGEST_LINE = 1 << 20
_MOST_MESSAGES = 10_000


class KeeperClient:
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
        self.sockets: dict[int, str] = {}
        self.scratch = directory
        self.scheduler: str | None = None
        self._errors = _errors_file()  # closed in end()
        # -P: the working directory must not be searched for modules
        argv = [python, "-P", "-m", "skyward.node.keeper", directory, str(lease), str(ttl)]
        argv += [lease_file] if lease_file else []
        self._process = shell.start(argv, env, self._errors)
        self._messages: queue.SimpleQueue[list[Any] | None] = queue.SimpleQueue()
        self._answers: list[Any] = []
        self._nonsense = ""  # what it said that is not a message, if it did
        self._lease, self._over, self._left = lease, False, False
        self._receiver = Receiver(KeeperToClient, self)
        threading.Thread(target=self._listen, name="skyward-keeper", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ended(self, ttl: float) -> str:
        """Why the keeper has ended; empty while it may run."""
        if self._over:
            return f"the pool's ttl of {ttl:g} s is over"
        if self._lease or (code := self._process.poll()) is None:
            return ""  # the end of the program that leads to another machine says little
        how = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
        return f"the pool's first process on {self.shell.name} {how}"

    def ask(self, order: Message, deadline: float) -> Any:
        self.tell(order)
        self._answers.clear()
        while not self._answers:
            self._hear(deadline)
        return self._answers.pop()

    def start(self, nodes: Sequence[AgentOrder], own_scratch: bool, deadline: float) -> None:
        self.tell(ClientToKeeper.Start(list(nodes), own_scratch))
        while len(self.ports) + len(self.sockets) < len(nodes):
            self._hear(deadline)

    def start_scheduler(self, scheduler: SchedulerOrder, deadline: float) -> str:
        while not self._messages.empty():
            self._messages.get()  # of an earlier scheduler, of agents
        try:
            return self.ask(ClientToKeeper.DaskScheduler(scheduler), deadline)
        except BootstrapError:
            if self._process.poll() is None:
                raise
            return "the connection broke after the pool was opened, and the keeper there takes no more orders"

    def hold(self, order: RunOrder, deadline: float) -> str:
        """Starts the steward of a detached run; returns why that failed, or nothing."""
        return self.ask(ClientToKeeper.Run(asdict(order)), deadline)

    def go(self, deadline: float) -> str:
        """Starts the run's program; returns why that failed, or nothing."""
        return self.ask(ClientToKeeper.Go(), deadline)

    def leave(self) -> None:
        assert self._process.stdin is not None
        self._left = True
        self._process.stdin.close()

    def end(self, seconds: float) -> bool:
        end_program(self._process, seconds)
        self._errors.close()
        return self._process.poll() == 0

    def after_fork(self) -> None:
        """A forked child closes its copy of the pipe: the keeper must see when the parent ends."""
        if self._process.stdin is not None:
            os.close(self._process.stdin.fileno())

    def tell(self, order: Message) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        try:
            stdin.write(written(order) + b"\n")
            stdin.flush()
        except BrokenPipeError:
            raise self._failure() from None

    def _hear(self, deadline: float) -> None:
        try:
            message = self._messages.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise BootstrapError("keeper", f"the processes of {self.shell.name} did not start in time.") from None
        if message is None:
            raise self._failure()
        try:
            self._receiver.receive(message, [])
        except Malformed as exc:
            text = f"what answers on {self.shell.name} is not a keeper of ours: {exc}."
            raise BootstrapError("keeper", text) from exc

    @handles(KeeperToClient.Addresses)
    def _addresses(self, message: KeeperToClient.Addresses) -> None:
        self._answers.append(message.addresses)

    @handles(KeeperToClient.Listening)
    def _listening(self, message: KeeperToClient.Listening) -> None:
        self._answers.append(message.port)

    @handles(KeeperToClient.Probed)
    def _probed(self, message: KeeperToClient.Probed) -> None:
        self._answers.append(message.unreachable)

    @handles(KeeperToClient.Agent)
    def _agent(self, message: KeeperToClient.Agent) -> None:
        match message.place:
            case [path]:
                self.sockets[message.node] = path
            case [host, port, *_]:
                self.ports[message.node] = (host, port)
            case _:
                raise Malformed("an agent without its place")
        self.scratch = message.scratch

    @handles(KeeperToClient.AgentDied)
    def _agent_died(self, message: KeeperToClient.AgentDied) -> None:
        pass  # it is started again, and its link says so

    @handles(KeeperToClient.Over)
    def _over_now(self, message: KeeperToClient.Over) -> None:
        self._over = True

    @handles(KeeperToClient.RunHeld)
    def _run_held(self, message: KeeperToClient.RunHeld) -> None:
        self._answers.append("")

    @handles(KeeperToClient.RunStarted)
    def _run_started(self, message: KeeperToClient.RunStarted) -> None:
        self._answers.append("")

    @handles(KeeperToClient.RunRefused)
    def _run_refused(self, message: KeeperToClient.RunRefused) -> None:
        self._answers.append(message.reason or "no reason was given")

    @handles(KeeperToClient.Scheduler)
    def _scheduler_runs(self, message: KeeperToClient.Scheduler) -> None:
        self.scheduler = message.address
        self._answers.append("")

    @handles(KeeperToClient.SchedulerFailed)
    def _scheduler_failed(self, message: KeeperToClient.SchedulerFailed) -> None:
        self._answers.append(message.reason)

    @handles(KeeperToClient.SchedulerDied)
    def _scheduler_died(self, message: KeeperToClient.SchedulerDied) -> None:
        self._answers.append(f"it ended with code {message.code}.\n{self._stderr()}")

    def _listen(self) -> None:
        stdout = self._process.stdout
        assert stdout is not None
        try:
            while line := stdout.readline(_LONGEST_LINE):
                message = _parsed(line)
                log.debug("keeper: %s", message)
                if message[0] == "scheduler_died":
                    self.scheduler = None
                if message[0] == "agent_died":
                    continue  # it is started again, and its link says so
                self._over = self._over or message[0] == "over"
                if self._messages.qsize() > _MOST_MESSAGES:
                    raise Malformed("more answers than orders")
                self._messages.put(message)
        except Malformed as exc:  # of whatever runs there: it is listened to no more
            self._nonsense = str(exc)
        except (OSError, ValueError):
            pass  # closed while we were reading
        self._messages.put(None)
        if self._left:
            self._process.wait()
            stdout.close()
            self._errors.close()

    def _failure(self) -> BootstrapError:
        if self._nonsense:
            return BootstrapError(
                "keeper", f"what answers on {self.shell.name} is not a keeper of ours: {self._nonsense}."
            )
        if self._over:
            return BootstrapError("keeper", "the pool's ttl was over before it was open. Raise ttl=.")
        code = self._process.wait(5)
        text = f"the first process on {self.shell.name} ended at once.\n{self._stderr()}"
        return BootstrapError("keeper", text, None, code)

    def _stderr(self) -> str:
        self._errors.seek(0)
        return hide(self._errors.read().decode("utf-8", "replace"))[-4000:]


class PlacedKeeper:
    """Started for a detached run, in the pool of the run's program: values alone, no pipe."""

    pid, scheduler = 0, None

    def __init__(
        self, directory: str, scratch: str, sockets: dict[int, str], ports: dict[int, tuple[str, int]]
    ) -> None:
        self.directory, self.scratch, self.sockets, self.ports = directory, scratch, sockets, ports

    @property
    def shell(self) -> Shell:
        raise SkywardError(
            "this needs a shell on the machines, and the program of a detached run has none: pool.dask(), adding "
            "packages and replacing machines work in pools that you open yourself."
        )

    def ended(self, ttl: float) -> str:
        return ""

    def tell(self, order: Message) -> None:
        _ = self.shell

    def start(self, nodes: Sequence[AgentOrder], own_scratch: bool, deadline: float) -> None:
        _ = self.shell

    def ask(self, order: Message, deadline: float) -> Any:
        _ = self.shell

    def start_scheduler(self, scheduler: SchedulerOrder, deadline: float) -> str:
        return self.ask(ClientToKeeper.DaskScheduler(scheduler), deadline)

    def end(self, seconds: float) -> bool:
        return True

    def after_fork(self) -> None:
        """Nothing to close."""


Keeper = KeeperClient | PlacedKeeper


def _errors_file() -> IO[bytes]:
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("skyward-stderr"), "w+b")
    return tempfile.TemporaryFile()


def _parsed(line: bytes) -> list[Any]:
    try:
        message: Any = json.loads(line)
    except (ValueError, RecursionError) as exc:
        raise Malformed(f"{line[:80]!r} is not JSON ({type(exc).__name__})") from None
    if type(message) is not list or len(message) < 2 or type(message[0]) is not str:  # pyright: ignore[reportUnknownArgumentType] - that is the question
        raise Malformed(f"{line[:80]!r} is not a message")
    return cast("list[Any]", message)
