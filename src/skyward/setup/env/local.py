"""Makes an image's environment on this computer: the running interpreter, or a cached one made by uv.

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
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from skyward.api.image import Image, mask
from skyward.api.secret import revealed
from skyward.errors import BootstrapError
from skyward.setup.env.requirements import DESCRIPTION, check_python, listed, question, with_hash
from skyward.setup.env.uv import (
    cache_root,
    index_options,
    missing_apt,
    missing_pip,
    own_directory,
    run,
    run_uv,
    too_late,
)
from skyward.setup.env.wheel import build_wheel, source_hash, tree_hash

__all__ = ["Environment", "prepare"]

_MARKER = ".complete"  # the file that an environment has when all of it is there; the scripts know it by the same name
_LOCKED = re.compile(r"Could not get lock .*|.* lock(?:ed)? .*by another process.*")


@dataclass(frozen=True)
class Environment:
    """Interpreter, variables, and the pool's directory. `record` lists the packages if they were just resolved."""

    python: str
    env: dict[str, str] = field(default_factory=dict[str, str], repr=False)
    directory: str = ""
    record: str = field(default="", compare=False)
    fresh: bool = False


def prepare(image: Image, *, cache: Path | None = None, report: Callable[[str], None] = lambda _: None) -> Environment:
    check_python(image)
    build = _Build(image, time.monotonic() + image.bootstrap_timeout, report)
    build.install_apt()
    if image.lock is None and not missing_pip(image.pip):
        return Environment(sys.executable, revealed(image.env))
    root = own_directory(cache or cache_root(), *(() if cache else ("envs",)))
    home = root / _key(image)
    listed_in = ""
    if not _is_complete(home):
        with build.lock(home.with_suffix(".lock")):
            if not _is_complete(home):  # another process may have made it while we waited
                build.environment(home)
                listed_in = str(home / "packages.txt")
    binaries = home / "bin"
    path = f"{binaries}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    env = {"VIRTUAL_ENV": str(home), "PATH": path, **revealed(image.env)}
    return Environment(str(binaries / "python"), env, record=listed_in)


def _is_complete(home: Path) -> bool:
    # The interpreter is a link to one that may have been removed since.
    return (home / _MARKER).exists() and (home / "bin" / "python").exists()


def _key(image: Image) -> str:
    parts = [*question(image, source_hash(), tree_hash), sys.base_prefix, sysconfig.get_platform()]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]


@dataclass(frozen=True)
class _Build:
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
        from skyward.api.secret import installer_environment

        variables = {
            **installer_environment(os.environ),
            **revealed(self.image.shell_vars),
            "DEBIAN_FRONTEND": "noninteractive",
            "NEEDRESTART_MODE": "a",
            "LC_ALL": "C",
        }
        options = ["-o", "Acquire::Retries=3"]
        self.apt("reading apt's package lists", ["apt-get", *options, "update"], variables)
        self.apt("installing apt packages", ["apt-get", *options, *install[1:]], variables)

    def apt(self, step: str, command: list[str], variables: dict[str, str]) -> None:
        told = ""
        while True:
            try:
                self.run(step, command, variables)
                return
            except BootstrapError as exc:
                held = _LOCKED.search(str(exc))
                if held is None or time.monotonic() + 1 > self.deadline:
                    raise
            if held[0] != told:
                self.report(f"waiting for apt's lock: {held[0]}")
            told = held[0]
            time.sleep(1)

    @contextmanager
    def lock(self, path: Path) -> Generator[None]:
        """Between processes; released when its holder dies."""
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
                    raise too_late("waiting for another process that makes the same environment", self.image)
                time.sleep(0.1)
            yield

    def environment(self, home: Path) -> None:
        for left in home.parent.glob(
            f"{home.name}.tmp-*"
        ):  # of a process that was killed: none is alive, as we have the lock
            shutil.rmtree(left, ignore_errors=True)
        if home.exists():
            shutil.rmtree(home)
        # Its mode, 0700, guards addresses in `pip` entries, which may hold passwords.
        work = Path(tempfile.mkdtemp(prefix=f"{home.name}.tmp-", dir=home.parent))
        try:
            self.install(work)
            (work / "env" / _MARKER).touch()
            (work / "env").rename(home)
        finally:
            shutil.rmtree(work, ignore_errors=True)

    def install(self, work: Path) -> None:
        major, minor = self.image.python_version
        python = sys.executable if (major, minor) == sys.version_info[:2] else f"{major}.{minor}"
        self.report(f"making an environment with Python {major}.{minor}")
        self.uv("making the environment", work, "venv", "--quiet", "--relocatable", "--python", python, "env")

        # Most pools on this computer do not get here.
        from skyward.setup.env.compile import Resolution
        from skyward.setup.env.script import Logins, lines, project, record, strictness

        options = ["--python", "env/bin/python", *index_options()]
        resolution = Resolution(self.image, work, options, self.deadline, keep=lambda wheel: wheel, report=self.report)
        pins = [with_hash(pin) for pin in resolution.pins(build_wheel(work), here=True)]
        logins, theirs = Logins(self.image.pip), listed(self.image)
        ours = [pin.wanted for pin in pins if pin.name in theirs and not pin.file]
        (work / "pyproject.toml").write_text(project(ours, self.image.pip_indexes))
        (work / "requirements.txt").write_text("\n".join(lines(pins, logins, lambda pin: Path(pin.file).as_uri())))

        self.report(f"installing {', '.join(map(mask, self.image.pip)) or 'Skyward'}")
        strict = [*strictness(self.image, pins), "--build-constraints", "build.txt"]
        files = [word for name in DESCRIPTION for word in ("--requirements", name)]
        order = ("pip", "install", "--compile-bytecode", *options, *strict, *files)
        run_uv("installing packages", order, self.image, self.deadline, work, logins.variables)
        (work / "env" / "packages.txt").write_text(record(pins))

    def uv(self, step: str, work: Path, *arguments: str) -> str:
        return run_uv(step, arguments, self.image, self.deadline, work)

    def run(self, step: str, command: Sequence[str], variables: Mapping[str, str]) -> str:
        return run(step, command, variables, self.image, self.deadline)
