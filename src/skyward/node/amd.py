"""The AMD GPUs of a machine, from what their kernel driver shows under /sys; no library of ROCm is needed."""

from __future__ import annotations

import re
from pathlib import Path

from skyward.api.hardware import Card, Gpu
from skyward.events import GpuSample

__all__ = ["amd_cards", "amd_sample"]

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
    """The GPUs that ROCm can use, by PCI address as ROCm counts them; `root` is where the file system begins."""
    if not Path(root, "dev/kfd").exists():
        return []  # programs cannot compute on them
    found = [_gpu(index, device) for index, device in enumerate(_devices(root))]
    return [Card(gpu) for gpu in found]


def amd_sample(index: int, root: str = "/") -> GpuSample:
    """How busy a GPU is; what the driver does not say is None."""
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
