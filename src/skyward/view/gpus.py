"""The GPUs of a node in one cell of the live view: a bar for each, then the figures of all together."""

from __future__ import annotations

from collections.abc import Sequence

from skyward.events import GpuSample

__all__ = ["gpu_cell"]

_BARS = "▁▂▃▄▅▆▇█"
_UNKNOWN = "·"
_MOST_BARS = 16
_GB = 1 << 30


def gpu_cell(gpus: Sequence[GpuSample]) -> str:
    """Such as "GPU 87% 61/141GB 64° 512W" or "8 GPU ▇▇▅▁▇▇▇▇ 77% 402/640GB 71° 3.2kW".

    Use is the mean of all, memory (in GiB) and power their sums, temperature that of the hottest; n/a stands for a use
    that the driver does not say, as for MIG slices.
    """
    used = [gpu.utilization for gpu in gpus if gpu.utilization is not None]
    parts = ["GPU"] if len(gpus) == 1 else [f"{len(gpus)} GPU"]
    if 1 < len(gpus) <= _MOST_BARS and used:
        parts.append("".join(map(_bar, gpus)))
    parts.append(f"{sum(used) / len(used):.0f}%" if used else "n/a")
    if all(gpu.memory_used is not None and gpu.memory_total for gpu in gpus):
        full = sum(gpu.memory_used or 0 for gpu in gpus) / _GB
        parts.append(f"{full:.0f}/{sum(gpu.memory_total or 0 for gpu in gpus) / _GB:.0f}GB")
    cards = {gpu.index: gpu for gpu in gpus}.values()  # slices of one card have its temperature and power
    heat = [gpu.temperature for gpu in cards if gpu.temperature is not None]
    power = [gpu.power for gpu in cards if gpu.power is not None]
    parts += [f"{max(heat):.0f}°"] if heat else []
    parts += [_watts(sum(power))] if power else []
    return " ".join(parts)


def _bar(gpu: GpuSample) -> str:
    if gpu.utilization is None:
        return _UNKNOWN
    return _BARS[min(len(_BARS) - 1, int(gpu.utilization / 100 * len(_BARS)))]


def _watts(power: float) -> str:
    return f"{power:.0f}W" if power < 1000 else f"{power / 1000:.1f}kW"
