"""NVML through its C functions, against a library with recorded answers; and the meter that asks it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from skyward.api.hardware import Card, Gpu, seen_by_one_process, visible
from skyward.events import GpuSample
from skyward.node import gpu_meter
from skyward.node.gpu_meter import GpuMeter
from skyward.node.gpus import Nvml, NvmlError
from tests.support.nvml import A100_40, H200, FakeCard, FakeNvml
from tests.support.waiting import until

Make = Callable[[list[Card]], GpuMeter]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml(tmp_path, monkeypatch)
    # this process was started before the variable was set
    monkeypatch.setattr("skyward.node.gpus.Nvml.__init__.__defaults__", (str(fake.library),))
    return fake


def cards(*shown: FakeCard, fake: FakeNvml) -> list[Card]:
    fake.show(*shown)
    with Nvml() as nvml:
        return nvml.cards()


@pytest.fixture
def meter_of() -> Iterator[Make]:
    made: list[GpuMeter] = []

    def make(found: list[Card]) -> GpuMeter:
        gpus = visible(found, {})
        names = [gpu.uuid for gpu in gpus]
        made.append(GpuMeter(gpus, names))
        made[-1].watch(names)
        return made[-1]

    yield make
    for meter in made:
        meter.watch([])
        until(lambda meter=meter: not meter._started, 60)


def test_a_card_has_name_uuid_and_memory(fake: FakeNvml) -> None:
    assert cards(H200(), fake=fake) == [Card(Gpu(0, "GPU-0aa00000-0000", "NVIDIA H200", 143771 << 20))]


def test_eight_cards_of_which_the_user_shows_two_by_uuid(fake: FakeNvml) -> None:
    found = cards(*(A100_40(n) for n in range(8)), fake=fake)
    chosen = visible(found, {"CUDA_VISIBLE_DEVICES": "GPU-5bb,GPU-2bb"})
    assert [gpu.index for gpu in chosen] == [5, 2]
    assert seen_by_one_process(visible(found, {})) == 8


def test_seven_slices_of_one_card_and_a_whole_one_beside_it(fake: FakeNvml) -> None:
    found = cards(A100_40(0, slices=7), H200(1), fake=fake)
    parts = visible(found, {})
    assert [gpu.is_slice for gpu in parts] == [True] * 7 + [False]
    assert {(gpu.name, gpu.memory >> 20, gpu.card) for gpu in parts[:7]} == {
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 4864, "GPU-0bb00000-0000")
    }
    (one,) = visible(found, {"CUDA_VISIBLE_DEVICES": "MIG-0-4"})
    assert (one.uuid, one.index) == ("MIG-0-4", 0)


def test_a_card_that_is_lost_when_the_pool_opens_is_left_out(fake: FakeNvml) -> None:
    found = cards(H200(0), H200(1, status=15), H200(2), fake=fake)
    assert [card.gpu.index for card in found] == [0, 2]


def test_what_a_driver_does_not_have_is_an_error_in_words(fake: FakeNvml) -> None:
    fake.show(H200())
    with Nvml() as nvml:
        with pytest.raises(NvmlError, match="this driver has no nvmlOfTomorrow"):
            nvml.call("nvmlOfTomorrow")
        with pytest.raises(NvmlError, match="nvmlDeviceGetHandleByUUID: an error"):
            nvml.by_uuid("GPU-none")
    with pytest.raises(NvmlError, match=r"libnothing\.so cannot be loaded"):
        Nvml("libnothing.so")


def test_figures_are_those_of_nvml_and_unsupported_ones_are_none(fake: FakeNvml, meter_of: Make) -> None:
    busy = H200(0, used=61 << 30, use=97, temperature=64, milliwatts=512_300)
    meter = meter_of(cards(busy, A100_40(1, slices=1), H200(2, use=None, milliwatts=None), fake=fake))
    samples = until(lambda: meter.take()[0], 60)
    assert samples[0] == GpuSample(0, "NVIDIA H200", 97.0, 61 << 30, 143771 << 20, 64.0, 512.3)
    part = GpuSample(1, "NVIDIA A100-SXM4-40GB MIG 1g.5gb", None, 1 << 20, 4864 << 20, 40.0, 100.0)
    assert samples[1] == part, "of a slice, temperature and power are those of its card"
    assert (samples[2].utilization, samples[2].power, samples[2].temperature) == (None, None, 40.0)


def test_trouble_is_noted_once_and_a_lost_card_keeps_its_place(fake: FakeNvml, meter_of: Make) -> None:
    meter = meter_of(cards(H200(0), H200(1), fake=fake))
    until(lambda: meter.take()[0], 60)
    notes: list[tuple[str, str]] = []

    def noted(*texts: str) -> bool:
        notes.extend(meter.take()[1])
        return all(any(text in said for _, said in notes) for text in texts)

    fake.show(H200(0, slowdowns=0x48), H200(1, status=15), xid=(0, 79))
    slow, lost = "GPU 0 (NVIDIA H200) is slow", "GPU 1 (NVIDIA H200) does not answer any more"
    until(lambda: noted(slow, lost, "Xid 79 (the GPU has fallen off the bus)"), 60, notes)
    samples = until(lambda: meter.take()[0], 60)
    assert samples[1] == GpuSample(1, "NVIDIA H200", memory_total=143771 << 20)
    assert [topic for topic, _ in notes] == ["trouble"] * len(notes)
    assert len(notes) == len(set(notes)) == 3


def test_errors_are_heard_where_figures_take_longer_than_the_time_between_them(
    fake: FakeNvml, meter_of: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_meter, "_PERIOD", 0.0)
    meter = meter_of(cards(H200(0), fake=fake))
    fake.show(H200(0), xid=(0, 79))
    ((_, text),) = until(lambda: meter.take()[1], 60)
    assert "Xid 79" in text


def test_a_driver_that_hangs_is_told_and_holds_up_nothing(
    fake: FakeNvml, meter_of: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_meter, "_STALE", 2.0)
    monkeypatch.setattr(gpu_meter, "_STUCK", 3.0)
    meter = meter_of(cards(H200(), fake=fake))
    until(lambda: meter.take()[0], 60)
    fake.show(H200(), hang=True)
    ((topic, text),) = until(lambda: meter.take()[1], 60)
    assert topic == "trouble"
    assert text.startswith("the driver of its GPUs has not answered for")
    assert meter.take() == ([], []), "old figures are not shown"
    fake.show(H200())
    assert len(until(lambda: meter.take()[0], 60)) == 1


def test_gpus_that_cannot_be_asked_are_noted_as_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyward.node.gpus.Nvml.__init__.__defaults__", ("libnothing.so.1",))
    meter = GpuMeter([Gpu(0, "GPU-1", "Tesla T4")], ["0"])
    meter.watch(["0"])
    ((topic, text),) = until(lambda: meter.take()[1], 60)
    assert topic == "missing"
    assert "libnothing.so.1 cannot be loaded" in text


def test_a_node_without_gpus_starts_no_thread() -> None:
    meter = GpuMeter()
    meter.watch([])
    assert meter.take() == ([], [])
    assert not meter._started
