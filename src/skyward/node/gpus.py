"""Which accelerators this machine has: asked of NVML, of nvidia-smi, of the kernel's drivers, in that order."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Mapping
from pathlib import Path

from skyward.api.hardware import Card, Found, Gpu, seen_by_one_process, visible
from skyward.node.nvml import Nvml, NvmlError

__all__ = ["count_accelerators", "look", "visible_gpus"]

_PATIENCE = 30.0  # a driver that has to wake eight GPUs takes ten seconds or more


def visible_gpus(environ: Mapping[str, str] | None = None) -> tuple[Gpu, ...]:
    """The GPUs and MIG slices that processes on this machine may use now; empty on a CPU node.

    CUDA_VISIBLE_DEVICES (and HIP_VISIBLE_DEVICES, ROCR_VISIBLE_DEVICES) of `environ` count; it is this process's own
    environment if left out.
    """
    return look(environ).gpus


def count_accelerators() -> int:
    """How many GPUs one process on this machine can use now; of several MIG slices, CUDA shows it one."""
    return seen_by_one_process(visible_gpus())


def look(environ: Mapping[str, str] | None = None, root: str = "/") -> Found:
    """All that this machine says of its accelerators; `root` is where its file system begins."""
    cards, problem = _nvidia(root)
    if not cards and Path(root, "dev/kfd").exists():
        from skyward.node.amd import amd_cards

        cards = amd_cards(root)
    usable = visible(cards, os.environ if environ is None else environ)
    return Found(usable, len(cards), _others(root), problem)


def _nvidia(root: str) -> tuple[list[Card], str]:
    """The cards, or why there are none though there is a driver."""
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


def _others(root: str) -> dict[str, int]:
    """Accelerators that are no GPUs, by their device files."""
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
