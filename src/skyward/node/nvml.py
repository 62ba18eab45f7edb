"""NVML, NVIDIA's library for looking at GPUs, by its C functions: it comes with the driver, so nothing is installed.

Every call may take long, or never return when a driver hangs: see `node/gpus.py` and `node/gpu_meter.py`, which call
it from threads of their own. https://docs.nvidia.com/deploy/nvml-api
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

from skyward.api.hardware import Card, Gpu

__all__ = ["LOST", "Handle", "Nvml", "NvmlError"]

LIBRARY = "libnvidia-ml.so.1"
LOST = (15, 16)
"""The codes of a GPU that has fallen off the bus, or must be reset."""
_TEXT = 96  # NVML's own size for names and UUIDs
_TIMEOUT, _NO_FUNCTION = 10, 13
_XID = 0x8


class NvmlError(Exception):
    """NVML is not there, or has refused something."""

    def __init__(self, text: str, code: int = 0) -> None:
        super().__init__(text, code)
        self.text, self.code = text, code

    def __str__(self) -> str:
        return self.text


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Event(ctypes.Structure):
    _fields_ = (
        *(("device", ctypes.c_void_p), ("type", ctypes.c_ulonglong), ("data", ctypes.c_ulonglong)),
        *(("gpu_instance", ctypes.c_uint), ("compute_instance", ctypes.c_uint)),
    )


Handle = ctypes.c_void_p


class Nvml:
    """NVML from here to the end of the `with` block. Raises `NvmlError` where it is not there or finds no driver."""

    def __init__(self, library: str = LIBRARY) -> None:
        try:
            self._library: Any = ctypes.CDLL(library)
        except OSError as exc:
            raise NvmlError(f"{library} cannot be loaded ({exc})") from exc

    def __enter__(self) -> Nvml:
        self.call("nvmlInit_v2")
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            self.call("nvmlShutdown")
        except NvmlError:
            pass  # a driver that has gone away meanwhile

    def call(self, function: str, *arguments: Any) -> None:
        """Calls one of its functions; another answer than success is an `NvmlError`."""
        try:
            called = getattr(self._library, function)
        except AttributeError:
            raise NvmlError(f"this driver has no {function}", _NO_FUNCTION) from None
        code = called(*arguments)
        if code:
            raise NvmlError(f"{function}: {self._explained(code)}", code)

    def cards(self) -> list[Card]:
        """Every GPU, in the order of `nvidia-smi`; one that does not answer is left out."""
        count = self._number("nvmlDeviceGetCount_v2")
        found = [self._card(index) for index in range(count)]
        return [card for card in found if card is not None]

    def handle(self, index: int) -> Handle:
        """What NVML's functions take for a GPU."""
        handle = Handle()
        self.call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
        return handle

    def by_uuid(self, uuid: str) -> Handle:
        """The same, for a GPU or a MIG slice."""
        handle = Handle()
        self.call("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(handle))
        return handle

    def slices(self, handle: Handle) -> list[Handle] | None:
        """The MIG slices of a GPU; None if MIG is switched off, or not known to this GPU or driver."""
        now, later = ctypes.c_uint(), ctypes.c_uint()
        try:
            self.call("nvmlDeviceGetMigMode", handle, ctypes.byref(now), ctypes.byref(later))
        except NvmlError:
            return None
        if not now.value:
            return None
        found: list[Handle] = []
        for index in range(self.optional(lambda: self._number("nvmlDeviceGetMaxMigDeviceCount", handle)) or 0):
            part = Handle()
            try:
                self.call("nvmlDeviceGetMigDeviceHandleByIndex", handle, ctypes.c_uint(index), ctypes.byref(part))
            except NvmlError:
                continue  # there are gaps
            found.append(part)
        return found

    def memory(self, handle: Handle) -> tuple[int, int]:
        """Bytes in use and in all."""
        memory = _Memory()
        self.call("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
        return memory.used, memory.total

    def utilization(self, handle: Handle) -> float:
        """Per cent of the last moment in which a program ran on the GPU."""
        rates = _Utilization()
        self.call("nvmlDeviceGetUtilizationRates", handle, ctypes.byref(rates))
        return float(rates.gpu)

    def temperature(self, handle: Handle) -> float:
        """In degrees Celsius."""
        return float(self._number("nvmlDeviceGetTemperature", handle, ctypes.c_int(0)))

    def power(self, handle: Handle) -> float:
        """In watts."""
        return self._number("nvmlDeviceGetPowerUsage", handle) / 1000

    def slowdowns(self, handle: Handle) -> int:
        """Why its clocks are lower than they could be, as bits; see `node/gpu_health.py`."""
        return self._long("nvmlDeviceGetCurrentClocksThrottleReasons", handle)

    def memory_errors(self, handle: Handle) -> int:
        """How many errors its memory could not correct since the driver was loaded."""
        return self._long("nvmlDeviceGetTotalEccErrors", handle, ctypes.c_int(1), ctypes.c_int(0))

    def listen(self, handles: Sequence[Handle], before: Handle | None = None) -> Handle | None:
        """What `xid` waits on, in place of `before`; None where the driver tells nothing."""
        events = Handle()
        if before is not None:
            self.optional(lambda: self.call("nvmlEventSetFree", before))
        try:
            self.call("nvmlEventSetCreate", ctypes.byref(events))
        except NvmlError:
            return None
        heard = [self.optional(lambda handle=handle: self._register(handle, events)) for handle in handles]
        return events if any(heard) else None

    def xid(self, events: Handle, seconds: float) -> tuple[int, int] | None:
        """The next error that the driver tells: the GPU's number and the error's; None if none comes in time."""
        event = _Event()
        try:
            self.call("nvmlEventSetWait_v2", events, ctypes.byref(event), ctypes.c_uint(int(seconds * 1000)))
        except NvmlError as exc:
            if exc.code == _TIMEOUT:
                return None
            raise
        if event.type != _XID:
            return None
        return self._number("nvmlDeviceGetIndex", Handle(event.device)), int(event.data)

    def optional(self, ask: Callable[[], Any]) -> Any:
        """What `ask` returns; None where this GPU or driver does not say it."""
        try:
            return ask()
        except NvmlError:
            return None

    def _card(self, index: int) -> Card | None:
        try:
            handle = self.handle(index)
            gpu = self._gpu(index, handle)
        except NvmlError:
            return None  # it has fallen off the bus, or is not ours to use
        slices = self.slices(handle)
        parts = [self.optional(lambda part=part: self._gpu(index, part, gpu.uuid)) for part in slices or ()]
        return Card(gpu, slices is not None, tuple(part for part in parts if part is not None))

    def _gpu(self, index: int, handle: Handle, card: str = "") -> Gpu:
        name, uuid = self._text("nvmlDeviceGetName", handle), self._text("nvmlDeviceGetUUID", handle)
        memory = self.optional(lambda: self.memory(handle)) or (0, 0)
        return Gpu(index, uuid, name, memory[1], card=card)

    def _register(self, handle: Handle, events: Handle) -> bool:
        self.call("nvmlDeviceRegisterEvents", handle, ctypes.c_ulonglong(_XID), events)
        return True

    def _text(self, function: str, handle: Handle) -> str:
        buffer = ctypes.create_string_buffer(_TEXT)
        self.call(function, handle, buffer, ctypes.c_uint(_TEXT))
        return buffer.value.decode(errors="replace")

    def _number(self, function: str, *arguments: Any) -> int:
        number = ctypes.c_uint()
        self.call(function, *arguments, ctypes.byref(number))
        return number.value

    def _long(self, function: str, *arguments: Any) -> int:
        number = ctypes.c_ulonglong()
        self.call(function, *arguments, ctypes.byref(number))
        return number.value

    def _explained(self, code: int) -> str:
        try:
            explain = self._library.nvmlErrorString
        except AttributeError:
            return f"error {code}"
        explain.restype = ctypes.c_char_p
        text: bytes | None = explain(ctypes.c_int(code))
        return text.decode(errors="replace") if text else f"error {code}"
