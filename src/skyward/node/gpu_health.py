"""What is wrong with a node's GPUs, said once: they are slowed down, lost, or report errors. Pure.

readings of all GPUs, once a second ──► GpuHealth.observe ──► sentences for the user
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from skyward.events import GpuSample

__all__ = ["GpuHealth", "Reading"]

_QUIET = 60.0  # what comes and goes within this time is one event
# Bits of nvmlDeviceGetCurrentClocksEventReasons. A power limit that is reached (0x4) is how a busy GPU runs.
_SLOWDOWNS = {
    0x20: "the driver has lowered its clocks, since it is too hot",
    0x40: "the hardware has lowered its clocks, since it is too hot",
    0x80: "the hardware has lowered its clocks, since its power supply asks for it",
    0x8: "the hardware has lowered its clocks",
}
# https://docs.nvidia.com/deploy/xid-errors
_XIDS = {
    13: "an exception in a program on the GPU, mostly the program's own mistake",
    31: "a program on the GPU has used a wrong address, mostly the program's own mistake",
    43: "a program on the GPU was stopped, mostly for its own mistake",
    45: "a program on the GPU was ended",
    48: "an error in its memory that cannot be corrected",
    63: "a page or row of its memory is retired",
    64: "a page or row of its memory cannot be retired",
    74: "an error of NVLink",
    79: "the GPU has fallen off the bus",
    94: "an error in its memory that has ended one program",
    95: "an error in its memory that may have hit every program",
    119: "its own processor does not answer",
    120: "an error of its own processor",
}


@dataclass(frozen=True, slots=True)
class Reading:
    """What one GPU has answered. `errors` counts what its memory could not correct; `lost` says why it is gone."""

    sample: GpuSample
    slowdowns: int = 0
    errors: int | None = None
    lost: str = ""


@dataclass
class GpuHealth:
    """Remembers what was said of each GPU."""

    _said: dict[tuple[int, str], float] = field(default_factory=dict[tuple[int, str], float])
    _errors: dict[int, int] = field(default_factory=dict[int, int])

    def observe(self, readings: Sequence[Reading], xids: Sequence[tuple[int, int]], now: float) -> list[str]:
        """What is new; `xids` are errors that the driver has told: the GPU's number, and the error's."""
        texts: dict[int, list[str]] = {}
        for reading in readings:
            texts.setdefault(reading.sample.index, self._troubles(reading))  # slices of one card say the same
        for index, xid in xids:
            explained = f" ({_XIDS[xid]})" if xid in _XIDS else ""
            texts.setdefault(index, []).append(f"reports the error Xid {xid}{explained}")
        names = {reading.sample.index: reading.sample.name for reading in readings}
        return [
            f"GPU {index} ({names[index]}) {text}." if index in names else f"GPU {index} {text}."
            for index, found in texts.items()
            for text in found
            if self._is_new(index, text, now)
        ]

    def _troubles(self, reading: Reading) -> list[str]:
        if reading.lost:
            return [f"does not answer any more: {reading.lost}"]
        found = [f"is slow: {text}" for bit, text in _SLOWDOWNS.items() if reading.slowdowns & bit][:1]
        if reading.errors is not None:
            index = reading.sample.index
            before = self._errors.setdefault(index, reading.errors)
            self._errors[index] = max(before, reading.errors)
            if reading.errors > before:
                found.append("had errors in its memory that cannot be corrected (ECC); results may be wrong")
        return found

    def _is_new(self, index: int, text: str, now: float) -> bool:
        last = self._said.get((index, text))
        self._said[index, text] = now
        return last is None or now - last > _QUIET
