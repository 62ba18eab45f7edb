"""Accelerators of cloud machines: what a machine really has is compared with what was asked for."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import skyward as sky
from skyward import errors, events
from skyward.providers.aws.provider import AWS
from tests.cloud.machines import Hosts
from tests.support.cloud import Cloud


@sky.compute
def place() -> sky.InstanceInfo:
    return sky.instance_info()


def test_a_machine_with_the_gpu_of_its_type_is_accepted_and_another_one_is_not(
    cloud: Cloud, hosts: Hosts, aws: Callable[..., AWS]
) -> None:
    """The second machine's driver shows nothing: it is given back before anything runs on it."""
    seen: list[events.Event] = []
    pool = sky.ComputePool(provider=aws(), accelerator="T4", console=False)
    pool.on_event(seen.append)
    with pool:
        info = place() >> pool
        assert (info.accelerators, info.accelerator.type) == (1, "T4")
    warnings = [event.text for event in seen if isinstance(event, events.Notice) and event.level == "warning"]
    assert not [text for text in warnings if "T4" in text]

    hosts.gpus = False
    try:
        with pytest.raises(errors.AcceleratorMismatch, match=r"has no GPU; 1 x T4 \(16GB each\) was asked for"):
            with sky.ComputePool(provider=aws(), accelerator="T4", console=False):
                pass
    finally:
        hosts.gpus = True
    assert cloud.leftovers() == []
