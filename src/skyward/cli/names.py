"""Names of pools for the completion of a shell: file names alone are looked at, and nothing heavy is imported."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from skyward.machines.ledger import is_locked, state_dir
from skyward.machines.names import usable

__all__ = ["pool_names"]

_RUNNING = ("top", "stacks", "ssh")
_MOST = 200  # folders that are looked at
_NEWEST = 10


def pool_names(command: str) -> list[str]:
    """Which pools a command could be about: those with a ledger, or the newest ten with a history, or that run."""
    found = _with_ledger() if command == "down" else _with_history(running=command in _RUNNING)
    names = [name for name in dict.fromkeys(found) if usable(name)]
    return names if command == "down" else names[:_NEWEST]


def _with_ledger() -> list[str]:
    return sorted(path.name for path in _entries(state_dir() / "pools"))


def _with_history(running: bool) -> Iterator[str]:
    folders = sorted(_entries(state_dir() / "history"), key=lambda path: path.name.split("-")[-3:-1], reverse=True)
    for folder in folders[:_MOST]:
        pool, *stamp = folder.name.rsplit("-", 3)  # its date, its time, and letters by chance
        if len(stamp) == 3 and (not running or is_locked(folder / "events.jsonl")):
            yield pool


def _entries(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if not path.name.startswith(".")]
    except OSError:
        return []
