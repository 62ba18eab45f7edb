"""AWS: whatever a client or the cloud dies of, nothing is left after the reaper, judged by the cloud's own records."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyward.api.spec import Spec
from skyward.errors import SkywardError
from skyward.machines.ledger import histories, state_dir
from skyward.machines.reaper import down
from skyward.providers.aws.api import Pace
from skyward.testing import Call
from tests.support.cloud import Cloud
from tests.support.leases import returned
from tests.support.programs import USUAL_SIGNALS

HASTY = Pace(base=0.002, cap=0.02, budget=1.5, poll=0.01, settle=0.05, unanswered=1.0)
SEEDS = int(os.environ.get("SKYWARD_SOAK_SEEDS", "30"))

# Imports once, then forks a client for every line it is told; the client opens a pool and gives it back.
CLIENTS = """
import os, sys
from skyward.providers.aws.api import Pace
from skyward.providers.aws.provider import AWS
from skyward.api.spec import Spec

pace = Pace(0.002, 0.02, 1.5, 0.01, 0.05, 1.0)
group = sys.argv[2] or None
aws = AWS(endpoint_url=sys.argv[1], ssh_from="192.0.2.1", security_group_id=group, placement_group=not group, pace=pace)
spec = Spec(accelerator="T4", nodes=2)
aws.offers(spec)
print("ready", flush=True)
while os.read(0, 1) == b"n":
    pid = os.fork()
    if pid == 0:
        os.read(0, 1)
        try:
            held = aws.acquire(spec, "p")
            held.close(lambda text: None)
        except KeyboardInterrupt:
            os._exit(130)
        os._exit(0)
    print(pid, flush=True)
    print(os.waitpid(pid, 0)[1], flush=True)
