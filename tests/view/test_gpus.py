"""The GPUs of a node in one cell that fits beside the rest on 80 columns."""

from __future__ import annotations

from dataclasses import replace

from skyward.events import GpuSample
from skyward.view.overview import gpu_cell

H200 = GpuSample(0, "NVIDIA H200", 87.0, 61 << 30, 141 << 30, 64.0, 512.3)


def test_one_gpu_shows_its_figures() -> None:
    assert gpu_cell([H200]) == "GPU 87% 61/141GB 64° 512W"


def test_eight_gpus_take_one_cell_with_a_bar_for_each() -> None:
    uses = (100, 99, 62, 0, 50, 13, 75, 88)
    gpus = [replace(H200, index=n, utilization=float(use), temperature=60.0 + n) for n, use in enumerate(uses)]
    cell = gpu_cell(gpus)
    assert cell == "8 GPU ██▅▁▅▂▇█ 61% 488/1128GB 67° 4.1kW"
    assert len("○ node-0  up    97 % CPU      123 MB  " + cell) <= 80


def test_what_a_driver_does_not_say_is_not_shown_as_zero() -> None:
    assert gpu_cell([GpuSample(0, "NVIDIA H200")]) == "GPU n/a"
    assert gpu_cell([H200, GpuSample(1, "NVIDIA H200")]) == "2 GPU ▇· 87% 64° 512W"


def test_slices_show_their_memory_and_the_power_of_their_card_once() -> None:
    part = GpuSample(0, "NVIDIA A100-SXM4-40GB MIG 1g.5gb", None, 1 << 30, 5 << 30, 44.0, 120.0)
    assert gpu_cell([part] * 7) == "7 GPU n/a 7/35GB 44° 120W"
