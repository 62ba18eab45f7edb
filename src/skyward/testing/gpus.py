"""Simulated GPUs of a test cloud's machines: a fake nvidia-smi."""

from __future__ import annotations

from typing import Any, Protocol
from uuid import NAMESPACE_OID, uuid5

__all__ = ["nvidia_smi"]

# What drivers call the GPUs that EC2 names otherwise.
_PRODUCTS = {
    "A100": "NVIDIA A100-SXM4-{size}GB",
    "H100": "NVIDIA H100 80GB HBM3",
    "RTX PRO Server 6000": "NVIDIA RTX PRO 6000 Blackwell Server Edition",
    "T4": "Tesla T4",
    "T4g": "NVIDIA T4G",
    "V100": "Tesla V100-SXM2-{size}GB",
}


class Instance(Protocol):
    """A machine of a test cloud: its id and EC2 type, such as g4dn.xlarge."""

    @property
    def id(self) -> str: ...
    @property
    def kind(self) -> str: ...


def nvidia_smi(instance: Instance) -> str | None:
    """A program that lists the GPUs of this EC2 type; None if it has no NVIDIA GPU. Put it on the PATH of the host
    behind the machine. It answers `nvidia-smi -L` and `--query-gpu=uuid,memory.total`.
    """
    found = _described(instance.kind)
    if found is None:
        return None
    name, count, mebibytes = found
    product = _PRODUCTS.get(name, f"NVIDIA {name}").format(size=round(mebibytes / 1024))
    uuids = [f"GPU-{uuid5(NAMESPACE_OID, f'{instance.id}/{number}')}" for number in range(count)]
    listing = "\n".join(f"GPU {number}: {product} (UUID: {uuid})" for number, uuid in enumerate(uuids))
    memory = "\n".join(f"{uuid}, {mebibytes}" for uuid in uuids)
    return (
        "#!/bin/sh\n# stands in for the driver's program; there is no GPU\n"
        f"case $1 in\n-L) cat <<'END'\n{listing}\nEND\n;;\n"
        f"--query-gpu=uuid,memory.total) cat <<'END'\n{memory}\nEND\n;;\n"
        '*) echo "the stand-in for nvidia-smi does not know $*" >&2; exit 2;;\nesac\n'
    )


def _described(kind: str) -> tuple[str, int, int] | None:
    from moto.ec2.models.instance_types import INSTANCE_TYPES

    types: dict[str, Any] = INSTANCE_TYPES
    gpus: list[dict[str, Any]] = types.get(kind, {}).get("GpuInfo", {}).get("Gpus", [])
    for gpu in gpus:
        if gpu.get("Manufacturer") == "NVIDIA" and gpu.get("Count"):
            return str(gpu["Name"]), int(gpu["Count"]), int(gpu["MemoryInfo"]["SizeInMiB"])
    return None
