"""How many GPUs this machine has: asked of NVML, of the kernel driver, of nvidia-smi, in that order."""

from __future__ import annotations

import os
import re
from typing import Any

__all__ = ["count_accelerators"]


def count_accelerators() -> int:
    """The NVIDIA GPUs that a program on this machine can use now: 0 on a CPU node, CUDA_VISIBLE_DEVICES honoured."""
    for source in (_uuids_from_nvml, _uuids_from_proc, _uuids_from_smi):
        if uuids := source():
            return _count_visible(uuids, os.environ.get("CUDA_VISIBLE_DEVICES"))
    return 0


def _uuids_from_nvml() -> list[str]:
    from importlib import import_module

    try:
        nvml: Any = import_module("pynvml")
    except ImportError:
        return []
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return []  # no driver: the other sources say the same, or know better
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        uuids = [nvml.nvmlDeviceGetUUID(handle) for handle in handles]
    except nvml.NVMLError:
        return []
    finally:
        nvml.nvmlShutdown()
    return [uuid.decode() if isinstance(uuid, bytes) else str(uuid) for uuid in uuids]


def _uuids_from_proc(root: str = "/proc/driver/nvidia/gpus") -> list[str]:
    try:
        cards = sorted(os.listdir(root))  # by PCI address, which is also how the driver numbers them
    except OSError:
        return []
    return [_uuid_in(_read(os.path.join(root, card, "information"))) for card in cards]


def _uuids_from_smi() -> list[str]:
    import shutil
    import subprocess

    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        listing = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [_uuid_in(line) for line in listing.splitlines() if line.startswith("GPU ")]


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def _uuid_in(text: str) -> str:
    found = re.search(r"GPU-[0-9A-Fa-f-]+", text)
    return found[0] if found else ""


def _count_visible(uuids: list[str], visible: str | None) -> int:
    """How many of the cards CUDA shows for this value: it reads up to the first entry that names none."""
    if visible is None:
        return len(uuids)
    chosen: list[object] = []
    for entry in map(str.strip, visible.split(",")):
        if entry.startswith("MIG-"):
            return 1  # CUDA shows a program one slice at most
        if entry.isdecimal() and int(entry) < len(uuids):
            chosen.append(int(entry))
        elif entry.startswith("GPU-") and sum(uuid.startswith(entry) for uuid in uuids) == 1:
            chosen.append(next(i for i, uuid in enumerate(uuids) if uuid.startswith(entry)))
        else:
            break
    return len(chosen) if len(set(chosen)) == len(chosen) else 0  # CUDA shows nothing when one is named twice
