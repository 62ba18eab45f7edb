"""Runs uv and apt on this computer, with a time limit, the user's settings and clear errors; and the cache's place."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from skyward.api.image import Image, mask
from skyward.api.secret import revealed
from skyward.errors import BootstrapError
from skyward.setup.env.pip_settings import no_index, uv_environment
from skyward.setup.env.requirements import MISLEADING, git_settings, tools
from skyward.transport import private

__all__ = [
    "RESOLVING",
    "cache_root",
    "find_uv",
    "index_options",
    "own_directory",
    "run",
    "run_uv",
    "too_late",
]

RESOLVING = "resolving packages"

_FINDING = threading.Lock()


def cache_root() -> Path:
    """Where this computer keeps what Skyward has made; laid out as on a host."""
    return Path(os.environ.get("SKYWARD_CACHE") or Path.home() / ".cache" / "skyward")


def own_directory(root: Path, *names: str) -> Path:
    """A directory of the cache, made if it is not there; refused if somebody else could put programs into it."""
    try:
        return private.make(root, *names)
    except private.NotPrivate as exc:
        raise BootstrapError(
            "opening the cache",
            f"{exc}, and what lies in {root} is run. Set SKYWARD_CACHE to a directory that is yours alone.",
        ) from exc


def find_uv() -> str:
    """Where uv lies; threads take turns, as Python 3.11 gives them tables of `sysconfig` that are not filled yet."""
    from uv import find_uv_bin

    with _FINDING:
        return find_uv_bin()


def index_options() -> list[str]:
    """uv's options by which it looks into no index at all, if the user's pip does so."""
    return ["--no-index"] if no_index(os.environ) else []


def run_uv(
    step: str,
    arguments: Sequence[str],
    image: Image,
    deadline: float,
    cwd: Path | None = None,
    more: Mapping[str, str] | None = None,
) -> str:
    """What uv wrote, run with the settings of the user's pip, the logins of the image and its `shell_vars`."""
    # Most pools on this computer do not get here.
    from skyward.api.program_env import installer_environment
    from skyward.setup.env.install_files import index_logins

    repositories = bool(tools(image.pip))
    own = installer_environment(os.environ, repositories=repositories)
    own = {name: value for name, value in own.items() if name not in MISLEADING}
    quiet = {"UV_NO_PROGRESS": "1", "NO_COLOR": "1"}
    logins = git_settings(image.pip, int(own.get("GIT_CONFIG_COUNT") or 0))
    own |= {**uv_environment(os.environ), **quiet, **logins, **index_logins(image.pip_indexes), **(more or {})}
    return run(step, [find_uv(), *arguments], {**own, **revealed(image.shell_vars)}, image, deadline, cwd)


def run(
    step: str,
    command: Sequence[str],
    variables: Mapping[str, str],
    image: Image,
    deadline: float,
    cwd: Path | None = None,
) -> str:
    """What the command wrote; it and all that it started end with this call."""
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
    """The error of a step for which no time is left."""
    return BootstrapError(
        step,
        f"it did not get on within bootstrap_timeout={image.bootstrap_timeout:g} s, perhaps because of a slow "
        "connection or large packages. Raise it: sky.Image(..., bootstrap_timeout=1800).",
    )
