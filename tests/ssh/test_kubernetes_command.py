"""The command of the Job for Kubernetes joins a pool as it stands."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward.errors import NodeLost
from skyward.setup.joined import places
from tests.ssh.places import CACHE, ours
from tests.support.hosts import Host, Network
from tests.support.hosts.spec import USERS
from tests.support.kubernetes import documents
from tests.support.waiting import until

MANIFESTS = Path(__file__).parents[2] / "examples" / "kubernetes"


@pytest.fixture
def job() -> dict[str, Any]:
    (found,) = documents(MANIFESTS / "job.yaml")
    return found


@sky.compute
def where() -> tuple[str, int]:
    import socket

    return socket.gethostname(), sky.instance_info().node


class Pods:
    """Runs the container's command on hosts, as a kubelet would: not as root, with the Secret's file and its number."""

    def __init__(self, job: dict[str, Any]) -> None:
        container = job["spec"]["template"]["spec"]["containers"][0]
        self._command, self._env = container["command"], container["env"]
        self.started: list[subprocess.Popen[bytes]] = []

    def prepare(self, host: Host, program: str) -> None:
        host.run(["sh", "-c", "mkdir -p /etc/skyward; chmod 2777 /dev/shm"], user="root")  # so is an emptyDir
        host.put("/etc/skyward/join.py", program.encode(), mode="440")
        host.run(["chgrp", str(USERS["sky"]), "/etc/skyward/join.py"], user="root")  # as fsGroup has it

    def start(self, host: Host, index: int) -> subprocess.Popen[bytes]:
        variables = [f"JOB_COMPLETION_INDEX={index}", *(f"{each['name']}={each['value']}" for each in self._env)]
        self.started.append(host.start(["env", *variables, f"SKYWARD_CACHE={CACHE}", *self._command]))
        return self.started[-1]

    def remove(self, hosts: list[Host]) -> None:
        for process in self.started:
            process.kill()
            process.wait()
        for host in hosts:
            host.run(["sh", "-c", "rm -rf /etc/skyward /tmp/skyward; chmod 1777 /dev/shm"], user="root")


@pytest.fixture
def pods(job: dict[str, Any], net: Network) -> Iterator[Pods]:
    made = Pods(job)
    yield made
    made.remove(list(net)[:2])


def test_the_containers_command_joins_a_pool_as_it_stands(
    pods: Pods, net: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "_ABSENT", 2.0)
    hosts, file = list(net)[:2], tmp_path / "join.py"

    def kubectl() -> None:
        program = until(lambda: file.exists() and file.read_text(), 60, "the program for the pods")
        for index, host in enumerate(hosts):
            pods.prepare(host, program)
            pods.start(host, index)

    applying = threading.Thread(target=kubectl)
    applying.start()
    provider = sky.Join(nodes=2, file=file, addresses=[net.address])
    with sky.ComputePool(provider=provider, console=False) as pool:
        applying.join()
        assert where() @ pool == [("h0", 0), ("h1", 1)], "a pod's number is its node's"
        assert "skyward" in hosts[0].run(["ls", "/dev/shm"], user="root").stdout, "a pod has its memory to itself"
        # the second pod is killed, with all that is in it; Kubernetes starts it again, with the same number
        for process in hosts[1].processes("sky"):
            if "/tmp/skyward/join.py" in process.argv:
                hosts[1].signal(process.pid)
        assert pods.started[1].wait(60) != 0
        pods.start(hosts[1], 1)
        until(lambda: _hosts(pool) == ["h0", "h1"], 120)
    assert [pods.started[index].wait(60) for index in (0, 2)] == [0, 0], "the Job is complete"
    until(lambda: not any(ours(host) for host in hosts), 60)


def _hosts(pool: sky.ComputePool) -> list[str]:
    try:
        return [host for host, _ in where() @ pool]
    except NodeLost:
        return []
