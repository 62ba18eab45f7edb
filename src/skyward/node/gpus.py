"""Which GPUs this machine has: asked of NVML, of nvidia-smi, of the kernel drivers of NVIDIA and AMD, in that order."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Mapping

from skyward.api.hardware import Card, Gpu, seen_by_one_process, visible
from skyward.node.nvml import Nvml, NvmlError

__all__ = ["count_accelerators", "visible_gpus"]

_PATIENCE = 30.0  # a driver that has to wake eight GPUs takes ten seconds or more


def visible_gpus(environ: Mapping[str, str] | None = None) -> tuple[Gpu, ...]:
    """The GPUs and MIG slices that processes on this machine may use now; empty on a CPU node.

    CUDA_VISIBLE_DEVICES (and HIP_VISIBLE_DEVICES, ROCR_VISIBLE_DEVICES) of `environ` count; it is this process's own
    environment if left out.
    """
    return visible(cards(), os.environ if environ is None else environ)


def count_accelerators() -> int:
    """How many GPUs one process on this machine can use now; of several MIG slices, CUDA shows it one."""
    return seen_by_one_process(visible_gpus())


def cards() -> list[Card]:
    """All GPUs of this machine, whichever a program may use."""
    for source in (_from_nvml, _from_smi, _from_proc):
        if found := source():
            return found
    return []


def _from_nvml() -> list[Card]:
    try:
        nvml = Nvml()
    except NvmlError:
        return []
    found: list[Card] = []

    def ask() -> None:
        try:
            with nvml:
                found.extend(nvml.cards())
        except NvmlError:
            pass  # no driver: the other sources say the same, or know better

    asking = threading.Thread(target=ask, name="skyward-nvml", daemon=True)
    asking.start()
    asking.join(_PATIENCE)
    return list(found)


def _from_smi() -> list[Card]:
    import shutil
    import subprocess

    program = shutil.which("nvidia-smi")
    if program is None:
        return []

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
    """GPUs and their slices from `nvidia-smi -L`; the memory of each card, in MiB, from a query."""
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


def _field(text: str, pattern: str) -> str:
    found = re.search(pattern, text, re.MULTILINE)
    return found[1] if found else ""


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
