"""The GPUs of a machine: cards, MIG slices, and which of them a program may use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

__all__ = ["Card", "Found", "Gpu", "seen_by_one_process", "visible"]


Vendor = Literal["nvidia", "amd"]


@dataclass(frozen=True, slots=True)
class Gpu:
    """What a process can be given: a GPU, or one MIG slice. `memory` is in bytes, 0 if unknown."""

    index: int
    """The card's number in `nvidia-smi`, shared by its slices."""
    uuid: str
    """"GPU-..." or "MIG-..."; empty if unknown."""
    name: str
    memory: int = 0
    vendor: Vendor = "nvidia"
    card: str = ""
    """Of a slice, its card's UUID; else empty."""

    @property
    def is_slice(self) -> bool:
        return bool(self.card)


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU as plugged in; with `mig`, processes can use its slices only."""

    gpu: Gpu
    mig: bool = False
    slices: tuple[Gpu, ...] = ()

    @property
    def parts(self) -> tuple[Gpu, ...]:
        return self.slices if self.mig else (self.gpu,)


@dataclass(frozen=True, slots=True)
class Found:
    gpus: tuple[Gpu, ...] = ()
    cards: int = 0
    others: Mapping[str, int] = field(default_factory=dict[str, int])
    problem: str = ""

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "gpus": [asdict(gpu) for gpu in self.gpus]}

    @staticmethod
    def of(greeting: Mapping[str, Any]) -> Found:
        gpus = tuple(Gpu(**gpu) for gpu in greeting.get("gpus", ()))
        return Found(gpus, greeting.get("cards", 0), greeting.get("others", {}), greeting.get("problem", ""))


def visible(cards: Sequence[Card], environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    """What processes here may use, in the order of CUDA's and ROCm's variables; an index means all slices of its card.

    Cards are counted by PCI address, as with CUDA_DEVICE_ORDER=PCI_BUS_ID; without it CUDA counts the fastest kind
    first.
    """
    nvidia = [card for card in cards if card.gpu.vendor == "nvidia"]
    amd = [card for card in cards if card.gpu.vendor == "amd"]
    hip = "HIP_VISIBLE_DEVICES" if "HIP_VISIBLE_DEVICES" in environ else "CUDA_VISIBLE_DEVICES"
    found = _chosen(nvidia, environ.get("CUDA_VISIBLE_DEVICES"))
    found += _chosen(_cards(_chosen(amd, environ.get("ROCR_VISIBLE_DEVICES"))), environ.get(hip))
    return tuple(found)


def seen_by_one_process(gpus: Sequence[Gpu]) -> int:
    """How many of these CUDA or ROCm shows to one process: of slices, one."""
    return min(len(gpus), 1) if any(gpu.is_slice for gpu in gpus) else len(gpus)


def _cards(gpus: Sequence[Gpu]) -> list[Card]:
    return [Card(gpu) for gpu in gpus]


def _chosen(cards: Sequence[Card], value: str | None) -> list[Gpu]:
    if value is None:
        return [part for card in cards for part in card.parts]
    chosen: list[Gpu] = []
    for entry in map(str.strip, value.split(",")):
        named = _named(cards, entry)
        if not named:
            break
        chosen += named
    return chosen if len(set(chosen)) == len(chosen) else []  # named twice: CUDA shows nothing then


def _named(cards: Sequence[Card], entry: str) -> tuple[Gpu, ...]:
    if entry.isdecimal():
        return cards[int(entry)].parts if int(entry) < len(cards) else ()
    if entry.startswith("MIG-"):
        slices = [part for card in cards for part in card.slices]
        known = [part for part in slices if part.uuid == entry]
        # the kernel driver and old versions of NVML do not name slices: the user knows that there is one
        return tuple(known) if known or slices or not cards else (Gpu(0, entry, "MIG slice", card="?"),)
    if entry.startswith("GPU-"):
        matching = [card for card in cards if card.gpu.uuid.startswith(entry)]
        return matching[0].parts if len(matching) == 1 else ()
    return ()
