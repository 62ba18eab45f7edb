"""Real pools on this computer; after each test nothing of them may be left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import skyward as sky
from tests.support.leftovers import leftover_files, leftover_processes
from tests.support.listener import Listener
from tests.support.programs import USUAL_SIGNALS
from tests.support.waiting import until


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test ends with no process and no file of ours, unless a shared pool is open; then the module does."""
    shared = bool(leftover_processes())
    yield
    if not shared and "pool" not in request.fixturenames:
        until(lambda: not leftover_processes())
        assert leftover_files() == []


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left_of_a_module() -> Iterator[None]:
    """When a module's shared pools are closed, nothing is left of them either."""
    yield
    until(lambda: not leftover_processes())
    assert leftover_files() == []


@pytest.fixture(scope="module")
def pool() -> Iterator[sky.ComputePool]:
    """A pool of two nodes for tests that leave it as they found it."""
    with sky.ComputePool(nodes=2, console=False) as opened:
        yield opened


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a Python program made of the given source, as a user would; the test lets it end."""
    started: list[subprocess.Popen[str]] = []

    def start(source: str, *args: str, **options: object) -> subprocess.Popen[str]:
        path = tmp_path / "program.py"
        path.write_text(source)
        program = subprocess.Popen(
            [*USUAL_SIGNALS, sys.executable, str(path), *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            **options,  # type: ignore[arg-type]
        )
        started.append(program)
        return program

    yield start
    running = [program for program in started if program.poll() is None]
    for program in running:
        os.killpg(program.pid, signal.SIGKILL)
    for program in started:
        program.wait()
        for stream in (program.stdin, program.stdout, program.stderr):
            if stream is not None:
                stream.close()
    assert not running


@pytest.fixture
def heard(pool: sky.ComputePool) -> Iterator[Listener]:
    """What the module's pool tells from now on."""
    listener = Listener(pool)
    yield listener
    listener.stop()
