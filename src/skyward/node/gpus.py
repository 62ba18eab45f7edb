"""Detects accelerators with NVML, nvidia-smi, or kernel drivers, in that order."""

from __future__ import annotations

import ctypes
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyward.api.hardware import Card, Found, Gpu, seen_by_one_process, visible

if TYPE_CHECKING:
    from skyward.events import GpuSample

__all__ = [
    "LOST",
    "Handle",
    "Nvml",
    "NvmlError",
    "amd_cards",
    "amd_sample",
    "count_accelerators",
    "look",
    "visible_gpus",
]


_PATIENCE = 30.0  # a driver that has to wake eight GPUs takes ten seconds or more


def visible_gpus(environ: Mapping[str, str] | None = None) -> tuple[Gpu, ...]:
    """The GPUs and MIG slices that processes may use here now, by `environ` (default: this process's own)."""
    return look(environ).gpus


def count_accelerators() -> int:
    return seen_by_one_process(visible_gpus())


def look(environ: Mapping[str, str] | None = None, root: str = "/") -> Found:
    cards, problem = _nvidia(root)
    if not cards and Path(root, "dev/kfd").exists():
        cards = amd_cards(root)
    usable = visible(cards, os.environ if environ is None else environ)
    return Found(usable, len(cards), _others(root), problem)


def _nvidia(root: str) -> tuple[list[Card], str]:
    driver = Path(root, "proc/driver/nvidia")
    try:
        if found := _from_nvml():
            return found, ""
        reason = "NVML finds none"
    except TimeoutError:
        return [], f"the NVIDIA driver has not answered for {_PATIENCE:.0f} s"  # nvidia-smi would hang as well
    except NvmlError as exc:
        reason = str(exc)
    found = _from_smi() or _from_proc(str(driver / "gpus"))
    return found, "" if found or not (driver / "version").exists() else f"there is an NVIDIA driver, but {reason}"


def _from_nvml() -> list[Card]:
    nvml = Nvml()
    found: list[Card] = []
    failed: list[NvmlError] = []

    def ask() -> None:
        try:
            with nvml:
                found.extend(nvml.cards())
        except NvmlError as exc:
            failed.append(exc)

    asking = threading.Thread(target=ask, name="skyward-nvml", daemon=True)
    asking.start()
    asking.join(_PATIENCE)
    if asking.is_alive():
        raise TimeoutError
    if failed:
        raise failed[0]
    return found


def _from_smi() -> list[Card]:
    paths = (os.path.join(folder, "nvidia-smi") for folder in os.get_exec_path())
    program = next((path for path in paths if os.path.isfile(path) and os.access(path, os.X_OK)), None)
    if program is None:
        return []
    import subprocess  # takes a while to load, and most machines have no such program

    def ask(*options: str) -> str:
        run = subprocess.run([program, *options], capture_output=True, text=True, timeout=_PATIENCE, check=True)
        return run.stdout

    try:
        listing = ask("-L")
        memory = ask("--query-gpu=uuid,memory.total", "--format=csv,noheader,nounits")
    except (OSError, subprocess.SubprocessError):
        return []
    return parse_smi(listing, memory)


def parse_smi(listing: str, memory: str) -> list[Card]:
    sizes = dict(re.findall(r"(GPU-[0-9A-Fa-f-]+), *(\d+)", memory))
    found: list[Card] = []
    for line in listing.splitlines():
        card = re.match(r"GPU (\d+): (.*?) \(UUID: (GPU-[^)]+)\)", line)
        part = re.match(r"\s+MIG (\S*?\.(\d+)gb\S*)\s+Device\s+\d+: \(UUID: (MIG-[^)]+)\)", line)
        if card:
            size = int(sizes.get(card[3], 0)) << 20
            found.append(Card(Gpu(int(card[1]), card[3], card[2], size)))
        elif part and found:
            last = found.pop()
            gpu = last.gpu
            name = f"{gpu.name} MIG {part[1]}"
            found.append(
                Card(gpu, True, (*last.slices, Gpu(gpu.index, part[3], name, int(part[2]) << 30, card=gpu.uuid)))
            )
    return found


def _from_proc(root: str = "/proc/driver/nvidia/gpus") -> list[Card]:
    try:
        addresses = sorted(os.listdir(root))  # by PCI address, which is also how the driver numbers them
    except OSError:
        return []
    texts = [_read(os.path.join(root, address, "information")) for address in addresses]
    return [
        Card(Gpu(index, _field(text, r"GPU UUID:\s*(GPU-[0-9A-Fa-f-]+)"), _field(text, r"Model:\s*(.+?)\s*$")))
        for index, text in enumerate(texts)
    ]


def _others(root: str) -> dict[str, int]:
    device = Path(root, "dev")
    neuron = [path for path in device.glob("neuron*") if re.fullmatch(r"neuron\d+", path.name)]
    tpu = [path for path in device.glob("accel*") if re.fullmatch(r"accel\d+", path.name)]
    tpu = tpu or [path for path in device.glob("vfio/*") if path.name.isdecimal()]
    return {kind: len(found) for kind, found in (("neuron", neuron), ("tpu", tpu)) if found}


