"""Waiting for what a client or its watchdog does."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

__all__ = ["read_until", "until", "watchdogs"]


def read_until(process: subprocess.Popen[str], word: str) -> list[str]:
    """What a program prints, up to a line with this word."""
    assert process.stdout is not None
    said: list[str] = []
    for line in process.stdout:
        said.append(line)
        if word in line:
            return said
    pytest.fail(f"the program ended without {word!r}:\n{''.join(said)}")


def until(condition: Callable[[], object], seconds: float = 60.0, what: object = None) -> Any:
    """Waits for a condition and returns what it gave; fails when it does not come true."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.05)
    pytest.fail(f"waited {seconds} s in vain for {what or condition}")


def watchdogs() -> list[int]:
    """Watchdogs of this test run, and what they have started."""
    mark = f"SKYWARD_TEST_RUN={os.environ['SKYWARD_TEST_RUN']}".encode()
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            command, environ = (entry / "cmdline").read_bytes(), (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if mark in environ and (b"watchdog.py" in command or b"skyward\0down" in command):
            found.append(int(entry.name))
    return found
