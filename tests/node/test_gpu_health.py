"""What is wrong with a GPU is said once."""

from __future__ import annotations

from skyward.events import GpuSample
from skyward.node.gpu_meter import GpuHealth, Reading

HOT, POWER_LIMIT, HARDWARE = 0x40, 0x4, 0x8


def reading(index: int = 0, slowdowns: int = 0, errors: int | None = 0, lost: str = "") -> Reading:
    return Reading(GpuSample(index, "NVIDIA H200", 97.0), slowdowns, errors, lost)


def test_a_gpu_that_is_too_hot_is_named_once_until_it_has_been_well_for_a_while() -> None:
    health = GpuHealth()
    assert health.observe([reading()], [], 0) == []
    assert health.observe([reading(slowdowns=HARDWARE | HOT)], [], 1) == [
        "GPU 0 (NVIDIA H200) is slow: the hardware has lowered its clocks because it is too hot."
    ]
    for second in range(2, 200):  # on and off every second is one event
        assert health.observe([reading(slowdowns=HOT * (second % 2))], [], second) == []
    assert health.observe([reading()], [], 201) == []
    assert len(health.observe([reading(slowdowns=HOT)], [], 300)) == 1


def test_a_power_limit_that_is_reached_is_no_trouble() -> None:
    assert GpuHealth().observe([reading(slowdowns=POWER_LIMIT)], [], 0) == []


def test_every_gpu_is_judged_by_itself_and_the_slices_of_one_together() -> None:
    health = GpuHealth()
    texts = health.observe([reading(0, HOT), reading(0, HOT), reading(1), reading(2, HOT)], [], 0)
    assert [text.partition(" (")[0] for text in texts] == ["GPU 0", "GPU 2"]


def test_errors_in_memory_count_from_when_the_pool_began() -> None:
    health = GpuHealth()
    assert health.observe([reading(errors=3)], [], 0) == [], "they were there before"
    (text,) = health.observe([reading(errors=4)], [], 1)
    assert "had errors in its memory that cannot be corrected" in text
    assert health.observe([reading(errors=4)], [], 2) == []
    assert health.observe([reading(errors=None)], [], 3) == []


def test_what_the_driver_reports_is_explained_and_not_repeated() -> None:
    health = GpuHealth()
    (text,) = health.observe([reading()], [(0, 79)], 0)
    assert text == "GPU 0 (NVIDIA H200) reports the error Xid 79 (the GPU has fallen off the bus)."
    assert health.observe([reading()], [(0, 79), (0, 79)], 1) == []
    assert health.observe([], [(3, 999)], 2) == ["GPU 3 reports the error Xid 999."]


def test_a_gpu_that_is_gone_is_told_once() -> None:
    health = GpuHealth()
    gone = reading(lost="GPU is lost")
    assert health.observe([gone], [], 0) == ["GPU 0 (NVIDIA H200) does not answer any more: GPU is lost."]
    assert health.observe([gone], [], 1) == []
