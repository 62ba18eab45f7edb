"""An image's packages as uv requirements, and the pins they resolve to."""

from __future__ import annotations

import hashlib
import re
import sys
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from skyward.api.image import Image, mask, requirement_path
from skyward.errors import BootstrapError, InvalidArgument, PythonMismatch

__all__ = [
    "DESCRIPTION",
    "MISLEADING",
    "Pin",
    "check_digest",
    "check_host_path",
    "check_platform",
    "check_python",
    "file_name",
    "git_login",
    "git_settings",
    "listed",
    "local_path",
    "login_of",
    "pins",
    "question",
    "read_packages",
    "read_pylock",
    "sorted_out",
    "strip_login",
    "tools",
    "with_hash",
]


# The files by which uv is told what to install.
DESCRIPTION = ("pyproject.toml", "requirements.txt")
# What would make uv work on another environment than the one that it is told.
MISLEADING = (
    "VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONHOME", "PYTHONPATH",
    "UV_NO_SOURCES", "UV_PROJECT", "UV_WORKING_DIR", "UV_WORKING_DIRECTORY",
)  # fmt: skip
# Both ends of a connection must agree on these: always, and if the image asks for dask.
_SAME_VERSION = ("cloudpickle",)
_DASK = ("distributed", "dask")
_DASK_ENTRY = re.compile(r"(distributed|dask)(?![\w.-])", re.IGNORECASE)
# A password may hold an @: the last one before the path counts, as for every program that reads addresses.
_LOGIN = re.compile(r"(?<=://)[^/\s?#]+(?=@)")
_VCS = re.compile(r"\b(git|hg|svn|bzr)\+")
# A login that uv has to fill in from a variable is left to it.
_GIT = re.compile(r"\bgit\+(?P<scheme>https?://)(?P<login>[^/\s$]+)@(?P<host>[^/@\s#]+)(?P<path>[^@\s#]*)")


@dataclass(frozen=True)
class Pin:
    """`hashes` starts with that of the preferred file, which is at `url`, or here as `file`."""

    name: str
    wanted: str
    hashes: tuple[str, ...] = ()
    marker: str = ""
    file: str = ""
    url: str = ""
    own: bool = False

    @property
    def identity(self) -> tuple[str, ...]:
        return (self.name, self.marker, *(self.hashes[:1] or [strip_login(self.wanted)]))


def check_python(image: Image) -> None:
    wanted, here = image.python_version, sys.version_info[:2]
    if wanted != here:
        raise PythonMismatch(
            "python",
            f"the image asks for Python {wanted[0]}.{wanted[1]}, but this program runs on {here[0]}.{here[1]}; "
            f'functions cannot cross from one to the other. Run it with that Python, or leave Image(python="auto").',
        )


def pins(entries: Iterable[str]) -> list[str]:
    asked = any(_DASK_ENTRY.match(entry) for entry in entries)

    from importlib import metadata

    def version(name: str) -> str | None:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return None

    found = {name: version(name) for name in (*_SAME_VERSION, *(_DASK if asked else ()))}
    return [f"{name}=={exact}" for name, exact in found.items() if exact]


def question(image: Image, source: str, hash_of: Callable[[Path], str]) -> list[object]:
    paths = [local_path(entry) for entry in image.pip]
    locked = ""
    if image.lock:
        from skyward.setup.env.lock import lock_path  # most images have none

        locked = hash_of(lock_path(image.lock))
    return [
        image.python_version,
        image.pip,
        image.build,
        locked,
        [hash_of(path) for path in paths if path],
        [(index.url, index.packages) for index in image.pip_indexes],
        sorted((name, str(value)) for name, value in image.shell_vars.items()),
        pins(image.pip),
        source,
    ]


def local_path(entry: str) -> Path | None:
    path = requirement_path(entry)
    if path is None and re.search(r"(?<!\+)file://", entry):  # that of a repository is git's affair
        url = entry[entry.index("file://") :].partition(" ")[0].partition("#")[0]
        path = unquote(urlsplit(url).path)
    if path is None:
        return None
    found = Path(path).expanduser().absolute()
    if not found.exists():
        raise InvalidArgument(
            f"pip holds {entry!r}, but there is no {found}. Paths are relative to the directory in which you start "
            "the script; a package of an index is given by its name alone."
        )
    return found


def sorted_out(entries: Sequence[str]) -> tuple[list[str], list[str]]:
    named: list[str] = []
    direct: list[str] = []
    for entry in (strip_login(entry) if git_login(entry) else entry for entry in entries):
        if requirement_path(entry) and (path := local_path(entry)):
            direct.append(path.as_uri())
        else:
            (direct if "://" in entry.partition("@")[0] else named).append(entry)
    return named, direct


def listed(image: Image) -> set[str]:
    return {package for index in image.pip_indexes for package in index.packages}


def read_pylock(text: str, *, here: bool = False) -> tuple[Pin, ...]:
    import tomllib

    return read_packages(tomllib.loads(text), here=here)


def read_packages(lock: Mapping[str, Any], *, here: bool = False) -> tuple[Pin, ...]:
    return tuple(_pin(package, here) for package in lock.get("packages", ()))


def with_hash(pin: Pin) -> Pin:
    """The pin without passwords, and with a hash for a local file."""
    hashes = pin.hashes
    if pin.file and not hashes:
        with open(pin.file, "rb") as file:
            hashes = (hashlib.file_digest(file, "sha256").hexdigest(),)
    return replace(pin, wanted=strip_login(pin.wanted), hashes=hashes)


