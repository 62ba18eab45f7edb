"""Pools on a computer with GPUs, as far as they are looked at: the driver's library is a stand-in, the rest is real."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import skyward as sky
from skyward import errors, events
from skyward.node.gpus import look
from tests.support.listener import Listener
from tests.support.nvml import A100_40, H200, FakeNvml
from tests.support.waiting import until

pytestmark = pytest.mark.skipif(bool(look({}).cards), reason="this machine has GPUs of its own")


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return FakeNvml(tmp_path, monkeypatch)


@sky.compute
def place() -> sky.InstanceInfo:
    return sky.instance_info()


def refused(**options: object) -> str:
    with pytest.raises(errors.AcceleratorMismatch) as caught:
        with sky.ComputePool(console=False, **options):  # type: ignore[arg-type]
            pass
    return str(caught.value)


def test_accelerators_are_compared_with_what_the_driver_says(fake: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another kind, too few, hidden ones, and slices are refused, with what is there."""
    fake.show(H200(0), H200(1))
    text = refused(accelerator="A100", nodes=2)
    assert "this computer has 2 x NVIDIA H200 (140 GiB each), and that is no A100; 1 x A100 (80GB or 40GB each)" in text
    assert 'accelerator="H200:2"' in text
    assert "has 2 x NVIDIA H200" in refused(accelerator="H200:8")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "hides all of its GPUs (2)" in refused(accelerator="H200")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    fake.show(A100_40(0, slices=7))
    assert "a MIG slice is not a whole A100" in refused(accelerator="A100")


def test_every_node_shows_its_own_gpus_and_trouble_is_a_warning_with_its_name(fake: FakeNvml) -> None:
    fake.show(H200(0, use=97, used=1 << 30), H200(1))
    pool = sky.ComputePool(nodes=2, accelerator="H200", console=False)
    heard = Listener(pool)
    with pool:
        assert [info.accelerators for info in place() @ pool] == [1, 1]

        def samples(node: int) -> list[events.NodeSample]:
            return [event for event in heard.of(events.NodeSample) if event.node == node and event.gpus]

        until(lambda: samples(0) and samples(1), 60)
        (first,) = samples(0)[0].gpus
        (second,) = samples(1)[0].gpus
        assert first == events.GpuSample(0, "NVIDIA H200", 97.0, 1 << 30, 143771 << 20, 40.0, 100.0)
        assert second.index == 1
        fake.show(H200(0), H200(1, slowdowns=0x40))

        def warnings() -> list[str]:
            return [event.text for event in heard.of(events.Notice) if event.level == "warning"]

        hot = "node 1: GPU 1 (NVIDIA H200) is slow: the hardware has lowered its clocks because it is too hot."
        until(lambda: hot in warnings(), 60)
        count = len(samples(1))
        until(lambda: len(samples(1)) > count + 2, 60)
        assert warnings().count(hot) == 1
    assert [text for text in warnings() if "GPU 0" in text] == []


def test_a_driver_that_hangs_does_not_hold_up_calls(fake: FakeNvml) -> None:
    fake.show(H200())
    pool = sky.ComputePool(console=False)
    heard = Listener(pool)
    with pool:
        until(lambda: [event for event in heard.of(events.NodeSample) if event.gpus], 60)
        fake.show(H200(), hang=True)
        until(lambda: not heard.of(events.NodeSample)[-1].gpus, 60)
        assert (place() >> pool).accelerators == 1
        before = len(heard.of(events.NodeSample))
        until(lambda: len(heard.of(events.NodeSample)) > before, 60)


def test_nodes_that_share_a_gpu_get_their_share_of_its_memory_and_say_so_once(fake: FakeNvml) -> None:
    fake.show(H200(0))
    pool = sky.ComputePool(nodes=2, console=False)
    heard = Listener(pool)

    @sky.compute
    def fraction() -> str | None:
        return os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION")

    with pool:
        assert fraction() @ pool == ["0.45", "0.45"]
    assert sum("2 processes share a GPU" in event.text for event in heard.of(events.Notice)) == 1