"""


@pytest.fixture(scope="module")
def shared() -> Iterator[Cloud]:
    with Cloud() as cloud:
        yield cloud


@pytest.fixture
def cloud(shared: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cloud:
    shared.forget()
    monkeypatch.setenv("SKYWARD_STATE", str(tmp_path / "state"))
    for name, value in shared.environ.items():
        monkeypatch.setenv(name, value)
    return shared


class Clients:
    """Real processes that use the cloud and can be killed."""

    def __init__(self, cloud: Cloud, group: str = "") -> None:
        self.cloud = cloud
        argv = [*USUAL_SIGNALS, sys.executable, "-c", CLIENTS, cloud.endpoint, group]
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        assert self._line() == "ready"

    def run(self, number: int, sig: signal.Signals, executed: bool) -> int:
        """Runs a client that gets a signal at its call `number`, which is carried out or not; its wait status."""
        cloud, assumed = self.cloud, self.process
        cloud.forget()
        assert assumed.stdin is not None
        assumed.stdin.write(b"n")
        pid = int(self._line())
        done = threading.Event()

        def watch(call: Call) -> None:
            if call.number == number and call.action == "RunInstances":
                cloud.times.visible = 0.6  # so that only the ledger knows that there may be something to wait for
            if not executed:
                strike(call)

        def strike(call: Call) -> None:
            if call.number == number and not done.is_set():
                done.set()
                os.kill(pid, sig)
                if sig == signal.SIGKILL and not executed:
                    raise ConnectionResetError  # it died before it could send this one

        cloud.on_call = watch
        if executed:
            cloud.on_done = strike
        assumed.stdin.write(b"g")
        return int(self._line())

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=120)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = bytearray()
        while not line.endswith(b"\n"):
            chunk = self.process.stdout.read(1)
            assert chunk, "the clients have died"
            line += chunk
        return line.decode().strip()


@pytest.fixture
def clients(cloud: Cloud) -> Iterator[Clients]:
    made = Clients(cloud)
    yield made
    made.close()


def reap(cloud: Cloud) -> None:
    if list(histories()):
        for outcome in down([cloud.aws(pace=HASTY)], everything=True, really=True):
            assert outcome.did == "ended", outcome


def assert_nothing_left(cloud: Cloud, what: object) -> None:
    assert cloud.leftovers() == [], what
    assert list(histories()) == [], what
    pools = state_dir() / "pools"
    assert not pools.exists() or all(path.name.startswith(".") for path in pools.iterdir()), what


@pytest.mark.timeout(600)
@pytest.mark.parametrize("executed", [True, False], ids=["answer lost", "answer delivered"])
def test_a_client_killed_at_any_call_leaves_nothing_after_the_reaper(clients: Clients, executed: bool) -> None:
    """Rows 31 and 34, the crash matrix: kill -9 at every call of opening and closing."""
    cloud, number = clients.cloud, 0
    while clients.run(number, signal.SIGKILL, executed) != 0:
        reap(cloud)
        assert_nothing_left(cloud, (number, cloud.calls[-1].action))
        number += 1
    assert_nothing_left(cloud, "a client that was not killed")
    assert number >= 25, "it was killed at every call there is"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("executed", [True, False], ids=["answer lost", "answer delivered"])
def test_a_client_killed_while_launching_into_a_group_of_the_users_leaves_nothing(cloud: Cloud, executed: bool) -> None:
    """Row 34: no group of ours that could not be deleted while a machine stands in it; only the ledger knows."""
    clients, number = Clients(cloud, "sg-12345678"), 0
    try:
        while clients.run(number, signal.SIGKILL, executed) != 0:
            launched = any(call.action == "RunInstances" for call in cloud.calls)
            reap(cloud)
            assert_nothing_left(cloud, number)
            if launched and not any(call.action == "RunInstances" for call in cloud.calls[number - 1 :]):
                break
            number += 1
    finally:
        clients.close()


@pytest.mark.timeout(600)
def test_a_client_interrupted_at_any_call_leaves_nothing(clients: Clients) -> None:
    """Rows 32 and 34: Ctrl-C while a call is under way; while opening, the client itself gives everything back."""
    cloud, number = clients.cloud, 0
    while clients.run(number, signal.SIGINT, True) != 0:
        looks = [call for call in cloud.calls[: number + 1] if call.action == "DescribeInstances"]
        if len(looks) < 2:  # the second look is the first step of closing
            assert cloud.leftovers() == [], number
        reap(cloud)
        assert_nothing_left(cloud, number)
        number += 1
    assert number >= 25


FAULTS = ("RequestLimitExceeded", "InternalError", "Unavailable", "InsufficientInstanceCapacity", "VcpuLimitExceeded")
ACTIONS = ("*", "RunInstances", "Describe*", "Create*", "Delete*", "TerminateInstances", "ImportKeyPair", "*Group*")
MODES = ("refuse", "fail", "lose", "cut")


def misbehave(cloud: Cloud, draw: random.Random) -> None:
    cloud.times.visible = draw.choice([0, 0, 0.02, 0.15])
    cloud.times.boot = draw.choice([0, 0, 0.05])
    cloud.times.shutdown = draw.choice([0, 0, 0.1])
    if draw.random() < 0.3:
        cloud.room(draw.randint(0, 3), zone=f"us-east-1{draw.choice('ab*')}", market=draw.choice(["spot", "*"]))
    if draw.random() < 0.1:
        cloud.times.visible = 0.3
        cloud.fail("RunInstances", mode=draw.choice(["lose", "fail"]), times=1000)
    for _ in range(draw.randint(0, 4)):
        cloud.fail(
            draw.choice(ACTIONS),
            draw.choice(FAULTS),
            mode=draw.choice(MODES),
            times=draw.choice([1, 1, 2, 5, 1000]),
            skip=draw.randint(0, 12),
        )
    expires, dies = draw.choice([None, None, None, draw.randint(3, 30)]), draw.randint(0, 40)

    def strikes(call: Call) -> None:
        cloud.expired = cloud.expired or (expires is not None and call.number >= expires)
        if call.number == dies and cloud.running():
            cloud.end(draw.choice(cloud.running()).id)

    cloud.on_call = strikes


@pytest.mark.timeout(60 + SEEDS * 6)
def test_random_faults_leave_nothing(cloud: Cloud) -> None:
    """N16: 0 leaks in seeded runs; every error is one of ours."""
    verdicts: dict[str, int] = {}
    for seed in range(SEEDS):
        cloud.forget()
        draw = random.Random(seed)
        misbehave(cloud, draw)
        spec = Spec(accelerator=draw.choice(["T4", None]), nodes=draw.randint(1, 3))
        kinds = ["g4dn.xlarge"] if spec.accelerator else ["c5.large", "t3.medium"]
        own = draw.random() < 0.6  # a group of ours cannot be deleted while a machine is in it: a net that others lack
        group = {} if own else {"security_group_id": "sg-12345678", "placement_group": False}
        aws = cloud.aws(pace=HASTY, instance_types=kinds, **group)
        verdict = "ok"
        try:
            held = aws.acquire(spec, "p", timeout=5)
            assert len(held.machines) == spec.nodes
            assert len({machine.id for machine in held.machines}) == spec.nodes
            returned(held, aws)
        except SkywardError as exc:
            verdict = type(exc).__name__
        verdicts[verdict] = verdicts.get(verdict, 0) + 1
        if verdict == "ok":
            assert_nothing_left(cloud, seed)
        cloud.faults.clear()
        cloud.on_call, cloud.expired = None, False
        reap(cloud)
        assert_nothing_left(cloud, seed)
    assert verdicts["ok"] >= SEEDS // 5, verdicts
