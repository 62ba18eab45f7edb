"""How busy a node's GPUs are: asked once a second in a thread of its own, since a driver that hangs must not stop us.

thread: NVML or /sys ──readings──► GpuHealth ──► GpuMeter.take ──► the agent's next message `sample`
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

from skyward.api.hardware import Gpu
from skyward.events import GpuSample
from skyward.node.amd import amd_sample
from skyward.node.gpu_health import GpuHealth, Reading
from skyward.node.nvml import LOST, Handle, Nvml, NvmlError

__all__ = ["GpuMeter"]

_PERIOD = 1.0
_STALE = 5.0
_STUCK = 30.0
Note = tuple[Literal["trouble", "missing"], str]
Keep = Callable[[list[Reading], list[tuple[int, int]]], None]


class GpuMeter:
    """The GPUs of one node; `names` are what the pool calls them, in the same order."""

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
        """Begins to ask the node's GPUs: these, of all that the machine has. Ends it if there are none."""
        self._own = tuple(self._all[name] for name in names if name in self._all)
        if self._own and not self._started:
            self._started, self._at = True, self._clock()
            ask = _nvidia if self._own[0].vendor == "nvidia" else _amd
            threading.Thread(target=self._run, args=(ask,), name="skyward-gpus", daemon=True).start()

    def take(self) -> tuple[list[GpuSample], list[Note]]:
        """The latest figures, none if they are old; and notes that were not taken before."""
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
