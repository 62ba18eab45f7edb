"""What opening a pool on this computer loads and starts, in counts: they hold on a busy machine, where times do not."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import skyward as sky
from tests.support.processes import family as family_of
from tests.support.waiting import until

NEVER = ("asyncio", "ssl", "distributed", "dask", "tornado", "cryptography", "rich", "boto3", "numpy", "packaging")
LARGE = ("ctypes", "email", "importlib.metadata", "tarfile", "tomllib", "zipfile", "http.client")
CLIENT_ONLY = (
    "skyward.accelerators",
    "skyward.events",
    "skyward.pool.pool",
    "skyward.client",
    "skyward.setup",
    "skyward.machines",
    "skyward.providers",
)

# Imported by every interpreter of a pool: on SIGUSR1 a process writes down which modules it has loaded.
WATCH = """
import os, signal, sys

def note(*_):
    path = os.path.join(os.environ["SKYWARD_WATCH"], str(os.getpid()))
    with open(path + ".part", "w") as file:
        file.write(" ".join(sorted(sys.modules)))
    os.rename(path + ".part", path)

signal.signal(signal.SIGUSR1, note)
"""


def family(pool: sky.ComputePool) -> list[psutil.Process]:
    return family_of(pool._fleet.by_node[0].keeper.pid)


def test_the_client_of_a_local_pool_loads_little() -> None:
    source = (
        "import sys, skyward as sky\nwith sky.ComputePool(nodes=1, console=False) as pool:\n    print(*sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=120, check=True)
    loaded = set(done.stdout.split())
    assert not loaded & {*NEVER, *LARGE, "skyward.providers.aws", "skyward.providers.ssh"}
    assert len(loaded) < (280 if sys.version_info < (3, 13) else 285)  # its standard library has more, smaller ones


def test_the_processes_of_a_local_pool_load_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(WATCH)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("SKYWARD_WATCH", str(tmp_path))
    with sky.ComputePool(nodes=2, console=False) as pool:
        processes = family(pool)
        for process in processes:
            process.send_signal(signal.SIGUSR1)
        until(lambda: all((tmp_path / str(process.pid)).exists() for process in processes))
        loaded = [(process.name(), set((tmp_path / str(process.pid)).read_text().split())) for process in processes]
    for name, modules in loaded:
        assert not modules & {*NEVER, *CLIENT_ONLY}, name
        assert len(modules) < 210, (name, len(modules))  # newer Pythons split some of their own modules
        assert ("skyward.node.agent" in modules) == (name not in ("skyward-forks", "skyward-runner")), name


@pytest.fixture
def quiet() -> Iterator[sky.ComputePool]:
    """Two nodes that nobody uses."""
    with sky.ComputePool(nodes=2, console=False) as opened:
        yield opened


def test_an_idle_local_pool_has_one_keeper_one_fork_server_and_two_processes_a_node(quiet: sky.ComputePool) -> None:
    keeper, *others = family(quiet)
    names = Counter(process.name() for process in others)
    assert names == {"skyward-forks": 1, "skyward-agent": 2, "skyward-runner": 2}
    assert not [c for p in [keeper, *others] for c in p.net_connections("inet")]
