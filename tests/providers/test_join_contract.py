"""Machines that join keep the contract of all providers; here they are processes that join whenever there is a pool."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import skyward as sky
from skyward.testing import ProviderContract


def _keep_joining(path: Path, over: threading.Event) -> None:
    """Keeps three machines that try to join, as a scheduler does that starts jobs again."""
    running: list[subprocess.Popen[bytes]] = []
    while not over.wait(0.2):
        running = [process for process in running if process.poll() is None]
        while path.exists() and len(running) < 3:
            argv = [sys.executable, "-I", str(path)]
            running.append(subprocess.Popen(argv, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL))
    for process in running:
        process.send_signal(signal.SIGINT)  # one that found no place goes on trying
        process.wait(60)


class TestJoin(ProviderContract):
    @pytest.fixture
    def provider(self, tmp_path: Path) -> Iterator[sky.Join]:
        path, over = tmp_path / "join.py", threading.Event()
        thread = threading.Thread(target=_keep_joining, args=(path, over))
        thread.start()
        yield sky.Join(nodes=2, file=path)
        over.set()
        thread.join()


def test_what_is_wrong_is_said_in_words() -> None:
    with pytest.raises(sky.errors.InvalidArgument, match="expected a list"):
        sky.Join(addresses="10.0.0.1")
    with pytest.raises(sky.errors.InvalidArgument, match="nodes"):
        sky.Join(nodes=0)
    with pytest.raises(sky.errors.InvalidArgument, match="not a port"):
        sky.Join(login="user@login:none")
