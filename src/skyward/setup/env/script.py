"""Renders an image as the script, files and settings that set up a host. Nothing runs here.

image, pins --> Recipe.script     common.sh + setup.sh with the image's values in front, quoted; no secrets
                Recipe.files      pyproject.toml, requirements.txt, build.txt, packages.txt; no secrets
                Recipe.settings   may hold secrets: passed to the script on its standard input
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from urllib.parse import quote as quote_url
from urllib.parse import unquote, urlsplit

from skyward.api.image import Image, PipIndex, mask
from skyward.api.secret import revealed
from skyward.setup.env.requirements import MISLEADING, Pin, git_login, git_settings, login_of, strip_login, tools

__all__ = [
    "Carried",
    "Logins",
    "Recipe",
    "check_script",
    "closed_to_builds",
    "environment_key",
    "index_logins",
    "lines",
    "look_script",
    "project",
    "quote",
    "recipe",
    "record",
    "requirement",
    "script",
    "settings_text",
    "stop_script",
    "strictness",
    "without_builds",
]


UV_OLDEST = "0.12"
_SCRIPTS = Path(__file__).parent / "scripts"
_FORMAT = 1  # raised when environments made by an older script must not be used any more
_INDEX_LOGIN = re.compile(r"UV_INDEX_\w+_(?:USERNAME|PASSWORD)")
# Settings of the user's that hold on a host, too, where it has none of its own. Paths of the client mean nothing there.
# With each go the other names by which a host may have set the same.
_SHARED = {
    "UV_DEFAULT_INDEX": ("UV_INDEX_URL",),
    "UV_INDEX_URL": ("UV_DEFAULT_INDEX",),
    "UV_INDEX": ("UV_EXTRA_INDEX_URL",),
    "UV_EXTRA_INDEX_URL": ("UV_INDEX",),
    "UV_FIND_LINKS": (),
    "UV_INDEX_STRATEGY": (),
    "UV_INSECURE_HOST": (),
    "UV_HTTP_TIMEOUT": ("UV_REQUEST_TIMEOUT",),
    "UV_PYTHON_INSTALL_MIRROR": (),
}
_ADDRESSES = (
    "UV_DEFAULT_INDEX",
    "UV_INDEX_URL",
    "UV_INDEX",
    "UV_EXTRA_INDEX_URL",
    "UV_FIND_LINKS",
    "UV_PYTHON_INSTALL_MIRROR",
)

quote = shlex.quote


@dataclass(frozen=True)
class Carried:
    digest: str
    name: str
    path: Path

    @property
    def sent_as(self) -> str:
        return f"{self.digest},{self.name}"


@dataclass(frozen=True)
class Recipe:
    key: str
    script: str
    files: Mapping[str, str]
    settings: str = field(repr=False)
    carried: tuple[Carried, ...] = ()


def recipe(
    image: Image, pins: Sequence[Pin], platform: str, cache: str, user: Mapping[str, str], uv_version: str
) -> Recipe:
    carried = {pin.name: _carried(pin) for pin in pins if pin.file}
    logins = Logins(image.pip)
    indexes = [index for index in image.pip_indexes if not index.url.startswith("file:")]
    theirs = {name for index in indexes for name in index.packages}
    return Recipe(
        key=environment_key(image, pins, platform),
        script=_setup(image, uv_version, tools([pin.wanted for pin in pins]), strictness(image, pins)),
        files={
            "pyproject.toml": project(
                [pin.wanted for pin in pins if pin.name in theirs and not pin.file],
                indexes,
            ),
            "requirements.txt": _text(lines(pins, logins, lambda pin: _sent(carried[pin.name], cache))),
            "build.txt": closed_to_builds(theirs),
            "packages.txt": record(pins),
        },
        settings=settings_text(image, user, {**index_logins(indexes), **logins.variables}),
        carried=tuple(carried.values()),
    )


def script(image: Image, uv_version: str = UV_OLDEST) -> str:
    needed = tools(image.pip)
    hashes = [] if needed else ["--require-hashes"]
    built = {found[1].lower() for entry in image.pip if tools([entry]) and (found := re.match(r"([\w.-]+) *@", entry))}
    return _setup(image, uv_version, needed, ["--no-deps", *hashes, *without_builds({*image.build, *built})])


def look_script(uv_version: str) -> str:
    return _assembled("look", {"uv_version": uv_version, "uv_oldest": UV_OLDEST})


def check_script(uv_version: str) -> str:
    return _assembled("check", {"uv_version": uv_version, "uv_oldest": UV_OLDEST})


def stop_script(directory: str) -> list[str]:
    """Harmless if there is no keeper."""
    return ["sh", "-c", _read("stop"), "sky", directory]


def environment_key(image: Image, pins: Sequence[Pin], platform: str) -> str:
    parts = (
        _FORMAT,
        image.python_version,
        image.apt,
        sorted((name, str(value)) for name, value in image.shell_vars.items()),
        platform,
        sorted(pin.identity for pin in pins),
        *([image.build] if image.build else []),
    )
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]


def settings_text(image: Image, user: Mapping[str, str], more: Mapping[str, str] | None = None) -> str:
    """sh lines that set variables for the installers; the host's own variables win."""
    told: list[str] = []
    for name, alternatives in _SHARED.items():
        value = _reachable(name, user[name]) if name in _ADDRESSES and name in user else user.get(name, "")
        if value:
            own = "".join(f"${{{other}+x}}" for other in (name, *alternatives))
            told.append(f'[ -n "{own}" ] || export {name}={quote(value)}')
    logins = {name: value for name, value in user.items() if _INDEX_LOGIN.fullmatch(name)}
    told.append(
        '[ -n "${PIP_INDEX_URL+x}" ] || [ -z "${UV_DEFAULT_INDEX-}" ] || export PIP_INDEX_URL="$UV_DEFAULT_INDEX"'
    )
    chosen = {**logins, **(more or {}), **revealed(image.shell_vars)}
    told += [f"export {name}={quote(value)}" for name, value in chosen.items()]
    return _text(told)


