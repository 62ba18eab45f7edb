"""What a pool on this computer may leave behind: processes with the mark of this test run, and files."""

from __future__ import annotations

import glob
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

__all__ = ["leftover_files", "leftover_processes", "marked", "until"]

MARK = f"SKYWARD_TEST_RUN={os.environ['SKYWARD_TEST_RUN']}".encode()


def until(condition: Callable[[], object], seconds: float = 45.0) -> object:
    """Waits for a condition and returns what it gave; fails when it does not come true."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    pytest.fail(f"waited {seconds} s without effect for {condition}")


def marked(pid: int) -> bool:
    """Whether a process belongs to this test run."""
    try:
        return MARK in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def leftover_processes() -> list[str]:
    """Processes of this test run other than this one and its ordinary helpers."""
    found: list[str] = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid() or not marked(int(entry.name)):
            continue
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if command and "resource_tracker" not in command and (entry / "exe").exists():
            found.append(f"{entry.name}: {command}")
    return found


def leftover_files() -> list[str]:
    """Directories and files of ours in the places where pools put them."""
    return [p for d in {"/dev/shm", tempfile.gettempdir()} for p in glob.glob(f"{d}/skyward-{os.getpid()}-*")]
