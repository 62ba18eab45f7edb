"""How busy a node's GPUs are, and what is wrong with them, reported once: slow, lost, or with errors."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from skyward.api.hardware import Gpu
from skyward.events import GpuSample
from skyward.node.gpus import LOST, Handle, Nvml, NvmlError, amd_sample

__all__ = ["GpuHealth", "GpuMeter", "Reading"]

_QUIET = 60.0  # what comes and goes within this time is one event
# Bits of nvmlDeviceGetCurrentClocksEventReasons. A power limit that is reached (0x4) is how a busy GPU runs.
_SLOWDOWNS = {
    0x20: "the driver has lowered its clocks because it is too hot",
    0x40: "the hardware has lowered its clocks because it is too hot",
    0x80: "the hardware has lowered its clocks because its power supply demands it",
    0x8: "the hardware has lowered its clocks",
}
# https://docs.nvidia.com/deploy/xid-errors
_XIDS = {
    13: "an exception in a program on the GPU, usually a bug in the program",
    31: "a program on the GPU used an invalid address, usually a bug in the program",
    43: "a program on the GPU was stopped, usually because of a bug in it",
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
    sample: GpuSample
    slowdowns: int = 0
    errors: int | None = None
    lost: str = ""


@dataclass
class GpuHealth:
    _said: dict[tuple[int, str], float] = field(default_factory=dict[tuple[int, str], float])
    _errors: dict[int, int] = field(default_factory=dict[int, int])

    def observe(self, readings: Sequence[Reading], xids: Sequence[tuple[int, int]], now: float) -> list[str]:
        """New problems; `xids` are (GPU number, error number) from the driver."""
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


# How busy a node's GPUs are: asked once a second in a thread of its own, since a driver that hangs must not stop us.
#
# thread: NVML or /sys ──readings──► GpuHealth ──► GpuMeter.take ──► the agent's next message `sample`


_PERIOD = 1.0
_LEAST_PAUSE = 0.1
_STALE = 5.0
_STUCK = 30.0
Note = tuple[Literal["trouble", "missing"], str]
Keep = Callable[[list[Reading], list[tuple[int, int]]], None]


class GpuMeter:
    def __init__(
        self, gpus: Sequence[Gpu] = (), names: Sequence[str] = (), clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._all, self._clock = dict(zip(names, gpus, strict=True)), clock
        self._own: tuple[Gpu, ...] = ()
        self._started = False
        self._health = GpuHealth()
        self._lock = threading.Lock()
        self._samples: list[GpuSample] = []
        self._notes: list[Note] = []
        self._at = clock()
        self._silent = False

    def watch(self, names: Sequence[str]) -> None:
        self._own = tuple(self._all[name] for name in names if name in self._all)
        if self._own and not self._started:
            self._started, self._at = True, self._clock()
            ask = _nvidia if self._own[0].vendor == "nvidia" else _amd
            threading.Thread(target=self._run, args=(ask,), name="skyward-gpus", daemon=True).start()

    def take(self) -> tuple[list[GpuSample], list[Note]]:
        now = self._clock()
        with self._lock:
            notes, self._notes = self._notes, []
            late = now - self._at
            if self._own and late > _STUCK and not self._silent:
                self._silent = True
                notes.append(("trouble", f"the driver of its GPUs has not answered for {late:.0f} s."))
            return (list(self._samples) if late < _STALE else []), notes

    def _run(self, ask: Callable[[Callable[[], Sequence[Gpu]], Keep], None]) -> None:
        try:
            ask(lambda: self._own, self._keep)
            self._started = False
        except Exception as exc:  # whatever a driver does: the user is told, and the node goes on
            with self._lock:
                self._silent = True
                self._notes.append(("missing", f"the figures of its GPUs are not shown: {exc}."))

    def _keep(self, readings: list[Reading], xids: list[tuple[int, int]]) -> None:
        texts = self._health.observe(readings, xids, self._clock())
        with self._lock:
            self._samples = [reading.sample for reading in readings]
            self._notes.extend(("trouble", text) for text in texts)
            self._at, self._silent = self._clock(), False


def _nvidia(own: Callable[[], Sequence[Gpu]], keep: Keep) -> None:
    with Nvml() as nvml:
        handles: dict[str, Handle | None] = {}
        events: Handle | None = None
        xids: list[tuple[int, int]] = []
        while gpus := own():
            end = time.monotonic() + _PERIOD
            new = {gpu.card or gpu.uuid for gpu in gpus} - handles.keys()
            if new:
                handles |= {uuid: nvml.optional(partial(nvml.by_uuid, uuid)) for uuid in new}
                events = nvml.listen([handle for handle in handles.values() if handle is not None], events)
            mine = {gpu.index for gpu in gpus}
            keep([_read(nvml, gpu, handles[gpu.card or gpu.uuid]) for gpu in gpus], [x for x in xids if x[0] in mine])
            xids = []
            end = max(end, time.monotonic() + _LEAST_PAUSE)  # also where answers are slow: errors come only now
            while (rest := end - time.monotonic()) > 0:
                try:
                    found = nvml.xid(events, rest) if events is not None else time.sleep(rest)
                except NvmlError:
                    events = None  # it is not told any more
                    continue
                xids += [found] if found else []


def _read(nvml: Nvml, gpu: Gpu, card: Handle | None) -> Reading:
    empty = GpuSample(gpu.index, gpu.name, memory_total=gpu.memory or None)
    if card is None:
        return Reading(empty)
    lost: list[str] = []

    def ask(what: Callable[[Handle], float], handle: Handle) -> float | None:
        try:
            return None if lost else what(handle)
        except NvmlError as exc:
            if exc.code in LOST:
                lost.append(str(exc))
            return None

    part = nvml.optional(lambda: nvml.by_uuid(gpu.uuid)) if gpu.is_slice else card
    memory = None if part is None else nvml.optional(lambda: nvml.memory(part))
    sample = replace(
        empty,
        utilization=None if gpu.is_slice else ask(nvml.utilization, card),
        memory_used=memory[0] if memory else None,
        memory_total=memory[1] if memory else gpu.memory or None,
        temperature=ask(nvml.temperature, card),
        power=ask(nvml.power, card),
    )
    slowdowns, errors = ask(nvml.slowdowns, card), ask(nvml.memory_errors, card)
    return Reading(sample, int(slowdowns or 0), None if errors is None else int(errors), lost[0] if lost else "")


def _amd(own: Callable[[], Sequence[Gpu]], keep: Keep) -> None:
    while gpus := own():
        keep([Reading(amd_sample(gpu.index)) for gpu in gpus], [])
        time.sleep(_PERIOD)
