"""A plugin: an empty directory for every process that runs calls, removed when the pool closes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial

import skyward as sky

__all__ = ["workdir"]


def workdir(variable: str = "WORKDIR", keep_free_gb: float = 0.0) -> sky.Plugin:
    """Calls find an empty directory in the variable; opening the pool fails where the disk has too little room."""
    return sky.Plugin(
        "workdir",
        transform=partial(name_variable, variable),
        bootstrap=partial(check_room, keep_free_gb),
        around_app=directory,
    )


def name_variable(variable: str, image: sky.Image, cluster: sky.Cluster) -> sky.Image:
    """Here, before machines are set up: an image in, another image out."""
    return image.adding(env={"WORKDIR_VARIABLE": variable})


def check_room(gigabytes: float, cluster: sky.Cluster) -> list[str]:
    """Here as well: shell lines that run on every node. One that fails ends the opening, with its output."""
    if not gigabytes:
        return []
    least = int(gigabytes * 1_000_000)
    return [
        'free=$(df -Pk "${TMPDIR:-/tmp}" | awk "NR==2 {print \\$4}")',
        f'test "$free" -ge {least} || {{ echo "only $free KB are free, {least} are needed" >&2; exit 1; }}',
    ]


@contextmanager
def directory(info: sky.InstanceInfo) -> Generator[None]:
    """On the node, in every process that runs calls, around all of them."""
    with tempfile.TemporaryDirectory(prefix=f"workdir-{info.node}-") as path:
        os.environ[os.environ["WORKDIR_VARIABLE"]] = path
        yield
