"""An image becomes an environment on this computer: the running interpreter, or one that uv makes and the cache keeps.

image --satisfied?--> sys.executable
      --otherwise---> <cache>/<key>.tmp-*/env --(marker, rename)--> <cache>/<key>/bin/python
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from skyward.errors import BootstrapError, InvalidArgument, PythonMismatch
from skyward.image import Image, PipIndex, mask, requirement_path
from skyward.includes import collect_includes
from skyward.installed import missing_apt, missing_pip
from skyward.pipsettings import no_index, uv_environment
from skyward.wheel import build_wheel, source_hash, tree_hash

__all__ = ["Environment", "collect_includes", "prepare"]

_MARKER = ".complete"
_DESCRIPTION = ("pyproject.toml", "requirements.txt")
# Both ends of a connection must agree on these; the last one, which counts GPUs, only where the client has it.
_SAME_VERSION = ("distributed", "dask", "cloudpickle")
_IF_PRESENT = ("nvidia-ml-py",)
# What would make uv work on another environment than the one that it is told.
_MISLEADING = (
    "VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONHOME", "PYTHONPATH",
    "UV_NO_SOURCES", "UV_PROJECT", "UV_WORKING_DIR", "UV_WORKING_DIRECTORY",
)  # fmt: skip


@dataclass(frozen=True)
class Environment:
    """Where user code runs: an interpreter, variables to set, directories to import from; `fresh` if made for it."""

    python: str
    env: dict[str, str] = field(default_factory=dict[str, str], repr=False)
    paths: tuple[str, ...] = ()
    fresh: bool = False


def prepare(image: Image, *, cache: Path | None = None, report: Callable[[str], None] = lambda _: None) -> Environment:
    """An environment on this computer that has what `image` asks for; its includes are collected apart."""
    wanted, here = image.python_version, sys.version_info[:2]
    if wanted != here:
        raise PythonMismatch(
            "python",
            f"the image asks for Python {wanted[0]}.{wanted[1]}, but this program runs on {here[0]}.{here[1]}; "
            f'functions cannot cross from one to the other. Run it with that Python, or leave Image(python="auto").',
        )
    build = _Build(image, time.monotonic() + image.bootstrap_timeout, report)
    build.install_apt()
    missing = missing_pip(image.pip)
    if not missing:
        return Environment(sys.executable, dict(image.env))
    root = cache or Path(os.environ.get("SKYWARD_CACHE") or Path.home() / ".cache" / "skyward" / "envs")
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_own(root)
    home = root / _key(image)
    if not _is_complete(home):
        with build.lock(home.with_suffix(".lock")):
            if not _is_complete(home):  # another process may have made it while we waited
                build.environment(home)
    binaries = home / "bin"
    path = f"{binaries}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return Environment(str(binaries / "python"), {"VIRTUAL_ENV": str(home), "PATH": path, **image.env}, fresh=True)


def _check_own(root: Path) -> None:
    """Refuse a cache into which somebody else could put programs."""
    found = root.stat()
    if found.st_uid not in (0, os.geteuid()) or found.st_mode & stat.S_IWOTH:
        raise BootstrapError(
            "opening the cache",
            f"others can write into {root}, and what lies there is run. "
            "Set SKYWARD_CACHE to a directory that is yours alone.",
        )


def _is_complete(home: Path) -> bool:
    # The interpreter is a link to one that may have been removed since.
    return (home / _MARKER).exists() and (home / "bin" / "python").exists()


def _key(image: Image) -> str:
    """What decides how the environment turns out, as a short hash."""
    paths = [_local(entry) for entry in image.pip]
    parts = (
        image.python_version,
        sys.base_prefix,
        sysconfig.get_platform(),
        image.pip,
        [tree_hash(path) for path in paths if path],
        [(index.url, index.packages) for index in image.pip_indexes],
        sorted(image.shell_vars.items()),
        _pins(),
        source_hash(),
    )
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]


def _pins() -> list[str]:
    def version(name: str) -> str | None:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return None

    pins = {name: version(name) for name in (*_SAME_VERSION, *_IF_PRESENT)}
    return [f"{name}=={found}" for name, found in pins.items() if found]


def _local(entry: str) -> Path | None:
    """The file or directory that a `pip` entry names; one that is not there is refused."""
    path = requirement_path(entry)
    if path is None:
        return None
    found = Path(path).expanduser().absolute()
    if not found.exists():
        raise InvalidArgument(
            f"pip holds {entry!r}, but there is no {found}. Paths are relative to the directory in which you start "
            "the script; a package of an index is given by its name alone."
        )
    return found


def _sorted_out(entries: Sequence[str]) -> tuple[list[str], list[str]]:
    """Requirements that have a name, and the addresses of the others."""
    named: list[str] = []
    direct: list[str] = []
    for entry in entries:
        if path := _local(entry):
            direct.append(path.as_uri())
        else:
            (direct if "://" in entry.partition("@")[0] else named).append(entry)
    return named, direct


def _project(named: Sequence[str], indexes: Sequence[PipIndex], *, explicit: bool) -> str:
    """A pyproject.toml by which uv takes the packages that an index names from there, and only those."""
    lines = ["[project]", 'name = "skyward-environment"', 'version = "0"']
    lines += [f"dependencies = {json.dumps(named, ensure_ascii=False)}"]
    sources: dict[str, str] = {}
    for number, index in enumerate(indexes):
        url = json.dumps(index.url, ensure_ascii=False)
        lines += [
            "[[tool.uv.index]]",
            f'name = "index-{number}"',
            f"url = {url}",
            f"explicit = {str(explicit).lower()}",
        ]
        for package in index.packages:
            sources.setdefault(package, f'{package} = {{ index = "index-{number}" }}')
    return "\n".join([*lines, "[tool.uv.sources]", *(sources.values() if explicit else ()), ""])


def _names(requirements: Sequence[str]) -> set[str]:
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    return {canonicalize_name(Requirement(entry).name) for entry in requirements}


@dataclass(frozen=True)
class _Build:
    """One setting up: what is wanted, until when, and who hears of it."""

    image: Image
    deadline: float
    report: Callable[[str], None]

    def install_apt(self) -> None:
        missing = missing_apt(self.image.apt)
        if not missing:
            return
        install = ["apt-get", "install", "--yes", "--no-install-recommends", *missing]
        if os.geteuid() != 0:
            raise BootstrapError(
                "installing apt packages",
                f"this computer lacks {', '.join(missing)}, and only root can install them. "
                f"Run: sudo {shlex.join(install)}",
            )
        self.report(f"installing {', '.join(missing)}")
        variables = {
            **os.environ,
            **self.image.shell_vars,
            "DEBIAN_FRONTEND": "noninteractive",
            "NEEDRESTART_MODE": "a",
        }
        options = ["-o", "DPkg::Lock::Timeout=300", "-o", "Acquire::Retries=3"]
        self.run("reading apt's package lists", ["apt-get", *options, "update"], variables)
        self.run("installing apt packages", ["apt-get", *options, *install[1:]], variables)

    @contextmanager
    def lock(self, path: Path) -> Generator[None]:
        """Held by one process at a time, until it ends or dies."""
        with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "r+b") as file:
            waiting = False
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if not waiting:
                        self.report("waiting for another process that makes the same environment")
                    waiting = True
                if time.monotonic() > self.deadline:
                    raise self.too_late("waiting for another process that makes the same environment")
                time.sleep(0.1)
            yield

    def environment(self, home: Path) -> None:
        """Make the environment beside `home`, then move it there in one step."""
        for left in home.parent.glob(f"{home.name}.tmp-*"):  # by one that was killed; the lock says that none is alive
            shutil.rmtree(left, ignore_errors=True)
        if home.exists():
            shutil.rmtree(home)
        # Its mode, 0700, guards the addresses of indexes, which may hold passwords.
        work = Path(tempfile.mkdtemp(prefix=f"{home.name}.tmp-", dir=home.parent))
        try:
            self.install(work)
            (work / "env" / _MARKER).touch()
            (work / "env").rename(home)
        finally:
            shutil.rmtree(work, ignore_errors=True)

    def install(self, work: Path) -> None:
        """Fill `work` with an environment, and with the files by which it is described to uv."""
        major, minor = self.image.python_version
        python = sys.executable if (major, minor) == sys.version_info[:2] else f"{major}.{minor}"
        self.report(f"making an environment with Python {major}.{minor}")
        self.uv("making the environment", work, "venv", "--quiet", "--relocatable", "--python", python, "env")

        named, direct = _sorted_out(self.image.pip)
        named += _pins()
        direct.append(f"skyward @ {build_wheel(work).as_uri()}")
        (work / "requirements.txt").write_text("\n".join([*direct, ""]))
        options = ["--python", "env/bin/python", *(["--no-index"] if no_index(os.environ) else [])]

        indexes = self.image.pip_indexes
        listed = {package for index in indexes for package in index.packages} - _names(named)
        if listed:
            # uv chooses an index by name for what is asked for directly; so ask for those that others would bring in.
            (work / "pyproject.toml").write_text(_project(named, indexes, explicit=False))
            self.report("looking which packages are needed")
            anywhere = [*options, "--quiet", "--index-strategy", "unsafe-best-match"]
            found = self.uv("resolving packages", work, "pip", "compile", *anywhere, *_DESCRIPTION)
            named += sorted(listed.intersection(re.findall(r"^([a-z0-9-]+)(?===| @)", found, re.MULTILINE)))
        (work / "pyproject.toml").write_text(_project(named, indexes, explicit=True))

        self.report(f"installing {', '.join(map(mask, self.image.pip)) or 'Skyward'}")
        files = [word for name in _DESCRIPTION for word in ("--requirements", name)]
        self.uv("installing packages", work, "pip", "install", "--compile-bytecode", *options, *files)

    def uv(self, step: str, work: Path, *arguments: str) -> str:
        from uv import find_uv_bin

        own = {name: value for name, value in os.environ.items() if name not in _MISLEADING}
        quiet = {"UV_NO_PROGRESS": "1", "NO_COLOR": "1"}
        variables = {**own, **uv_environment(os.environ), **quiet, **self.image.shell_vars}
        return self.run(step, [find_uv_bin(), *arguments], variables, work)

    def run(self, step: str, command: Sequence[str], variables: Mapping[str, str], cwd: Path | None = None) -> str:
        """What the command wrote; it and all that it started end with this call."""
        process = subprocess.Popen(
            command, env=variables, cwd=cwd, text=True, errors="replace", start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        try:
            out, err = process.communicate(timeout=max(0.0, self.deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise self.too_late(step) from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
        if process.returncode != 0:
            last = "\n".join(mask(err or out).strip().splitlines()[-20:])
            raise BootstrapError(step, f"{Path(command[0]).name} said:\n{last}", exit_code=process.returncode)
        return out

    def too_late(self, step: str) -> BootstrapError:
        return BootstrapError(
            step,
            f"it was not done within bootstrap_timeout={self.image.bootstrap_timeout:g} s, perhaps because of a slow "
            "connection or large packages. Raise it: sky.Image(..., bootstrap_timeout=1800).",
        )
