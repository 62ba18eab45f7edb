"""Chooses PyTorch wheels for an image: the user's pins decide."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet

from skyward.api.image import Image, PipIndex
from skyward.api.plugin import Cluster
from skyward.errors import InvalidArgument
from skyward.setup.env.uv import own_source

__all__ = ["PACKAGES", "requirement", "with_wheels"]

PACKAGES = ("torch", "torchvision", "torchaudio")
_DEFAULT_CUDA = "cu128"

_WHEELS = "https://download.pytorch.org/whl"
_CONSTRAINT = re.compile(r"===|[=!~<>]=|[<>]")
# The indexes that have wheels of each version of torch, newest last; what is not listed is left to the resolver.
_CUDA = {
    "2.0": ("cu117", "cu118"),
    "2.1": ("cu118", "cu121"),
    "2.2": ("cu118", "cu121"),
    "2.3": ("cu118", "cu121"),
    "2.4": ("cu118", "cu121", "cu124"),
    "2.5": ("cu118", "cu121", "cu124"),
    "2.6": ("cu118", "cu124", "cu126"),
    "2.7": ("cu118", "cu126", "cu128"),
    "2.8": ("cu126", "cu128", "cu129"),
    "2.9": ("cu126", "cu128", "cu130"),
}
_PATCHES = 6


def requirement(name: str, version: object) -> str:
    text = version.strip() if isinstance(version, str) else ""
    pin = "==" if text[:1].isdecimal() else ""
    try:
        if text == "latest" or pin or _CONSTRAINT.match(text):
            return str(Requirement(name if text == "latest" else f"{name}{pin}{text}"))
    except InvalidRequirement:
        pass
    raise InvalidArgument(
        f'{version!r} is not a version of {name}. Write "latest", a version such as "2.3.0" (pinned), or a constraint '
        'such as ">=2.3", "~=2.3" or ">=2.3,<3".'
    )


def with_wheels(image: Image, cluster: Cluster, *, pip: Sequence[str], cuda: str) -> Image:
    own = list(_parsed(image.pip))
    added = [entry for entry in map(Requirement, pip) if _is_missing(entry, own)]
    asked = [*own, *added]
    _check_companions(asked)
    torch = _specifiers(asked, "torch")
    accelerator = cluster.spec.accelerator
    kind = _kind(torch, cuda) if accelerator is not None and accelerator.supports_cuda else "cpu"
    names = [str(entry) for entry in added]
    if not any(entry.name.lower() == "numpy" for entry in own):
        names.append("numpy<2" if _older_than(torch, "2.3") else "numpy")  # torch warns without it
    covered = {name for index in image.pip_indexes for name in index.packages}
    left = [name for name in PACKAGES if name not in covered]
    wanted = not own_source(os.environ, "torch") and any(entry.name.lower() in left for entry in asked)
    indexes = [PipIndex(f"{_WHEELS}/{_local(torch) or kind}", left)] if wanted else []
    return image.adding(pip=names, pip_indexes=indexes)


def _parsed(entries: Sequence[str]) -> Iterator[Requirement]:
    for entry in entries:
        try:
            yield Requirement(entry)
        except InvalidRequirement:  # a path or an address: whatever is in there is the resolver's affair
            continue


def _is_missing(requested: Requirement, own: Sequence[Requirement]) -> bool:
    same = [entry for entry in own if entry.name.lower() == requested.name]
    if not same:
        return True
    for entry in same:
        pin, allowed = _pin(requested.specifier), entry.specifier
        if pin is None:
            pin, allowed = _pin(entry.specifier), requested.specifier
        if pin is not None and not allowed.contains(pin, prereleases=True):
            raise InvalidArgument(
                f"the image asks for {entry}, and sky.plugins.torch() for {requested}: no version satisfies both. "
                f"Leave one "
                "of the two out."
            )
    return bool(requested.specifier) and all(_pin(entry.specifier) is None and entry.url is None for entry in same)


def _check_companions(asked: Sequence[Requirement]) -> None:
    torch = _pin(_specifiers(asked, "torch"))
    minor = _minor(torch)
    if torch is None or minor is None or not 0 <= minor <= max(int(name[2:]) for name in _CUDA):
        return
    for name, fitting in (("torchvision", f"0.{minor + 15}"), ("torchaudio", f"2.{minor}")):
        version = _pin(_specifiers(asked, name))
        if version is not None and not f"{version}.".startswith(f"{fitting}."):
            raise InvalidArgument(
                f"{name} {version} was not built for torch {torch}, which needs {name} {fitting}. Pin that, or leave "
                f'{name} to be worked out: {"vision" if name == "torchvision" else "audio"}="latest".'
            )


def _kind(torch: SpecifierSet, cuda: str) -> str:
    listed = [version for version in _CUDA if _admits(torch, version)]
    if cuda != _DEFAULT_CUDA or not listed or torch.contains("2.99", prereleases=True):
        return cuda
    return cuda if any(cuda in _CUDA[version] for version in listed) else _CUDA[listed[-1]][-1]


def _older_than(torch: SpecifierSet, version: str) -> bool:
    listed = list(_CUDA)
    older, newer = listed[: listed.index(version)], listed[listed.index(version) :]
    return (
        any(_admits(torch, name) for name in older)
        and not any(_admits(torch, name) for name in newer)
        and not torch.contains("2.99", prereleases=True)
    )


def _admits(specifiers: SpecifierSet, version: str) -> bool:
    return any(specifiers.contains(f"{version}.{patch}", prereleases=True) for patch in range(_PATCHES))


def _local(torch: SpecifierSet) -> str | None:
    pin = _pin(torch) or ""
    found = re.fullmatch(r".*\+(cu\d{2,3}|cpu)", pin)
    return found[1] if found else None


def _specifiers(asked: Sequence[Requirement], name: str) -> SpecifierSet:
    found = SpecifierSet()
    for entry in asked:
        if entry.name.lower() == name:
            found &= entry.specifier
    return found


def _pin(specifiers: SpecifierSet) -> str | None:
    return next((s.version for s in specifiers if s.operator in ("==", "===") and not s.version.endswith("*")), None)


def _minor(version: str | None) -> int | None:
    found = re.match(r"2\.(\d+)", version or "")
    return int(found[1]) if found else None