def strip_login(text: str) -> str:
    return re.sub(r"(?<=://)@", "", _LOGIN.sub("", text))


def tools(requirements: Sequence[str]) -> list[str]:
    return sorted({found[1] for line in requirements if (found := _VCS.search(line))})


def login_of(text: str) -> tuple[str, str] | None:
    found = re.search(r"://([^/\s?#]+)@([^@#\s;]+)", text)
    return (found[1], found[2]) if found else None


def git_login(entry: str) -> tuple[str, str, str] | None:
    found = _GIT.search(entry)
    if found is None:
        return None
    server = found["scheme"] + found["host"]
    return f"{server}/", server + found["path"], found["login"]


def git_settings(entries: Iterable[str], first: int = 0) -> dict[str, str]:
    """Variables that pass git logins, which would show on command lines. `first` is the number of existing settings."""
    found = [login for entry in entries if (login := git_login(entry))]
    # The closer match comes first and counts; that for the server is for the repositories within a repository.
    headers = {repository: login for _, repository, login in reversed(found)}
    for server, _, login in found:
        headers.setdefault(server, login)
    variables: dict[str, str] = {}
    for number, (url, login) in enumerate(headers.items(), first):
        user, _, password = login.partition(":")
        encoded = b64encode(f"{unquote(user)}:{unquote(password)}".encode()).decode()
        variables[f"GIT_CONFIG_KEY_{number}"] = f"http.{url}.extraHeader"
        variables[f"GIT_CONFIG_VALUE_{number}"] = f"Authorization: Basic {encoded}"
    return {**variables, "GIT_CONFIG_COUNT": str(first + len(headers))} if headers else {}


def _pin(package: Mapping[str, Any], here: bool) -> Pin:
    name, version, marker = package["name"], package.get("version", ""), package.get("marker", "")
    exact = f"{name}=={version}"
    if vcs := package.get("vcs"):
        if vcs["url"].startswith("file:") and not here:
            raise BootstrapError(
                "resolving packages",
                f"{name} comes from {vcs['url']}, which is on this computer; the hosts cannot reach it. "
                "Give the directory's path instead: it is then built here and sent.",
            )
        return Pin(name, f"{name} @ {vcs['type']}+{vcs['url']}@{vcs['commit-id']}{_subdirectory(vcs)}", marker=marker)
    if archive := package.get("archive"):
        path = archive.get("path") or _file_of(archive["url"])
        wanted = exact if path else f"{name} @ {archive['url']}{_subdirectory(archive)}"
        url = "" if path else strip_login(archive["url"])
        return Pin(name, wanted, _hashes([archive]), marker, path, url, own=bool(path))
    files: list[dict[str, Any]] = [*package.get("wheels", ()), *([package["sdist"]] if "sdist" in package else [])]
    if files and (path := _file_of(files[0].get("url", ""))):
        return Pin(name, exact, _hashes(files[:1]), marker, path)
    return Pin(name, exact, _hashes(files), marker, url=files[0].get("url", "") if files else "")


def _file_of(url: str) -> str:
    return unquote(urlsplit(url).path) if url.startswith("file:") else ""


def _hashes(files: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(file["hashes"]["sha256"] for file in files if "sha256" in file.get("hashes", {})))


def _subdirectory(source: Mapping[str, Any]) -> str:
    return f"#subdirectory={source['subdirectory']}" if source.get("subdirectory") else ""


# As the specification of wheels has it; the file name of an sdist has fewer characters.
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+!-]*\.(?:whl|zip|tar\.gz|tgz|tar\.bz2|tar\.xz)")
_LONGEST = 240
_DIGEST = re.compile(r"[0-9a-f]{64}")
# What `common.sh: find_platform` can say.
_PLATFORM = re.compile(r"(?:x86_64|aarch64)-(?:manylinux_2_[0-9]{1,2}|unknown-linux-musl)")


def file_name(url: str, step: str) -> str:
    name = unquote(urlsplit(url).path.rpartition("/")[2])
    if not _FILE.fullmatch(name) or len(name) > _LONGEST:
        raise BootstrapError(
            step,
            f"the index offers {mask(url)!r}, and {name!r} is not the file name of a package. Look at the index: this "
            "may be an attempt to write elsewhere on this computer.",
        )
    return name


def check_digest(digest: str, step: str) -> None:
    if not _DIGEST.fullmatch(digest):
        raise BootstrapError(
            step, f"the index names the hash {digest[:80]!r}, which is not a SHA-256. Look at the index."
        )


def check_platform(platform: str, host: str, step: str) -> None:
    if not _PLATFORM.fullmatch(platform):
        raise BootstrapError(
            step,
            f"{host} says that its platform is {platform[:80]!r}, which Skyward does not know. Its shell or its "
            "programs may have been tampered with: do not use this host.",
        )


def check_host_path(path: str, host: str, step: str, within: str = "") -> None:
    name = path.removeprefix(f"{within}/")
    inside = not within or (path != name and "/" not in name and name not in ("", ".", ".."))
    if not path.startswith("/") or re.search(r"[\x00-\x1f\x7f]", path) or not inside:
        raise BootstrapError(
            step,
            f"{host} names the directory {path[:200]!r}, which is not a path that it can have"
            f"{f' within {within}' if within else ''}. Set HOME or SKYWARD_CACHE there to an absolute path without "
            "control characters; if they are, do not use this host.",
        )
