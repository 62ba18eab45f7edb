"""The files that tell uv which pins to install, without passwords; and the variables that hold those."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from urllib.parse import unquote, urlsplit

from skyward.api.image import Image, PipIndex
from skyward.setup.env.requirements import Pin, git_login, git_settings, login_of, strip_login

__all__ = [
    "Logins",
    "closed_to_builds",
    "index_logins",
    "lines",
    "project",
    "record",
    "requirement",
    "strictness",
    "without_builds",
]

_ABOUT = (
    "# What was installed: sky.Image(lock=...) with a copy of this file installs just that again.",
    "# Lines that are commented out were files of the client's; such files go into pip by their paths.",
)
_VCS = re.compile(r"\s@ (?:git|hg|svn|bzr)\+")


def project(named: Sequence[str], indexes: Sequence[PipIndex]) -> str:
    """A pyproject.toml by which uv takes the packages that an index names from there, and only those."""
    head = ["[project]", 'name = "skyward-environment"', 'version = "0"']
    head += [f"dependencies = {json.dumps(named, ensure_ascii=False)}"]
    sources: dict[str, str] = {}
    for number, index in enumerate(indexes):
        url = json.dumps(strip_login(index.url), ensure_ascii=False)
        head += ["[[tool.uv.index]]", f'name = "index-{number}"', f"url = {url}", "explicit = true"]
        for package in index.packages:
            sources.setdefault(package, f'{package} = {{ index = "index-{number}" }}')
    return "\n".join([*head, "[tool.uv.sources]", *sources.values(), ""])


def index_logins(indexes: Sequence[PipIndex]) -> dict[str, str]:
    """uv's variables for the user names and passwords of the indexes, by their numbers."""
    found: dict[str, str] = {}
    for number, index in enumerate(indexes):
        parts = urlsplit(index.address)
        for name, value in (("USERNAME", parts.username), ("PASSWORD", parts.password)):
            if value:
                found[f"UV_INDEX_INDEX_{number}_{name}"] = unquote(value)
    return found


def lines(pins: Iterable[Pin], logins: Logins, place: Callable[[Pin], str]) -> list[str]:
    """One line of requirements.txt for each pin; `place` is the address of a file that is sent or lies here."""
    return [requirement(place(pin) if pin.file else logins.hidden(pin.wanted), pin) for pin in pins]


def requirement(wanted: str, pin: Pin) -> str:
    """A line of requirements.txt: what is wanted, for which hosts, and the hashes that it may have."""
    line = f"{pin.name} @ {wanted}" if wanted.startswith("file:") else wanted
    marker = f" ; {pin.marker}" if pin.marker else ""
    return line + marker + "".join(f" --hash=sha256:{value}" for value in pin.hashes)


def record(pins: Iterable[Pin]) -> str:
    """What is installed, as a requirements.txt with hashes that can be a lock."""
    found = sorted(pins, key=lambda pin: pin.name)
    said = [f"{'# ' if pin.own else ''}{requirement(strip_login(pin.wanted), pin)}" for pin in found]
    return "\n".join([*_ABOUT, *said, ""])


def strictness(image: Image, pins: Collection[Pin]) -> list[str]:
    """uv's options by which exactly these files are installed, and none is built that was not asked for."""
    built = {pin.name for pin in pins if not pin.file.endswith(".whl") and _is_source(pin, image)}
    # What comes out of a repository has no hash.
    hashes = ["--require-hashes"] if all(pin.hashes for pin in pins) else []
    return ["--no-deps", *hashes, *without_builds(built)]


def without_builds(built: Iterable[str]) -> list[str]:
    """uv's options by which it builds these packages, and no others."""
    return ["--only-binary", ":all:", *(word for name in sorted(built) for word in ("--no-binary", name))]


def closed_to_builds(names: Iterable[str]) -> str:
    """Limits for what builds need: no package of an index of the image's, as uv would take it from another one."""
    return "".join(f"{name}<0\n" for name in sorted(names))


def _is_source(pin: Pin, image: Image) -> bool:
    archive = " @ " in pin.wanted and not urlsplit(pin.wanted.partition(" @ ")[2]).path.endswith(".whl")
    return archive or bool(_VCS.search(pin.wanted)) or pin.name in image.build


class Logins:
    """The user names and passwords in the addresses of `pip` entries, as variables that uv fills in or git reads."""

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
        """`wanted` with a reference to the variable in place of the login."""
        bare = strip_login(wanted)
        for address, name in self._names.items():
            if address in bare:
                return bare.replace("://", f"://${{{name}}}@", 1)
        return bare
