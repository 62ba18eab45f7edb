"""Runs uv and apt on this computer, and locates the cache."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from skyward.api.image import Image, mask, requirement_path
from skyward.api.secret import revealed
from skyward.errors import BootstrapError
from skyward.setup.env.requirements import MISLEADING, git_settings, tools
from skyward.transport import private

if TYPE_CHECKING:
    from importlib.metadata import Distribution

    from packaging.requirements import Requirement

__all__ = [
    "RESOLVING",
    "cache_root",
    "find_uv",
    "index_options",
    "missing_apt",
    "missing_pip",
    "no_index",
    "own_directory",
    "own_source",
    "run",
    "run_uv",
    "too_late",
    "uv_environment",
]


RESOLVING = "resolving packages"

_FINDING = threading.Lock()


def cache_root() -> Path:
    return Path(os.environ.get("SKYWARD_CACHE") or Path.home() / ".cache" / "skyward")


def own_directory(root: Path, *names: str) -> Path:
    """Refuses a directory that another user can write to."""
    try:
        return private.make(root, *names)
    except private.NotPrivate as exc:
        raise BootstrapError(
            "opening the cache",
            f"{exc}, and what is in {root} is run. Set SKYWARD_CACHE to a directory that is yours alone.",
        ) from exc


def find_uv() -> str:
    """Locked: `sysconfig` in Python 3.11 may show half-filled tables to other threads."""
    from uv import find_uv_bin

    with _FINDING:
        return find_uv_bin()


def index_options() -> list[str]:
    return ["--no-index"] if no_index(os.environ) else []


def run_uv(
    step: str,
    arguments: Sequence[str],
    image: Image,
    deadline: float,
    work: Path,
    more: Mapping[str, str] | None = None,
) -> str:
    """Returns stdout. `work` is private and has a pyproject.toml: uv would read settings in any parent directory."""
    # Most pools on this computer do not get here.
    from skyward.api.secret import installer_environment
    from skyward.setup.env.script import index_logins, project

    description = work / "pyproject.toml"
    if not description.exists():
        description.write_text(project((), ()))
    repositories = bool(tools(image.pip))
    own = installer_environment(os.environ, repositories=repositories)
    own = {name: value for name, value in own.items() if name not in MISLEADING}
    quiet = {"UV_NO_PROGRESS": "1", "NO_COLOR": "1"}
    logins = git_settings(image.pip, int(own.get("GIT_CONFIG_COUNT") or 0))
    own |= {**uv_environment(os.environ), **quiet, **logins, **index_logins(image.pip_indexes), **(more or {})}
    return run(step, [find_uv(), *arguments], {**own, **revealed(image.shell_vars)}, image, deadline, work)


def run(
    step: str,
    command: Sequence[str],
    variables: Mapping[str, str],
    image: Image,
    deadline: float,
    cwd: Path | None = None,
) -> str:
    process = subprocess.Popen(
        command, env=variables, cwd=cwd, text=True, errors="replace", start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise too_late(step, image) from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    if process.returncode != 0:
        last = "\n".join(mask(err or out).strip().splitlines()[-20:])
        raise BootstrapError(step, f"{Path(command[0]).name} said:\n{last}", exit_code=process.returncode)
    return out


def too_late(step: str, image: Image) -> BootstrapError:
    return BootstrapError(
        step,
        f"it made no progress within bootstrap_timeout={image.bootstrap_timeout:g} s, perhaps because of a slow "
        "connection or large packages. Raise it: sky.Image(..., bootstrap_timeout=1800).",
    )


# pip's setting, uv's variable, and the older variables of uv that have the same meaning.
_VARIABLES = (
    ("index-url", "UV_DEFAULT_INDEX", ("UV_INDEX_URL",)),
    ("extra-index-url", "UV_INDEX", ("UV_EXTRA_INDEX_URL",)),
    ("find-links", "UV_FIND_LINKS", ()),
    ("constraint", "UV_CONSTRAINT", ()),
    ("trusted-host", "UV_INSECURE_HOST", ()),
    ("timeout", "UV_HTTP_TIMEOUT", ("UV_REQUEST_TIMEOUT",)),
    ("cert", "SSL_CERT_FILE", ()),
)


def uv_environment(environ: Mapping[str, str]) -> dict[str, str]:
    settings = _settings(environ)
    variables: dict[str, str] = {}
    for name, variable, older in _VARIABLES:
        if name not in settings or any(known in environ for known in (variable, *older)):
            continue
        words = settings[name].split()
        if name == "timeout" and not settings[name].isdigit():
            continue  # uv takes whole seconds only
        variables[variable] = (",".join if variable == "UV_FIND_LINKS" else " ".join)(words)
    if "UV_INDEX" in variables and "UV_INDEX_STRATEGY" not in environ:
        # pip takes the best version of all indexes; uv alone would stop at the first index that knows the name.
        variables["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    return variables


def no_index(environ: Mapping[str, str]) -> bool:
    return _settings(environ).get("no-index", "").lower() in ("1", "true", "yes", "on")


def own_source(environ: Mapping[str, str], package: str) -> bool:
    """Whether the user's pip or uv would find a package in a private source."""
    settings = {**_uv_file(environ), **uv_environment(environ), **environ}

    def found(*names: str) -> list[str]:
        words = re.split(r"[\s,]+", " ".join(settings.get(name, "") for name in names))
        return [re.sub(r"^[\w-]+=", "", word) for word in words if word]

    if no_index(environ) or any("//pypi.org/" not in index for index in found("UV_DEFAULT_INDEX", "UV_INDEX_URL")):
        return True
    links, indexes = found("UV_FIND_LINKS"), found("UV_INDEX", "UV_EXTRA_INDEX_URL")
    remote = [place for place in (*links, *indexes) if re.match(r"https?://", place)]
    if any(place in links or package in place for place in remote):
        return True
    directories = [Path(unquote(urlsplit(place).path)) for place in (*links, *indexes) if place not in remote]
    return any((path / package).exists() or any(path.glob(f"{package}-*")) for path in directories)


