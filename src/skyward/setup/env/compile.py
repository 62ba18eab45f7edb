"""Resolves an image's packages to files with uv; builds nothing unless requested.

    pip entries ─► requirements ─► uv pip compile ─► pylock.toml ─► pins

A name from an unrequested index is first a stub; if something depends on it, uv runs again with that index.
"""

from __future__ import annotations

import os
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from skyward.api.image import Image, mask, requirement_path
from skyward.errors import BootstrapError, InvalidArgument
from skyward.setup.env.lock import (
    EXPORT,
    Locked,
    check_asked,
    lock_path,
    only_locked,
    read_pylock_file,
    read_requirements,
)
from skyward.setup.env.lock import STEP as LOCKING
from skyward.setup.env.requirements import (
    DESCRIPTION,
    Pin,
    listed,
    local_path,
    pins,
    read_packages,
    read_pylock,
    sorted_out,
)
from skyward.setup.env.script import closed_to_builds, project, without_builds
from skyward.setup.env.uv import RESOLVING, run_uv, uv_environment
from skyward.setup.env.wheel import stub_wheel
from skyward.transport import private

__all__ = ["Resolution"]

_BUILD_LIMITS = "build.txt"
_NO_WHEEL = re.compile(r"(?:Wheels are required for|Building source distributions for) `([A-Za-z0-9._-]+)`")
_CLOSED = re.compile(r"you require ([a-z0-9-]+)<0\b")


@dataclass(frozen=True)
class Resolution:
    image: Image
    work: Path
    options: Sequence[str]
    deadline: float
    keep: Callable[[Path], Path]
    report: Callable[[str], None] = lambda _: None

    def pins(self, own: Path, *, here: bool = False) -> tuple[Pin, ...]:
        """`own` is the wheel of Skyward itself."""
        (self.work / _BUILD_LIMITS).write_text(closed_to_builds(listed(self.image)))
        (self.work / "requirements.txt").touch()
        lines = [self._sendable(number, entry) for number, entry in enumerate(self.image.pip)]
        skyward = f"skyward @ {own.as_uri()}"
        if self.image.lock:
            return self._locked(lines, skyward, here)
        named, direct = sorted_out([*lines, skyward])
        return self._resolved([*named, *pins(self.image.pip)], direct, self.options, here)

    def _resolved(self, named: list[str], direct: Sequence[str], more: Sequence[str], here: bool) -> tuple[Pin, ...]:
        options = [*more, *self._build_options(named, direct)]
        (self.work / "requirements.txt").write_text("\n".join([*direct, ""]))
        known = _names(named) | {name for entry in direct if (name := _wheel_name(entry))}
        while True:
            waiting = listed(self.image) - known
            found = read_pylock(self._compiled(named, waiting, options), here=here)
            brought = [pin.name for pin in found if Path(pin.file).parent == self._stubs]
            if not brought:
                return found
            named += brought
            known |= set(brought)

    def _locked(self, asked: Sequence[str], skyward: str, here: bool) -> tuple[Pin, ...]:
        locked = [package for package in self._lock() if package.name != "skyward"]
        versions = {package.name: package.version for package in locked if package.version}
        same = pins(versions)
        for exact in same:
            name, _, version = exact.partition("==")
            if versions.get(name, version) != version:
                raise InvalidArgument(
                    f"the lock has {name} {versions[name]}, and this program runs with {version}; both sides of a pool "
                    f"must have the same. Put {exact} into what the lock is made from, and make it again."
                )
        limits = "".join(f"{name}=={version}\n" for name, version in versions.items())
        (self.work / "limits.txt").write_text(limits)
        ours = self._resolved(list(same), [skyward], [*self.options, *_with("--constraints", "limits.txt")], here)
        own_files = [entry for entry in asked if "file://" in entry and local_path(entry)]
        have = {pin.name: pin.wanted.partition("==")[2] for pin in ours}
        check_asked([entry for entry in asked if entry not in own_files], locked, have)
        named, direct = sorted_out([*(package.requirement for package in locked), *own_files])
        (self.work / "requirements.txt").write_text("\n".join([*direct, ""]))
        options = [*self.options, "--no-deps", *self._build_options(named, direct)]
        found = read_packages(only_locked(self._compiled(named, (), options), locked), here=here)
        return (*found, *(pin for pin in ours if pin.name not in {pin.name for pin in found}))

    def _lock(self) -> tuple[Locked, ...]:
        path = lock_path(self.image.lock or "")
        if path.name == "uv.lock":
            return read_pylock_file(self._uv(LOCKING, [*EXPORT, "--project", str(path.parent)]), str(path))
        read = read_pylock_file if path.suffix == ".toml" else read_requirements
        return read(path.read_text(encoding="utf-8"), str(path))

    def _build_options(self, named: Sequence[str], direct: Sequence[str]) -> list[str]:
        return [*without_builds(self._built(named, direct)), "--build-constraints", _BUILD_LIMITS]

    @property
    def _stubs(self) -> Path:
        return self.work / "stubs"

    def _compiled(self, named: Sequence[str], waiting: Iterable[str], options: Sequence[str]) -> str:
        (self.work / "pyproject.toml").write_text(project(named, self.image.pip_indexes))
        self._stubs.mkdir(exist_ok=True)
        stubs = [f"{name} @ {stub_wheel(self._stubs, name).as_uri()}" for name in sorted(waiting)]
        (self.work / "overrides.txt").write_text("\n".join([*stubs, ""]))
        overrides = _with("--overrides", "overrides.txt") if stubs else []
        self.report("finding out which packages are needed")
        order = ["pip", "compile", "--quiet", *options, *overrides]
        self._uv(RESOLVING, [*order, "--format", "pylock.toml", "--output-file", "pylock.toml", *DESCRIPTION])
        return (self.work / "pylock.toml").read_text()

    def _built(self, named: Sequence[str], direct: Sequence[str]) -> set[str]:
        from packaging.requirements import Requirement
        from packaging.utils import canonicalize_name

        found = set(self.image.build)
        for asked in map(Requirement, named):
            if asked.url and not _is_wheel(asked.url):
                found.add(canonicalize_name(asked.name))
        return found | {self._name_of(entry) for entry in direct if "://" in entry and not _is_wheel(entry)}

    def _name_of(self, address: str) -> str:
        if known := re.match(r"([A-Za-z0-9._-]+)\s*@", address):
            return known[1]
        (self.work / "address.in").write_text(f"{address}\n")
        order = ["pip", "compile", "--quiet", "--no-header", "--no-deps", *self.options, "address.in"]
        try:
            said = self._uv(RESOLVING, [*order, "--only-binary", ":all:"])
        except BootstrapError:
            said = self._uv(RESOLVING, order)
        found = re.search(r"^([a-z0-9-]+) @ ", said, re.MULTILINE)
        if found is None:
            raise BootstrapError(
                RESOLVING, f"the name of the package at {address} is not known. Write name @ {address}."
            )
        return found[1]

    def _sendable(self, number: int, entry: str) -> str:
        path = local_path(entry)
        if path is None:
            return entry
        if path.suffix != ".whl":
            path = self._build(path, self.work / str(number))
        if requirement_path(entry) or entry.startswith("file:"):
            return path.as_uri()
        from packaging.requirements import Requirement

        asked = Requirement(entry)
        asked.url = path.as_uri()
        return str(asked)

    def _build(self, path: Path, out: Path) -> Path:
        needs = _build_needs(path) & listed(self.image)
        (self.work / f"{out.name}.txt").write_text(closed_to_builds(listed(self.image) - needs))
        order = ["build", "--quiet", "--wheel", "--no-build", str(path), "--out-dir", str(out), "--python"]
        more: dict[str, str] = {}
        if needs:
            # uv cannot choose an index by name here: the image's come first, and the first that has a name counts.
            first = [index.address for index in self.image.pip_indexes if needs.intersection(index.packages)]
            more = {"UV_INDEX": " ".join(first), "UV_INDEX_STRATEGY": "first-index"}
        limits = ["--build-constraints", str(self.work / f"{out.name}.txt")]
        if (foreign := _foreign_workspace(path)) is not None:
            if _said(path).get("tool", {}).get("uv", {}).get("sources"):
                raise BootstrapError(
                    RESOLVING,
                    f"{path} names sources of its own, and {foreign} above it, which could replace them, may be "
                    "another user's. Move the tree, or make that file writable for you only.",
                )
            limits.append("--no-sources")
        self._uv(f"building {path.name}", [*order, sys.executable, *limits], more)
        return self.keep(next(out.glob("*.whl")))

    def _uv(self, step: str, order: Sequence[str], more: dict[str, str] | None = None) -> str:
        try:
            return run_uv(step, order, self.image, self.deadline, self.work, more)
        except BootstrapError as exc:
            if advice := _advice(str(exc), self.image):
                raise BootstrapError(step, f"{exc.detail}\n{advice}", exit_code=exc.exit_code) from None
            raise


