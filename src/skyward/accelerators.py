"""The catalogue of accelerators: records that can be looked up by name and called as factories."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from skyward.errors import InvalidArgument

# fmt: off
__all__ = [
    "A2", "A10", "A10G", "A16", "A30", "A40", "A100", "A800", "B200", "B300", "CATALOG", "GB200", "GB300", "GH200",
    "GTX_1080", "GTX_1080_TI", "H20", "H100", "H200", "H800", "K80", "L4", "L20", "L40", "L40S", "M60", "MI50",
    "MI100", "MI210", "MI250", "MI250X", "MI300A", "MI300X", "MI325X", "MI350X", "MI355X", "P4", "P40", "P100",
    "RTX_2080", "RTX_2080_TI", "RTX_3060", "RTX_3070", "RTX_3080", "RTX_3080_TI", "RTX_3090", "RTX_3090_TI",
    "RTX_4000_ADA", "RTX_4060", "RTX_4060_TI", "RTX_4070", "RTX_4070_TI", "RTX_4080", "RTX_4090", "RTX_5000_ADA",
    "RTX_5060_TI", "RTX_5070", "RTX_5070_TI", "RTX_5080", "RTX_5090", "RTX_6000", "RTX_6000_ADA", "RTX_8000",
    "RTX_A4000", "RTX_A5000", "RTX_A6000", "RTX_PRO_6000", "RX_7900_XTX", "T4", "T4G", "TITAN_RTX", "TITAN_V",
    "TPU_V2", "TPU_V3", "TPU_V4", "TPU_V5E", "TPU_V5P", "TPU_V6E", "TPU_V7", "V100", "Accelerator", "Inferentia1",
    "Inferentia2", "Model", "Trainium1", "Trainium2", "Trainium3", "resolve",
]
# fmt: on


def resolve(value: str | Accelerator | Model | None) -> Accelerator | None:
    """The accelerator that `value` names, e.g. "A100", "a100:8", "A100-80GB" or "A100-80GB:8"."""
    if value is None or isinstance(value, Accelerator):
        return value
    if isinstance(value, Model):
        return value()
    if not isinstance(value, str):  # pyright: ignore[reportUnnecessaryIsInstance] - callers may be untyped
        raise InvalidArgument(
            f"accelerator={value!r} has type {type(value).__name__}; an accelerator is given by its name. "
            'Write accelerator="A100" or accelerator=sky.accelerators.A100(count=8).'
        )
    parts = re.fullmatch(
        r"(?P<name>[^:]*?)(?:[-_ ](?P<memory>\d+ ?gi?b))?(?: *: *(?P<count>\d+))?", value.strip(), re.I
    )
    if parts is None:
        raise InvalidArgument(
            f"accelerator={value!r} cannot be read; what follows ':' is how many of them a node has. "
            'Write "A100", "A100:8" or "A100-80GB:8".'
        )
    return Accelerator(parts["name"], parts["memory"] or "", int(parts["count"] or 1))


def _key(name: str) -> str:
    return re.sub(r"[-_ ]", "", str(name)).lower()


def _gigabytes(name: str, memory: str) -> int:
    found = re.fullmatch(r"(\d+) ?(?:gi?b?)?", str(memory).strip(), re.IGNORECASE)
    if found is None:
        raise InvalidArgument(f'memory={memory!r} of accelerator {name} cannot be read. Write it like "80GB".')
    return int(found[1])


def _unknown(name: str) -> InvalidArgument:
    from difflib import get_close_matches  # for weight: only a mistake needs it

    times = re.fullmatch(r"(?P<name>.+?) *[x*] *(?P<count>\d+)|(?P<first>\d+) *[x*] *(?P<other>.+)", name, re.I)
    if times is not None:
        model, count = times["name"] or times["other"], times["count"] or times["first"]
        if _key(re.sub(r"[-_ ]\d+ ?gi?b$", "", model, flags=re.I)) in CATALOG:
            return InvalidArgument(f'accelerator={name!r} cannot be read. Write "{model}:{count}", {count} per node.')
    near = get_close_matches(_key(name), CATALOG, n=5, cutoff=0.5)
    names = ", ".join(CATALOG[key].name for key in near or CATALOG)
    return InvalidArgument(
        f"there is no accelerator {name!r} in the catalogue; {'near ones' if near else 'known ones'}: {names}. "
        "Use one of these, or describe one that is not listed: "
        'sky.accelerators.Accelerator(name, memory="80GB", metadata={"cuda": {"min": "12.8", "max": "13.2"}}).'
    )


@dataclass(frozen=True)
class Accelerator:
    """Accelerators of one kind on each node: `sky.Accelerator("A100", "80GB", count=8)`, as text "A100-80GB:8".

    Args:
        name: of the model, such as "H100"; `sky.accelerators` has the known ones.
        memory: of each, such as "80GB". Default: the usual one, and every variant of the model will do.
        count: how many per node. Default: 1.
        metadata: facts about a model that is not in the catalogue. Default: the catalogue's.
    """

    name: str
    memory: str = ""
    count: int = 1
    metadata: Mapping[str, Any] | None = field(default=None, hash=False)
    exact: bool = field(default=False, init=False)
    """Whether only the variant with this memory will do."""

    def __post_init__(self) -> None:
        if type(self.count) is not int or self.count < 1:
            raise InvalidArgument(
                f"count={self.count!r} of accelerator {self.name}: it must be a whole number of at least 1. "
                "For a node without accelerators leave `accelerator` out."
            )
        model = CATALOG.get(_key(self.name))
        if model is None and self.metadata is None:
            raise _unknown(self.name)
        sizes = model.sizes if model else ()
        gigabytes = _gigabytes(self.name, self.memory) if self.memory else next(iter(sizes), 0)
        if sizes and gigabytes not in sizes:
            valid = " or ".join(f"{size}GB" for size in sizes)
            raise InvalidArgument(
                f"accelerator {self.name} does not exist with memory={self.memory!r}; it has {valid}. "
                "Use one of these, or leave memory out."
            )
        metadata = self.metadata if self.metadata is not None else model.metadata if model else {}
        object.__setattr__(self, "name", model.name if model else self.name)
        object.__setattr__(self, "exact", bool(self.memory) and len(sizes) != 1)
        object.__setattr__(self, "memory", f"{gigabytes}GB" if gigabytes else "")
        object.__setattr__(self, "metadata", dict(metadata))

    @property
    def memory_gb(self) -> int:
        """Of one of them, in GB; 0 if unknown."""
        return _gigabytes(self.name, self.memory) if self.memory else 0

    @property
    def variants(self) -> tuple[int, ...]:
        """Sizes of memory that will do, in GB, the usual one first."""
        model = CATALOG.get(_key(self.name))
        known = model.sizes if model else ()
        return known if known and not self.exact else (self.memory_gb,) if self.memory else ()

    def described(self) -> str:
        """Such as "8 x A100 (80GB or 40GB each)"."""
        sizes = " or ".join(f"{size}GB" for size in self.variants)
        return f"{self.count} x {self.name}{f' ({sizes} each)' if sizes else ''}"

    @property
    def supports_cuda(self) -> bool:
        """Whether its metadata name versions of CUDA."""
        return bool(self.metadata) and "cuda" in self.metadata


@dataclass(frozen=True)
class Model:
    """A kind of accelerator; calling it gives that many of them."""

    name: str
    sizes: tuple[int, ...]  # GB of one, the usual first
    cuda: tuple[str, str] | None = None

    def __call__(self, count: int = 1, memory: str | None = None) -> Accelerator:
        return Accelerator(self.name, memory or "", count)

    @property
    def metadata(self) -> dict[str, Any]:
        """What the catalogue knows beside memory."""
        return {"cuda": {"min": self.cuda[0], "max": self.cuda[1]}} if self.cuda else {}


# The toolkit that brought the architecture, and the last one that builds for it (13.2: the newest when written).
_KEPLER = ("6.5", "11.8")
_MAXWELL = ("6.5", "12.9")
_PASCAL = ("8.0", "12.9")
_VOLTA = ("9.0", "12.9")
_TURING = ("10.0", "13.2")
_AMPERE = ("11.0", "13.2")
_AMPERE_86 = ("11.1", "13.2")
_ADA = _HOPPER = ("11.8", "13.2")
_BLACKWELL = ("12.8", "13.2")
_BLACKWELL_ULTRA = ("12.9", "13.2")

GB300 = Model("GB300", (288,), _BLACKWELL_ULTRA)
GB200 = Model("GB200", (186, 192), _BLACKWELL)
B300 = Model("B300", (288,), _BLACKWELL_ULTRA)
B200 = Model("B200", (180, 192), _BLACKWELL)
GH200 = Model("GH200", (96, 144), _HOPPER)
H200 = Model("H200", (141,), _HOPPER)
H100 = Model("H100", (80, 94), _HOPPER)
H800 = Model("H800", (80,), _HOPPER)
H20 = Model("H20", (96, 141), _HOPPER)
L40S = Model("L40S", (48,), _ADA)
L40 = Model("L40", (48,), _ADA)
L20 = Model("L20", (48,), _ADA)
L4 = Model("L4", (24,), _ADA)
A100 = Model("A100", (80, 40), _AMPERE)
A800 = Model("A800", (80, 40), _AMPERE)
A30 = Model("A30", (24,), _AMPERE)
A40 = Model("A40", (48,), _AMPERE_86)
A16 = Model("A16", (16,), _AMPERE_86)
A10 = Model("A10", (24,), _AMPERE_86)
A10G = Model("A10G", (24,), _AMPERE_86)
A2 = Model("A2", (16,), _AMPERE_86)
T4 = Model("T4", (16,), _TURING)
T4G = Model("T4G", (16,), _TURING)
V100 = Model("V100", (16, 32), _VOLTA)
P100 = Model("P100", (16, 12), _PASCAL)
P40 = Model("P40", (24,), _PASCAL)
P4 = Model("P4", (8,), _PASCAL)
M60 = Model("M60", (8,), _MAXWELL)
K80 = Model("K80", (12,), _KEPLER)

RTX_PRO_6000 = Model("RTX_PRO_6000", (96,), _BLACKWELL)
RTX_6000_ADA = Model("RTX_6000_ADA", (48,), _ADA)
RTX_5000_ADA = Model("RTX_5000_ADA", (32,), _ADA)
RTX_4000_ADA = Model("RTX_4000_ADA", (20,), _ADA)
RTX_A6000 = Model("RTX_A6000", (48,), _AMPERE_86)
RTX_A5000 = Model("RTX_A5000", (24,), _AMPERE_86)
RTX_A4000 = Model("RTX_A4000", (16,), _AMPERE_86)
RTX_8000 = Model("RTX_8000", (48,), _TURING)
RTX_6000 = Model("RTX_6000", (24,), _TURING)
TITAN_RTX = Model("TITAN_RTX", (24,), _TURING)
TITAN_V = Model("TITAN_V", (12,), _VOLTA)

RTX_5090 = Model("RTX_5090", (32,), _BLACKWELL)
RTX_5080 = Model("RTX_5080", (16,), _BLACKWELL)
RTX_5070_TI = Model("RTX_5070_TI", (16,), _BLACKWELL)
RTX_5070 = Model("RTX_5070", (12,), _BLACKWELL)
RTX_5060_TI = Model("RTX_5060_TI", (16, 8), _BLACKWELL)
RTX_4090 = Model("RTX_4090", (24,), _ADA)
RTX_4080 = Model("RTX_4080", (16,), _ADA)
RTX_4070_TI = Model("RTX_4070_TI", (12, 16), _ADA)
RTX_4070 = Model("RTX_4070", (12,), _ADA)
RTX_4060_TI = Model("RTX_4060_TI", (16, 8), _ADA)
RTX_4060 = Model("RTX_4060", (8,), _ADA)
RTX_3090_TI = Model("RTX_3090_TI", (24,), _AMPERE_86)
RTX_3090 = Model("RTX_3090", (24,), _AMPERE_86)
RTX_3080_TI = Model("RTX_3080_TI", (12,), _AMPERE_86)
RTX_3080 = Model("RTX_3080", (10, 12), _AMPERE_86)
RTX_3070 = Model("RTX_3070", (8,), _AMPERE_86)
RTX_3060 = Model("RTX_3060", (12, 8), _AMPERE_86)
RTX_2080_TI = Model("RTX_2080_TI", (11,), _TURING)
RTX_2080 = Model("RTX_2080", (8,), _TURING)
GTX_1080_TI = Model("GTX_1080_TI", (11,), _PASCAL)
GTX_1080 = Model("GTX_1080", (8,), _PASCAL)

MI355X = Model("MI355X", (288,))
MI350X = Model("MI350X", (288,))
MI325X = Model("MI325X", (256,))
MI300X = Model("MI300X", (192,))
MI300A = Model("MI300A", (128,))
MI250X = Model("MI250X", (128,))
MI250 = Model("MI250", (128,))
MI210 = Model("MI210", (64,))
MI100 = Model("MI100", (32,))
MI50 = Model("MI50", (16, 32))
RX_7900_XTX = Model("RX_7900_XTX", (24,))

TPU_V2 = Model("TPU_V2", (16,))
TPU_V3 = Model("TPU_V3", (32,))
TPU_V4 = Model("TPU_V4", (32,))
TPU_V5E = Model("TPU_V5E", (16,))
TPU_V5P = Model("TPU_V5P", (95,))
TPU_V6E = Model("TPU_V6E", (32,))
TPU_V7 = Model("TPU_V7", (192,))

Trainium1 = Model("Trainium1", (32,))
Trainium2 = Model("Trainium2", (96,))
Trainium3 = Model("Trainium3", (144,))
Inferentia1 = Model("Inferentia1", (8,))
Inferentia2 = Model("Inferentia2", (32,))

CATALOG: dict[str, Model] = {_key(value.name): value for value in list(globals().values()) if isinstance(value, Model)}
