"""What a pool on this computer may leave behind: processes with the mark of this test run, and files."""

from __future__ import annotations

import glob
import os
import tempfile
from pathlib import Path

__all__ = ["leftover_files", "leftover_processes", "marked", "watchdogs"]

MARK = f"SKYWARD_TEST_RUN={os.environ['SKYWARD_TEST_RUN']}".encode()


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


def watchdogs() -> list[int]:
    """Watchdogs of this test run, and what they have started."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or not marked(int(entry.name)):
            continue
        try:
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if b"watchdog.py" in command or b"skyward\0down" in command:
            found.append(int(entry.name))
    return found
