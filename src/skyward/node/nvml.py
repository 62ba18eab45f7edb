"""NVML, NVIDIA's library for looking at GPUs, by its C functions: it comes with the driver, so nothing is installed.

Every call may take long, or never return when a driver hangs: see `node/gpus.py` and `node/gpu_meter.py`, which call
it from threads of their own. https://docs.nvidia.com/deploy/nvml-api
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from skyward.api.hardware import Card, Gpu

__all__ = ["Nvml", "NvmlError"]

LIBRARY = "libnvidia-ml.so.1"
_TEXT = 96  # NVML's own size for names and UUIDs


class NvmlError(Exception):
    """NVML is not there, or has refused something."""

    def __init__(self, text: str, code: int = 0) -> None:
        super().__init__(text, code)
        self.text, self.code = text, code

    def __str__(self) -> str:
        return self.text


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


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

    def _text(self, function: str, handle: Handle) -> str:
        buffer = ctypes.create_string_buffer(_TEXT)
        self.call(function, handle, buffer, ctypes.c_uint(_TEXT))
        return buffer.value.decode(errors="replace")

    def _number(self, function: str, *arguments: Any) -> int:
        number = ctypes.c_uint()
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


_NO_FUNCTION = 13
