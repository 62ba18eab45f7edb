"""Reads the user's lock files and enforces their versions and hashes.

pylock.toml ────────────────────────┐
uv.lock ── uv export ── pylock.toml ┼─► Locked ─► uv, for one platform ─► pins with hashes of the lock, and no others
requirements.txt with hashes ───────┘
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from skyward.errors import BootstrapError, InvalidArgument

if TYPE_CHECKING:
    from packaging.requirements import Requirement

__all__ = [
    "EXPORT",
    "STEP",
    "Locked",
    "check_asked",
    "lock_path",
    "only_locked",
    "read_pylock_file",
    "read_requirements",
]

STEP = "reading the lock"
EXPORT = ["export", "--frozen", "--quiet", "--format", "pylock.toml", "--no-default-groups", "--no-emit-local"]

_HASH = re.compile(r"\s--hash=(\w+):([0-9a-fA-F]+)")
_COMMIT = re.compile(r"^(?:git|hg)\+[^@\s]+://.*@[0-9a-f]{40}(?:#|$)")  # names what it gets by itself
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Locked:
    name: str
    requirement: str
    version: str = ""
    hashes: frozenset[str] = frozenset()


def lock_path(lock: str) -> Path:
    path = Path(lock).expanduser().absolute()
    if not path.is_file():
        raise InvalidArgument(
            f"lock={lock!r}, but there is no file {path}. Paths are relative to the directory in which you start the "
            "script. uv makes a lock: uv pip compile --generate-hashes requirements.in --output-file requirements.txt."
        )
    if path.name == "uv.lock" and not path.with_name("pyproject.toml").is_file():
        raise InvalidArgument(
            f"{path} has no pyproject.toml beside it, which uv needs to read a uv.lock. Put the two together, or "
            "export the lock where they are: uv export --format pylock.toml --output-file pylock.toml."
        )
    return path


def read_pylock_file(text: str, name: str) -> tuple[Locked, ...]:
    import tomllib  # not for images without a lock

    try:
        said = tomllib.loads(text)
    except tomllib.TOMLDecodeError as exc:
        raise _wrong(name, f"it is not TOML: {exc}") from None
    packages: object = said.get("packages")
    if not str(said.get("lock-version", "")).startswith("1.") or not isinstance(packages, list):
        raise _wrong(name, "it has no lock-version 1 and no packages, as PEP 751 says")
    return tuple(_locked(package, name) for package in cast("list[dict[str, Any]]", packages))


def read_requirements(text: str, name: str) -> tuple[Locked, ...]:
    joined = re.sub(r"\\\r?\n", " ", text)
    lines = [re.sub(r"(?:^|\s)#.*", "", line).strip() for line in joined.splitlines()]
    return tuple(_required(line, name) for line in lines if line)


def only_locked(text: str, locked: Iterable[Locked]) -> dict[str, Any]:
    allowed: dict[str, set[str]] = {}
    for package in locked:
        allowed.setdefault(package.name, set()).update(package.hashes)
    import tomllib

    said: dict[str, Any] = tomllib.loads(text)
    for package in said.get("packages", ()):
        hashes = allowed.get(package["name"])
        if not hashes:
            continue  # of a repository, or a file of this computer
        sdist, archive = package.pop("sdist", None), package.get("archive")
        files = [*package.pop("wheels", ()), *([sdist] if sdist else []), *([archive] if archive else [])]
        fitting = [file for file in files if file.get("hashes", {}).get("sha256") in hashes]
        if not fitting:
            raise _altered(f"{package['name']}=={package.get('version', '')}", len(hashes), files)
        if archive is None:
            package["wheels"] = fitting
    return said


def check_asked(entries: Sequence[str], locked: Iterable[Locked], ours: Mapping[str, str]) -> None:
    """Refuses entries that the lock lacks in a matching version, except `ours`."""
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.utils import canonicalize_name

    versions = {name: {version} for name, version in ours.items()}
    for package in locked:
        versions.setdefault(package.name, set()).add(package.version)
    missing: list[str] = []
    for entry in entries:
        try:
            asked = Requirement(entry)
        except InvalidRequirement:
            missing.append(entry)  # an address without a name
            continue
        if asked.marker is not None and not asked.marker.evaluate():
            continue
        found = versions.get(canonicalize_name(asked.name))
        if found is None:
            missing.append(entry)
        elif not asked.url and not any(_fits(asked, version) for version in found):
            missing.append(f"{entry} (it has {', '.join(sorted(found))})")
    if missing:
        from skyward.api.image import mask

        raise InvalidArgument(
            f"the lock does not have what the image or its plugins ask for: {', '.join(map(mask, missing))}. With a "
            "lock, exactly what it lists is installed. Add these to what the lock is made from, and make it again."
        )


def _fits(asked: Requirement, version: str) -> bool:
    return not version or asked.specifier.contains(version, prereleases=True)


def _locked(package: Mapping[str, Any], file: str) -> Locked:
    name, version = str(package.get("name", "")), str(package.get("version", ""))
    marker = f" ; {package['marker']}" if package.get("marker") else ""
    if not re.fullmatch(r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?", name):
        raise _wrong(file, f"it has a package called {name!r}")
    if vcs := package.get("vcs"):
        if not vcs.get("url") or not re.fullmatch(r"[0-9a-f]{40,64}", str(vcs.get("commit-id", ""))):
            raise _wrong(file, f"{name} comes from a repository without a full commit-id and a url")
        where = f"#subdirectory={vcs['subdirectory']}" if vcs.get("subdirectory") else ""
        return Locked(name, f"{name} @ {vcs['type']}+{vcs['url']}@{vcs['commit-id']}{where}{marker}", version)
    if "directory" in package or (package.get("archive") or {}).get("path"):
        raise _wrong(file, f"{name} is a directory or file of this computer. Leave it out, and give its path in pip")
    archive = package.get("archive")
    files = [archive] if archive else [*package.get("wheels", ()), *([package["sdist"]] if "sdist" in package else [])]
    hashes = frozenset(str(entry.get("hashes", {}).get("sha256", "")).lower() for entry in files) - {""}
    _check_hashes(name, hashes, file)
    if archive:
        return Locked(name, f"{name} @ {archive['url']}{marker}", version, hashes)
    if not version:
        raise _wrong(file, f"{name} has no version")
    return Locked(name, f"{name}=={version}{marker}", version, hashes)


def _required(line: str, file: str) -> Locked:
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.utils import canonicalize_name

    text = _HASH.sub("", f" {line}").strip()
    hashes = frozenset(value.lower() for kind, value in _HASH.findall(f" {line}") if kind == "sha256")
    if text.startswith("-"):
        raise _wrong(
            file, f"the option {text.split()[0]} is not read. Indexes go into Image(pip_indexes=...) or pip's settings"
        )
    try:
        asked = Requirement(text)
    except InvalidRequirement:
        raise _wrong(file, f"{text!r} is not a requirement with a name") from None
    exact = [spec.version for spec in asked.specifier if spec.operator in ("==", "===") and "*" not in spec.version]
    name = canonicalize_name(asked.name)
    if not asked.url and len(exact) != 1:
        raise _wrong(file, f"{text!r} has no exact version (name==1.2)")
    if not _COMMIT.search(asked.url or ""):
        _check_hashes(name, hashes, file)
    return Locked(name, text, exact[0] if exact else "", hashes)


def _check_hashes(name: str, hashes: Collection[str], file: str) -> None:
    if not hashes or not all(_SHA256.fullmatch(value) for value in hashes):
        raise _wrong(
            file, f"{name} has no SHA-256; uv pip compile --generate-hashes, or pip-compile --generate-hashes, adds it"
        )


def _wrong(file: str, reason: str) -> InvalidArgument:
    return InvalidArgument(
        f"{file} cannot be used as a lock: {reason}. A lock is a pylock.toml, a uv.lock, or a requirements.txt in "
        "which every package has an exact version and hashes."
    )


def _altered(requirement: str, count: int, files: Iterable[Mapping[str, Any]]) -> BootstrapError:
    found = sorted({str(file.get("hashes", {}).get("sha256", "none"))[:16] for file in files})
    return BootstrapError(
        STEP,
        f"no file of {requirement} that fits has one of the {count} hashes of the lock; those that the index has begin "
        f"with {', '.join(found)}. The files were replaced, or the lock is from another index or for other machines. "
        "Find out which; if the new files are right, make the lock again.",
    )