def _uv_file(environ: Mapping[str, str]) -> dict[str, str]:
    import tomllib

    home = Path(environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    places = [Path(environ.get("UV_CONFIG_FILE") or home / "uv" / "uv.toml"), Path("/etc/uv/uv.toml")]
    for path in places:
        try:
            said: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        said = {**said, **said.get("pip", {})}
        indexes: list[dict[str, Any]] = said.get("index", [])
        default = [str(index.get("url")) for index in indexes if index.get("default")]
        more = [str(index.get("url")) for index in indexes if not index.get("default")]
        return {
            "UV_DEFAULT_INDEX": " ".join([*default, *filter(None, [said.get("index-url")])]),
            "UV_INDEX": " ".join([*more, *said.get("extra-index-url", [])]),
            "UV_FIND_LINKS": ",".join(said.get("find-links", [])),
        }
    return {}


def _settings(environ: Mapping[str, str]) -> dict[str, str]:
    from configparser import Error, RawConfigParser  # only where packages are installed

    settings: dict[str, str] = {}
    for path in _files(environ):
        parser = RawConfigParser()
        try:
            parser.read(path, encoding="utf-8")
        except (Error, OSError, UnicodeDecodeError):
            continue  # pip itself complains about such a file; it is not ours to mend
        for section in ("global", "install"):
            if parser.has_section(section):
                settings |= {key.replace("_", "-"): value for key, value in parser.items(section) if value}
    if "PIP_DEFAULT_TIMEOUT" in environ:
        settings["timeout"] = environ["PIP_DEFAULT_TIMEOUT"]
    for name in ("no-index", *(name for name, _, _ in _VARIABLES)):
        if value := environ.get(f"PIP_{name.upper().replace('-', '_')}"):
            settings[name] = value
    return settings


def _files(environ: Mapping[str, str]) -> Iterator[Path]:
    chosen = environ.get("PIP_CONFIG_FILE")
    if chosen == os.devnull:
        return
    home = Path.home()
    for directory in reversed(environ.get("XDG_CONFIG_DIRS", "/etc/xdg").split(":")):
        yield Path(directory) / "pip" / "pip.conf"
    yield Path("/etc/pip.conf")
    yield home / ".pip" / "pip.conf"
    if sys.platform == "darwin":
        yield home / "Library" / "Application Support" / "pip" / "pip.conf"
    yield Path(environ.get("XDG_CONFIG_HOME") or home / ".config") / "pip" / "pip.conf"
    yield Path(sys.prefix) / "pip.conf"
    if chosen:
        yield Path(chosen)


def missing_pip(entries: Iterable[str]) -> list[str]:
    wanted = list(entries)
    if not wanted:
        return []
    from packaging.requirements import InvalidRequirement, Requirement

    def satisfied(entry: str) -> bool:
        if requirement_path(entry):
            return False  # what is installed may be older than what lies there
        try:
            return _satisfied(Requirement(entry), set())
        except InvalidRequirement:
            return False  # a bare URL: only fetching it tells what it is

    return [entry for entry in wanted if not satisfied(entry)]


def missing_apt(names: Iterable[str]) -> list[str]:
    wanted = list(names)
    if not wanted:
        return []
    query = shutil.which("dpkg-query")
    if query is None:
        raise BootstrapError(
            "looking for apt packages",
            f"this computer has no dpkg, so it cannot tell whether it has {', '.join(wanted)}. "
            "Install them with its own package manager and leave apt out of the image.",
        )
    return [entry for entry in wanted if not _has_debian(query, *entry.partition("=")[::2])]


def _satisfied(requirement: Requirement, seen: set[str]) -> bool:
    if str(requirement) in seen or (requirement.marker and not requirement.marker.evaluate()):
        return True
    from importlib import metadata

    seen.add(str(requirement))
    try:
        installed = metadata.distribution(requirement.name)
    except metadata.PackageNotFoundError:
        return False
    if requirement.url:
        origin = installed.read_text("direct_url.json")
        return bool(origin) and json.loads(origin or "{}").get("url") == requirement.url and not requirement.extras
    # A version that is installed was chosen by the user, pre-release or not.
    if not requirement.specifier.contains(installed.version, prereleases=True):
        return False
    return all(_satisfied(needed, seen) for needed in _needs_of_extras(requirement, installed))


def _needs_of_extras(requirement: Requirement, installed: Distribution) -> Iterable[Requirement]:
    from packaging.requirements import Requirement

    for extra in requirement.extras:
        for line in installed.requires or []:
            needed = Requirement(line)
            marker = needed.marker
            if marker and marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""}):
                needed.marker = None
                yield needed


def _has_debian(query: str, name: str, version: str) -> bool:
    command = [query, "--show", "--showformat=${db:Status-Status} ${Version}\n", name]
    from skyward.api.secret import installer_environment  # most images have no Debian packages

    variables = installer_environment(os.environ)
    answer = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=30, check=False)
    states = [line.split(" ") for line in answer.stdout.splitlines()]
    return any(state == "installed" and version in ("", found) for state, found in states)
