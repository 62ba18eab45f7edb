"""Training on machines that the cloud takes away."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import skyward as sky
from tests.cloud.machines import CACHE, Hosts
from tests.cloud.spot import Seen, instance, who
from tests.ssh.places import TORCH, torch_plugin
from tests.support.cloud import Cloud
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(480)


def test_training_goes_on_from_its_checkpoint_when_a_machine_is_taken(
    cloud: Cloud, hosts: Hosts, opened: Callable[..., tuple[sky.ComputePool, Seen]]
) -> None:
    """DDP over two machines, one of which dies without the body heeding its notice; a new group resumes."""

    @sky.compute(retries=1)
    def train(steps: int, shared: str) -> tuple[int, int, float]:
        from pathlib import Path

        import torch
        import torch.distributed as dist

        info: Any = sky.instance_info()
        saved = Path(shared, f"{info.job_id}.step")
        start = int(saved.read_text()) if saved.exists() else 0
        total = torch.tensor([float(start)])
        for step in range(start, steps):
            if step == steps // 2 and info.attempt == 0:
                print("working", flush=True)
            one = torch.ones(1) / 2
            dist.all_reduce(one)  # fails, or waits for ever, when the other rank is gone
            total += one
            if sky.is_head():
                saved.write_text(str(step + 1))
            while step > steps // 2 and info.attempt == 0 and info.node == 1:
                time.sleep(0.05)
        return info.attempt, start, total.item()

    pool, seen = opened(image=TORCH, plugins=[torch_plugin(backend="gloo")])
    with pool:
        old = dict(who() @ pool)
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.extend(train(20, CACHE) @ pool))
        thread.start()
        until(lambda: seen.working() == 2)
        cloud.notice(instance(cloud, hosts, old[1]), 4)
        thread.join(150)
        assert [(attempt, total) for attempt, _, total in found] == [(1, 20.0)] * 2
        assert all(start >= 10 for _, start, _ in found)