def _with(option: str, file: str) -> list[str]:
    """Adds the user's own files too, whose variable the option would replace."""
    variable = {"--overrides": "UV_OVERRIDE", "--constraints": "UV_CONSTRAINT"}[option]
    own = uv_environment(os.environ).get(variable) or os.environ.get(variable, "")
    return [word for path in (file, *own.split()) for word in (option, path)]


def _advice(said: str, image: Image) -> str:
    if found := _NO_WHEEL.search(said):
        return (
            f"There is no wheel of {found[1]} that fits. Building it from source would run its code, and is done only "
            f'if you ask for it: sky.Image(..., build=["{found[1]}"]).'
        )
    if found := _CLOSED.search(said):
        return (
            f"A build needs {found[1]}, a package of one of the image's pip_indexes, from which builds cannot take it. "
            "Build a wheel yourself, and give its path in Image(pip=...)."
        )
    for index in image.pip_indexes:
        if "Failed to fetch" in said and mask(index.url) in said:
            return (
                f"{mask(index.url)}, from which {', '.join(index.packages)} are to come, could not be asked. If your "
                f"site has a mirror, name it: sky.Image(pip_indexes=[sky.PipIndex(URL, {list(index.packages)})])."
            )
    return ""


def _names(requirements: Iterable[str]) -> set[str]:
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    return {canonicalize_name(Requirement(entry).name) for entry in requirements}


def _is_wheel(address: str) -> bool:
    return unquote(urlsplit(address.partition("@ ")[2] or address).path).rstrip().endswith(".whl")


def _wheel_name(address: str) -> str | None:
    if not _is_wheel(address):
        return None
    file = unquote(urlsplit(address).path).rpartition("/")[2]
    return re.sub(r"[-_.]+", "-", file.partition("-")[0]).lower()


def _foreign_workspace(path: Path) -> Path | None:
    """A project above the source tree that another user may have written."""
    for file in (folder / "pyproject.toml" for folder in path.resolve().parents):
        try:
            if file.exists():
                private.check_file(file)
        except OSError:
            return file
    return None


def _build_needs(path: Path) -> set[str]:
    try:
        return _names(_said(path).get("build-system", {}).get("requires", ()))
    except ValueError:
        return set()


def _said(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads((path / "pyproject.toml").read_text())
    except (OSError, ValueError):  # an archive, or a tree of the old kind; uv complains about a file that is wrong
        return {}
