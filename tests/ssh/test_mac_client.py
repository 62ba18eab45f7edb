"""A client on macOS: there is none here, so the client runs without what only Linux has (tests/support/mac)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import skyward as sky
from tests.ssh.places import reached
from tests.support.hosts import Network

MAC = Path(__file__).parents[1] / "support" / "mac"
PROGRAM = """
import os, select, sys
import numpy as np
import skyward as sky

assert os.environ["SKYWARD_TESTS_MAC"] == "1" and not hasattr(select, "epoll") and not hasattr(os, "memfd_create")
assert not os.path.exists("/proc/self")

@sky.compute
def total(values):
    print("on", sky.instance_info().node)
    return float(values.sum())

@sky.compute
def made(n):
    return np.ones(n)

@sky.compute
def fail():
    raise LookupError("not there")

@sky.compute
def count(n):
    yield from range(n)

hosts = sky.SSH(hosts={hosts!r}, user="sky", key={key!r}, known_hosts={known!r})
with sky.ComputePool(provider=hosts, image=sky.Image(pip=["numpy"])) as pool:
    assert total(np.ones(300_000)) @ pool == [300_000.0] * len(hosts.hosts)
    assert (made(400_000) >> pool).sum() == 400_000
    assert list(count(50) >> pool) == [*range(50)]
    try:
        fail() >> pool
    except LookupError as error:
        print("raised:", error)
    pool.dict("d")["k"] = 3
    assert pool.dict("d")["k"] == 3
    print(pool.stacks())
print("all is well")
"""


PROGRAMS = ("ssh", "ssh-keygen", "git")
"""All that the client may start, beside Python and uv: the others differ between GNU and BSD."""


def run(program: str, directory: Path) -> subprocess.CompletedProcess[str]:
    for name in PROGRAMS:
        if found := shutil.which(name):
            (directory / name).symlink_to(found)
    paths = [str(MAC), *(path for path in sys.path if path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PATH": str(directory)}
    return subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def test_a_client_without_linux_uses_hosts(net: Network, tmp_path: Path) -> None:
    provider = reached(net, 2)
    done = run(PROGRAM.format(hosts=list(provider.hosts), key=str(net.key), known=str(net.known_hosts)), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all is well" in done.stdout
    assert "raised: not there" in done.stdout


def test_nodes_of_this_computer_need_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(sky.errors.InvalidArgument, match=r"need Linux, and this is darwin.*sky\.SSH"):
        sky.ComputePool(console=False).plan()
