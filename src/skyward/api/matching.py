"""Whether a machine has the requested accelerators, by name and memory.

"NVIDIA A100-SXM4-80GB" is an A100, "NVIDIA RTX 6000 Ada Generation" an RTX_6000_ADA and no RTX_6000.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from skyward.accelerators import CATALOG, Accelerator, Model
from skyward.api.hardware import Found, Gpu

__all__ = ["Verdict", "compare", "described", "models_of"]

_GIB = 1 << 30
# Cards are sold by GB that are GiB; up to a tenth is kept by the driver and by error correction.
_LEAST, _MOST = 0.9, 1.08
_NAMELESS = re.compile(r"^$|graphics device|unknown|^device\b", re.IGNORECASE)
_TWO_DEVICES = ("MI250", "MI250X")  # the driver shows two GPUs, each with half of the memory
_NEURON = ("trainium", "inferentia")


@dataclass(frozen=True, slots=True)
class Verdict:
    refusal: str = ""
    doubt: str = ""


def compare(requested: Accelerator, found: Found) -> Verdict:
    """The texts continue after the name of the node."""
    kind = requested.name.lower()
    if kind.startswith(_NEURON):
        return _devices(requested, found, "neuron", "/dev/neuron*")
    if kind.startswith("tpu"):
        return _devices(requested, found, "tpu", "/dev/accel* or /dev/vfio/*")
    if not found.gpus:
        return Verdict(_nothing(found))
    model = CATALOG.get(_key(requested.name))
    judged = [_judged(gpu, requested, model) for gpu in found.gpus]
    fitting = sum(not verdict.refusal for verdict in judged)
    if fitting >= requested.count:
        return Verdict(doubt=next((verdict.doubt for verdict in judged if verdict.doubt), ""))
    has = f"has {described(found.gpus)}{_hidden(found)}"
    reason = next((verdict.refusal for verdict in judged if verdict.refusal), "")
    return Verdict(f"{has}{f', and {reason}' if reason else ''}")


def described(gpus: Sequence[Gpu]) -> str:
    counts: dict[tuple[str, int], int] = {}
    for gpu in gpus:
        key = (gpu.name or "GPU without a name", gpu.memory // _GIB)
        counts[key] = counts.get(key, 0) + 1
    sizes = {key: f" ({key[1]} GiB{' each' if count > 1 else ''})" if key[1] else "" for key, count in counts.items()}
    return " and ".join(f"{count} x {key[0]}{sizes[key]}" for key, count in counts.items())


def models_of(product: str) -> list[Model]:
    """Catalogue entries for a driver's name: one, none, or two for "MI250X / MI250"."""
    fitting = [model for model in CATALOG.values() if _in_order(_words(model.name), _words(product))]
    longest = max((len(_words(model.name)) for model in fitting), default=0)
    return [model for model in fitting if len(_words(model.name)) == longest]


def _judged(gpu: Gpu, requested: Accelerator, model: Model | None) -> Verdict:
    if _NAMELESS.search(gpu.name):
        return Verdict(
            doubt=f"has a GPU that its driver gives no name; whether it is a {requested.name} is not checked"
        )
    if gpu.is_slice:
        return Verdict(f"a MIG slice is not a whole {requested.name}")
    if model is None:
        if not _in_order(_words(requested.name), _words(gpu.name)):
            return Verdict(
                doubt=f"has {described([gpu])}; whether that is what you call {requested.name} is not checked"
            )
    elif model not in models_of(gpu.name):
        return Verdict(f"that is no {requested.name}")
    return _remembers(gpu, requested)


def _remembers(gpu: Gpu, requested: Accelerator) -> Verdict:
    sizes = requested.variants
    if not sizes:
        return Verdict()
    if not gpu.memory:
        unknown = f"does not say how much memory its {gpu.name} has; {requested.memory} was asked for"
        return Verdict(doubt=unknown if requested.exact else "")
    size = gpu.memory / _GIB * (2 if requested.name in _TWO_DEVICES else 1)
    if requested.exact and not _LEAST * requested.memory_gb <= size <= _MOST * requested.memory_gb:
        return Verdict(f"{requested.memory} of memory were asked for")
    return Verdict(f"that is only a part of one {requested.name}" if size < _LEAST * min(sizes) else "")


def _devices(requested: Accelerator, found: Found, kind: str, where: str) -> Verdict:
    count = found.others.get(kind, 0)
    if count >= requested.count:
        return Verdict(doubt=f"has {count} of {where}; whether they are {requested.name} is not checked")
    if count or kind == "neuron":
        return Verdict(f"has {count or 'none'} of {where}")
    return Verdict(doubt=f"shows no {where}; whether it has a {requested.name} is not checked")


def _nothing(found: Found) -> str:
    if found.problem:
        return f"has no GPU that can be used: {found.problem}"
    if found.cards:
        return f"hides all of its GPUs ({found.cards}) from programs, by CUDA_VISIBLE_DEVICES"
    return "has no GPU"


def _hidden(found: Found) -> str:
    whole = sum(not gpu.is_slice for gpu in found.gpus)
    return f" (of {found.cards}; CUDA_VISIBLE_DEVICES hides the others)" if 0 < whole < found.cards else ""


def _words(name: str) -> list[str]:
    return [word for word in re.split(r"[^a-z0-9.]+", name.lower()) if word]


def _in_order(parts: Sequence[str], words: Sequence[str]) -> bool:
    rest = iter(words)
    return all(part in rest for part in parts)


def _key(name: str) -> str:
    return re.sub(r"[-_ ]", "", name).lower()
