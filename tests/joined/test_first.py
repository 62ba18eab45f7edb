"""A pool of machines that connect to us does what other pools do."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import skyward as sky
from skyward.providers.join import Join
from skyward.setup.joined.arrivals import join_program
from tests.support.leases import listening
from tests.support.waiting import until


@sky.compute
def add(a: int, b: int) -> int:
    return a + b


def test_two_machines_join(tmp_path: Path, client_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYWARD_CACHE", str(client_cache))
    program, cache = tmp_path / "join.py", tmp_path / "cache"  # what test hosts share belongs to a user of theirs
    program.write_text(join_program())
    started: list[subprocess.Popen[bytes]] = []
    opened = listening(monkeypatch)

    def start() -> None:
        until(lambda: opened, 30)
        (arrivals,) = opened
        for place in range(2):
            env = {**os.environ, "SKYWARD_JOIN": arrivals.text, "SKYWARD_CACHE": str(cache)}
            started.append(subprocess.Popen([sys.executable, "-I", str(program), "--place", str(place)], env=env))

    thread = threading.Thread(target=start)
    thread.start()
    with sky.ComputePool(provider=Join(), nodes=2, console=False) as pool:
        assert [add(i, 1) >> pool for i in range(4)] == [1, 2, 3, 4]
        assert resource.getrlimit(resource.RLIMIT_CORE)[0] == 0, "SEC-15: this process has keys of the pool"
    for process in started:
        assert process.wait(20) == 0
