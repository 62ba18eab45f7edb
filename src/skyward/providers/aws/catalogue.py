"""Instance types as EC2 describes them, and in which zones they are available."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from skyward.api.spec import Spec
from skyward.machines.offers import Market, Shape
from skyward.providers.aws.api import Api

__all__ = ["offerings", "shape", "shapes"]

# EC2 has no filter for accelerators; these families have all of them, and those to come.
_ACCELERATED = ("g*", "p*", "trn*", "inf*", "dl*")
_SIZES = (2, 4, 8, 16, 24, 32, 36, 48, 64, 72, 96, 128, 144, 176, 192, 224, 256, 384, 448, 768, 896)
# The API reports the memory of a whole node there, not of a chip.
_UNRELIABLE_MEMORY = ("Trainium2", "Trainium3")

_known: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
_lock = threading.Lock()


def shapes(api: Api, spec: Spec, kinds: Sequence[str] = ()) -> list[Shape]:
    """The shapes among which to choose: named kinds (wildcards count), accelerated ones, or CPUs of about the size."""
    requested: dict[str, tuple[str, ...]]
    if kinds:
        requested = {"instance-type": tuple(kinds)}
    elif spec.accelerator is not None:
        requested = {"instance-type": _ACCELERATED}
    else:
        requested = {
            "current-generation": ("true",),
            "bare-metal": ("false",),
            "processor-info.supported-architecture": (spec.architecture or "x86_64",),
            "vcpu-info.default-vcpus": _sizes(spec.vcpus, spec.memory_gb),
        }
    return [shape(item) for item in _described(api, requested)]


def shape(described: dict[str, Any]) -> Shape:
    """A shape from one item of DescribeInstanceTypes."""
    kind: str = described["InstanceType"]
    name, count, memory, fraction = _accelerator(described)
    classes: list[str] = described.get("SupportedUsageClasses") or []
    markets: list[Market] = [market for market in ("on-demand", "spot") if market in classes]
    return Shape(
        kind=kind,
        vcpus=described["VCpuInfo"]["DefaultVCpus"],
        memory_gb=described["MemoryInfo"]["SizeInMiB"] / 1024,
        architectures=tuple(described["ProcessorInfo"]["SupportedArchitectures"]),
        accelerator=name,
        accelerators=count,
        accelerator_gb=memory,
        fraction=fraction,
        bare_metal=bool(described.get("BareMetal")),
        outdated=not described.get("CurrentGeneration", True),
        burstable=bool(described.get("BurstablePerformanceSupported")),
        cluster="cluster" in (described.get("PlacementGroupInfo") or {}).get("SupportedStrategies", ()),
        disk_mbps=float(described.get("EbsInfo", {}).get("EbsOptimizedInfo", {}).get("MaximumThroughputInMBps") or 0.0),
        efa_cards=_efa_cards(described.get("NetworkInfo") or {}),
        markets=tuple(markets),
    )


def offerings(api: Api, kinds: Sequence[str]) -> dict[str, set[str]]:
    """The zones in which each kind is offered at all."""
    zones: dict[str, set[str]] = {}
    for start in range(0, len(kinds), 100):
        some = [{"Name": "instance-type", "Values": list(kinds[start : start + 100])}]
        found = api.pages(
            "ec2",
            "describe_instance_type_offerings",
            "InstanceTypeOfferings",
            LocationType="availability-zone",
            Filters=some,
        )
        for item in found:
            zones.setdefault(item["InstanceType"], set()).add(item["Location"])
    return zones


def _described(api: Api, requested: dict[str, tuple[str, ...]]) -> list[dict[str, Any]]:
    # What types exist does not change while a program runs: asked once.
    key = (api.account.endpoint_url, api.account.region, tuple(sorted(requested.items())))
    with _lock:
        if key not in _known:
            filters = [{"Name": name, "Values": list(values)} for name, values in requested.items()]
            _known[key] = api.pages("ec2", "describe_instance_types", "InstanceTypes", Filters=filters)
        return _known[key]


def _sizes(vcpus: float | None, memory_gb: float | None) -> tuple[str, ...]:
    least = vcpus or 2
    # few machines have less than 2 GB a vCPU, so more of them than this are not needed for the memory either
    most = max(4 * least, (memory_gb or 0) / 2, 4)
    fitting = [size for size in _SIZES if least <= size <= most]
    return tuple(str(size) for size in fitting or [size for size in _SIZES if size >= least][:1] or _SIZES[-1:])


def _efa_cards(network: dict[str, Any]) -> tuple[int, ...]:
    if not network.get("EfaSupported"):
        return ()
    cards: list[dict[str, Any]] = network.get("NetworkCards") or []
    info: dict[str, int] = network.get("EfaInfo") or {}
    most = info.get("MaximumEfaInterfaces") or 1
    able = [int(card["NetworkCardIndex"]) for card in cards if "efa" in " ".join(card.get("InterfaceTypes") or ["efa"])]
    return tuple(sorted(able)[:most])


def _accelerator(described: dict[str, Any]) -> tuple[str, int, float, bool]:
    gpus: dict[str, Any] = described.get("GpuInfo") or {}
    neurons: dict[str, Any] = described.get("NeuronInfo") or {}
    devices: list[dict[str, Any]] = gpus.get("Gpus") or neurons.get("NeuronDevices") or []
    for device in devices:
        name, count = str(device["Name"]), int(device.get("Count") or 0)
        memory = float(device.get("MemoryInfo", {}).get("SizeInMiB", 0)) * 1.048576 / 1000
        fraction = count == 0 or float(device.get("GpuPartitionSize") or 1) < 1
        return name, count, 0.0 if name in _UNRELIABLE_MEMORY else memory, fraction
    return "", 0, 0.0, False