def _field(text: str, pattern: str) -> str:
    found = re.search(pattern, text, re.MULTILINE)
    return found[1] if found else ""


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


# NVML, NVIDIA's library for looking at GPUs, by its C functions: it comes with the driver, so nothing is installed.
#
# Every call may take long, or never return when a driver hangs: see `node/gpus.py` and `node/usage.py`, which call it
# from threads of their own. https://docs.nvidia.com/deploy/nvml-api


LIBRARY = "libnvidia-ml.so.1"
LOST = (15, 16)
"""NVML codes of a GPU that fell off the bus or needs a reset."""
_TEXT = 96  # NVML's own size for names and UUIDs
_TIMEOUT, _NO_FUNCTION = 10, 13
_XID = 0x8


class NvmlError(Exception):
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
        try:
            called = getattr(self._library, function)
        except AttributeError:
            raise NvmlError(f"this driver has no {function}", _NO_FUNCTION) from None
        code = called(*arguments)
        if code:
            raise NvmlError(f"{function}: {self._explained(code)}", code)

    def cards(self) -> list[Card]:
        count = self._number("nvmlDeviceGetCount_v2")
        found = [self._card(index) for index in range(count)]
        return [card for card in found if card is not None]

    def handle(self, index: int) -> Handle:
        handle = Handle()
        self.call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
        return handle

    def by_uuid(self, uuid: str) -> Handle:
        handle = Handle()
        self.call("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(handle))
        return handle

    def slices(self, handle: Handle) -> list[Handle] | None:
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
        memory = _Memory()
        self.call("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
        return memory.used, memory.total

    def utilization(self, handle: Handle) -> float:
        """Percent."""
        rates = _Utilization()
        self.call("nvmlDeviceGetUtilizationRates", handle, ctypes.byref(rates))
        return float(rates.gpu)

    def temperature(self, handle: Handle) -> float:
        """Degrees Celsius."""
        return float(self._number("nvmlDeviceGetTemperature", handle, ctypes.c_int(0)))

    def power(self, handle: Handle) -> float:
        return self._number("nvmlDeviceGetPowerUsage", handle) / 1000

    def slowdowns(self, handle: Handle) -> int:
        """Bits for why clocks are reduced; see `node/usage.py`."""
        return self._long("nvmlDeviceGetCurrentClocksThrottleReasons", handle)

    def memory_errors(self, handle: Handle) -> int:
        return self._long("nvmlDeviceGetTotalEccErrors", handle, ctypes.c_int(1), ctypes.c_int(0))

    def listen(self, handles: Sequence[Handle], before: Handle | None = None) -> Handle | None:
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


_VENDOR = "0x1002"
_LEAST = 2 << 30  # what a processor's own graphics has, or less
# Where the driver has no name for a card: https://pci-ids.ucw.cz/read/PC/1002
_NAMES = {
    "0x738c": "AMD Instinct MI100",
    "0x7408": "AMD Instinct MI250X",
    "0x740c": "AMD Instinct MI250X / MI250",
    "0x740f": "AMD Instinct MI210",
    "0x744c": "AMD Radeon RX 7900",
    "0x74a0": "AMD Instinct MI300A",
    "0x74a1": "AMD Instinct MI300X",
    "0x74a5": "AMD Instinct MI325X",
    "0x75a0": "AMD Instinct MI350X",
    "0x75a3": "AMD Instinct MI355X",
}


def amd_cards(root: str = "/") -> list[Card]:
    if not Path(root, "dev/kfd").exists():
        return []  # programs cannot compute on them
    found = [_gpu(index, device) for index, device in enumerate(_devices(root))]
    return [Card(gpu) for gpu in found]


def amd_sample(index: int, root: str = "/") -> GpuSample:
    from skyward.events import GpuSample

    device = _devices(root)[index]
    hwmon = next(iter(sorted(device.glob("hwmon/hwmon*"))), device)
    temperature, power = _number(hwmon / "temp1_input"), None
    for name in ("power1_average", "power1_input"):
        power = _number(hwmon / name) if power is None else power
    gpu = _gpu(index, device)
    return GpuSample(
        index,
        gpu.name,
        _number(device / "gpu_busy_percent"),
        _number(device / "mem_info_vram_used"),
        gpu.memory or None,
        None if temperature is None else temperature / 1000,
        None if power is None else power / 1e6,
    )


def _devices(root: str) -> list[Path]:
    try:
        entries = [entry for entry in Path(root, "sys/class/drm").iterdir() if re.fullmatch(r"card\d+", entry.name)]
    except OSError:
        return []
    devices = sorted((entry / "device").resolve() for entry in entries)
    ours = [device for device in devices if _text(device / "vendor") == _VENDOR]
    return [device for device in ours if (_number(device / "mem_info_vram_total") or 0) >= _LEAST]


def _gpu(index: int, device: Path) -> Gpu:
    unique = _text(device / "unique_id")
    name = _text(device / "product_name") or _NAMES.get(_text(device / "device"), "")
    return Gpu(index, f"GPU-{unique}" if unique else "", name, _number(device / "mem_info_vram_total") or 0, "amd")


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text.isdecimal() else None


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