def _setup(image: Image, uv_version: str, needed: Sequence[str], strict: Sequence[str]) -> str:
    major, minor = image.python_version
    values = {
        "python_version": f"{major}.{minor}",
        "apt": " ".join(image.apt),
        "tools": " ".join(needed),
        "strict": " ".join(strict),
        "uv_version": uv_version,
        "uv_oldest": UV_OLDEST,
        "misleading": " ".join(MISLEADING),
    }
    about = "# Sets a host up for Skyward; safe to run again after it was cut off anywhere.\n"
    if image.pip:
        about += f"# Packages, resolved before for all hosts at once: {', '.join(map(mask, image.pip))}\n"
    return f"#!/bin/sh\n{about}{_assembled('setup', values)}"


def _assembled(name: str, values: Mapping[str, str]) -> str:
    head = "".join(f"{variable}={quote(value)}\n" for variable, value in values.items())
    return head + _read(name).replace(". common.sh\n", _read("common"))


@cache
def _read(name: str) -> str:
    return (_SCRIPTS / f"{name}.sh").read_text(encoding="utf-8")


def _carried(pin: Pin) -> Carried:
    return Carried(pin.hashes[0][:16], Path(pin.file).name, Path(pin.file))


def _sent(file: Carried, cache: str) -> str:
    return f"file://{quote_url(cache)}/wheels/{file.digest}/{quote_url(file.name)}"


