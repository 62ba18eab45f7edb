"""Clients that open a pool, call, close it, and are struck by a signal at a call of the cloud that can be named.

Those whose machine is taken away while they call have another one launched in its place, and are struck from then on.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from skyward.testing import Call
from tests.support.cloud import Cloud
from tests.support.programs import USUAL_SIGNALS
from tests.support.waiting import until

__all__ = ["BLOWS", "Blow", "Clients", "Strike"]

Blow = tuple[Literal["kill", "term", "int", "int twice"], Literal["lost", "delivered"]]
BLOWS: tuple[Blow, ...] = tuple(
    (how, answer) for how in ("kill", "term", "int", "int twice") for answer in ("lost", "delivered")
)
_SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "int": signal.SIGINT, "int twice": signal.SIGINT}
_LONGEST = 90.0

# Imports once, then forks a client for every line it is told; its process id is printed, and then how it ended.
_PROGRAM = """
import os, socket, sys, time
import skyward as sky
import boto3, distributed
import skyward.setup.fleet, skyward.machines.reaper, skyward.setup.env.remote, skyward.setup.ssh.shell
from skyward.providers.aws.api import Pace

@sky.compute
def where():
    return socket.gethostname()

endpoint, here = sys.argv[1:]
print("ready", flush=True)
while (word := os.read(0, 1)) in (b"n", b"r"):
    pid = os.fork()
    if pid == 0:
        break
    print(pid, flush=True)
    print(os.waitpid(pid, 0)[1], flush=True)
else:
    sys.exit()
log = os.open(f"{here}/log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
os.dup2(log, 1)
os.dup2(log, 2)
os.read(0, 1)
pace = Pace(base=0.01, cap=0.1, budget=20.0, poll=0.1, settle=0.1, unanswered=1.0)
aws = sky.AWS(endpoint_url=endpoint, ssh_from="192.0.2.1", username="sky", pace=pace)
with sky.ComputePool(provider=aws, name="struck", console=False) as pool:
    first = where() >> pool
    if word == b"r":
        open(f"{here}/open", "w").close()
        while (where() >> pool) == first:
            time.sleep(0.05)
        open(f"{here}/replaced", "w").close()
"""


@dataclass
class Strike:
    """What befalls a client at the n-th call of an action: a signal, as it waits for the answer or before it asks.

    A call that a client was about to make when it was struck is not carried out: the one before it was answered.
    """

    action: str
    occurrence: int
    blow: Blow
    again: int = 1
    """After how many further calls the second Ctrl-C comes."""
    struck: bool = False

    def watch(self, cloud: Cloud, pid: int) -> None:
        """Has it happen to a process."""
        how, answer = self.blow
        seen, since = 0, 0

        def look(call: Call) -> bool:
            nonlocal seen, since
            if self.struck:
                since += 1
                if how == "int twice" and since == self.again:
                    _signal(pid, signal.SIGINT)
                return False
            seen += call.action == self.action
            if call.action != self.action or seen != self.occurrence:
                return False
            self.struck = True
            return True

        def before(call: Call) -> None:
            if look(call):
                _signal(pid, _SIGNALS[how])
                cloud.fail(call.action, mode="cut", where=lambda other: other.number == call.number)

        def after(call: Call) -> None:
            if look(call):
                if call.action == "RunInstances":
                    cloud.times.visible = 0.6  # only the ledger knows that there may be something to wait for
                _signal(pid, _SIGNALS[how])

        if answer == "lost":
            cloud.on_done = after
        else:
            cloud.on_call = before


class Clients:
    """Real processes that can be struck, one after the other."""

    def __init__(self, cloud: Cloud, directory: Path) -> None:
        self.cloud, self._directory = cloud, directory
        self.log = directory / "log"
        program = directory / "clients.py"
        program.write_text(_PROGRAM)
        self._process = subprocess.Popen(
            [*USUAL_SIGNALS, sys.executable, str(program), cloud.endpoint, str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        self._heard = b""
        assert self._line() == "ready"

    def run(self, strike: Strike | None = None) -> int:
        """Runs a client in a cloud in which nothing has happened; how it ended, as `waitpid` says it."""
        pid = self._begin(b"n")
        if strike is not None:
            strike.watch(self.cloud, pid)
        self._say(b"g")
        return self._end(pid, strike)

    def run_replaced(self, strike: Strike | None = None) -> tuple[int, list[Call]]:
        """The same for a client that loses its machine; also the calls from then on until another has its place."""
        opened, replaced = self._directory / "open", self._directory / "replaced"
        for mark in (opened, replaced):
            mark.unlink(missing_ok=True)
        pid = self._begin(b"r")
        self._say(b"g")
        until(opened.exists, _LONGEST)
        (machine,) = self.cloud.running()
        if strike is not None:
            strike.watch(self.cloud, pid)
        before = len(self.cloud.calls)
        self.cloud.notice(machine.id, 60)
        status = self._end(pid, strike)
        until_then = replaced.stat().st_mtime if replaced.exists() else 0.0
        return status, [call for call in self.cloud.calls[before:] if call.time < until_then]

    def close(self) -> None:
        """Ends whoever makes them."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=120)
        self._process.stdout.close()

    def _begin(self, word: bytes) -> int:
        self.cloud.forget()
        self._say(word)
        return int(self._line())

    def _end(self, pid: int, strike: Strike | None) -> int:
        try:
            return int(self._line())
        except TimeoutError:
            _signal(pid, signal.SIGKILL)
            pytest.fail(f"the client did not end within {_LONGEST} s of {strike}:\n{self.log.read_text()}")

    def _say(self, word: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(word)

    def _line(self) -> str:
        assert self._process.stdout is not None
        deadline = time.monotonic() + _LONGEST
        while b"\n" not in self._heard:
            if not select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError
            chunk = os.read(self._process.stdout.fileno(), 4096)
            assert chunk, "whoever makes the clients has died"
            self._heard += chunk
        line, _, self._heard = self._heard.partition(b"\n")
        return line.decode()


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass  # it has ended by itself meanwhile
