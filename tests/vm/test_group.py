"""Two machines with Ubuntu 22.04, whose port 22 resets all connections at first, and that work together then."""

from __future__ import annotations

import os
import socket
import time
from typing import Any

import pytest

import skyward as sky
from tests.ssh.places import torch_plugin
from tests.support.cloud import Cloud
from tests.vm.conftest import Figure
from tests.vm.image import PLAIN, RESETTING
from tests.vm.machines import Machines
from tests.vm.opening import Opened, login_key

PORT = 7077
TORCH = os.environ.get("SKYWARD_VM_TORCH")


@sky.compute
def meet(rounds: int) -> tuple[int, int, float]:
    """All ranks add to one counter, and leave together: by the nodes' own links, with the pool's certificates."""
    info: Any = sky.instance_info()
    meeting = sky.barrier("meeting")
    meeting.wait(timeout=300)
    began = time.monotonic()
    for _ in range(rounds):
        sky.counter("arrivals").add(1)
        meeting.wait(timeout=300)
    return info.node, sky.counter("arrivals").value, (time.monotonic() - began) / rounds


@sky.compute
def ring() -> str:
    """Node 1 connects to node 0 by the address that frameworks use, and gets an answer."""
    info: Any = sky.instance_info()
    meeting = sky.barrier("ring")
    if info.node == 0:
        with socket.create_server((info.peers[0].private_ip, PORT)) as server:
            server.settimeout(300)
            meeting.wait(timeout=300)
            caller, _ = server.accept()
            with caller:
                caller.sendall(b"hello from node 0")
        return "answered"
    meeting.wait(timeout=300)
    with socket.create_connection((info.head_addr, PORT), timeout=300) as line:
        return line.makefile().read()


def test_machines_that_reset_early_connections_are_tried_again_and_work_together(
    cloud: Cloud, machines: Machines, figure: Figure
) -> None:
    machines.release, machines.files, machines.timed = "22.04", RESETTING, False
    with Opened(cloud, nodes=2) as opened:
        figure("two of Ubuntu 22.04, connections reset at first: until the pool is open", opened.took)
        assert any(machine.console.count("reset") > 1 for machine in machines.of.values()), "somebody was reset"
        met = meet(20) @ opened.pool
        assert [(node, count) for node, count, _ in met] == [(0, 40), (1, 40)]
        figure("two of Ubuntu 22.04: one barrier and counter between them", max(took for _, _, took in met))
        assert ring() @ opened.pool == ["answered", "hello from node 0"]
        first, second = machines.of.values()
        lines = second.run("ss -Htn state established", login_key()) + first.run(
            "ss -Htn state established", login_key()
        )
        between = [line for line in lines.splitlines() if first.host.address in line and second.host.address in line]
        assert between, "they talk to each other, not through the client"


@sky.compute
def summed() -> list[float]:
    """What all ranks have, added up by torch."""
    import torch
    import torch.distributed as dist

    mine = torch.full((4,), float(dist.get_rank() + 1))
    dist.all_reduce(mine)
    return mine.tolist()


@pytest.mark.skipif(not TORCH, reason="installing torch takes long where a processor is emulated; SKYWARD_VM_TORCH=1")
def test_two_machines_form_a_group_of_torch(cloud: Cloud, machines: Machines, figure: Figure) -> None:
    """Packages are fetched here and sent: the machines reach no index."""
    machines.release, machines.files, machines.timed = "22.04", PLAIN, True
    image = {"pip": ["torch==2.13.0", "numpy"]}
    with Opened(cloud, nodes=2, image=image, plugins=[torch_plugin(backend="gloo")]) as opened:
        figure("two of Ubuntu 22.04 with torch: until the pool is open", opened.took)
        assert summed() @ opened.pool == [[3.0] * 4] * 2