def _text(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _reachable(name: str, value: str) -> str:
    words = [word for word in re.split(r"[\s,]+", value) if re.match(r"(?:[^/:]+=)?https?://", word)]
    return ("," if name == "UV_FIND_LINKS" else " ").join(words)


_ABOUT = (
    "# What was installed: sky.Image(lock=...) with a copy of this file installs just that again.",
    "# Lines that are commented out were files of the client's; such files go into pip by their paths.",
)
_VCS = re.compile(r"\s@ (?:git|hg|svn|bzr)\+")


def project(named: Sequence[str], indexes: Sequence[PipIndex]) -> str:
    """A pyproject.toml by which uv takes an index's packages from that index only.

    As a workspace root it also keeps uv from settings in parent directories.
    """
    head = ["[project]", 'name = "skyward-environment"', 'version = "0"']
    head += [f"dependencies = {json.dumps(named, ensure_ascii=False)}"]
    sources: dict[str, str] = {}
    for number, index in enumerate(indexes):
        url = json.dumps(strip_login(index.url), ensure_ascii=False)
        head += ["[[tool.uv.index]]", f'name = "index-{number}"', f"url = {url}", "explicit = true"]
        for package in index.packages:
            sources.setdefault(package, f'{package} = {{ index = "index-{number}" }}')
    return "\n".join([*head, "[tool.uv.sources]", *sources.values(), "[tool.uv.workspace]", ""])


def index_logins(indexes: Sequence[PipIndex]) -> dict[str, str]:
    found: dict[str, str] = {}
    for number, index in enumerate(indexes):
        parts = urlsplit(index.address)
        for name, value in (("USERNAME", parts.username), ("PASSWORD", parts.password)):
            if value:
                found[f"UV_INDEX_INDEX_{number}_{name}"] = unquote(value)
    return found


def lines(pins: Iterable[Pin], logins: Logins, place: Callable[[Pin], str]) -> list[str]:
    return [requirement(place(pin) if pin.file else logins.hidden(pin.wanted), pin) for pin in pins]


def requirement(wanted: str, pin: Pin) -> str:
    line = f"{pin.name} @ {wanted}" if wanted.startswith("file:") else wanted
    marker = f" ; {pin.marker}" if pin.marker else ""
    return line + marker + "".join(f" --hash=sha256:{value}" for value in pin.hashes)


def record(pins: Iterable[Pin]) -> str:
    found = sorted(pins, key=lambda pin: pin.name)
    said = [f"{'# ' if pin.own else ''}{requirement(strip_login(pin.wanted), pin)}" for pin in found]
    return "\n".join([*_ABOUT, *said, ""])


def strictness(image: Image, pins: Collection[Pin]) -> list[str]:
    built = {pin.name for pin in pins if not pin.file.endswith(".whl") and _is_source(pin, image)}
    # What comes out of a repository has no hash.
    hashes = ["--require-hashes"] if all(pin.hashes for pin in pins) else []
    return ["--no-deps", *hashes, *without_builds(built)]


def without_builds(built: Iterable[str]) -> list[str]:
    return ["--only-binary", ":all:", *(word for name in sorted(built) for word in ("--no-binary", name))]


def closed_to_builds(names: Iterable[str]) -> str:
    """Excludes packages of the image's indexes: uv would take them from another one."""
    return "".join(f"{name}<0\n" for name in sorted(names))


def _is_source(pin: Pin, image: Image) -> bool:
    archive = " @ " in pin.wanted and not urlsplit(pin.wanted.partition(" @ ")[2]).path.endswith(".whl")
    return archive or bool(_VCS.search(pin.wanted)) or pin.name in image.build


class Logins:
    """Logins in `pip` URLs, as variables that uv expands or git reads."""

    def __init__(self, entries: Sequence[str]) -> None:
        self.variables = git_settings(entries)
        self._names: dict[str, str] = {}
        for entry in entries:
            if not git_login(entry) and (found := login_of(entry)):
                login, address = found
                name = f"SKYWARD_LOGIN_{len(self._names)}"
                self.variables[name] = login
                self._names[f"://{address}"] = name

    def hidden(self, wanted: str) -> str:
        bare = strip_login(wanted)
        for address, name in self._names.items():
            if address in bare:
                return bare.replace("://", f"://${{{name}}}@", 1)
        return bare
