"""Where histories are on this computer, and how long they stay.

<state>/history/<pool>-<date>-<time>-<random>/events.jsonl     0600; locked while the pool's process writes it
<state>/history/<pool>-<date>-<time>-<random>/away             of a detached run on another machine, until it is over
"""

from __future__ import annotations

import difflib
import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyward.errors import InvalidArgument
from skyward.machines.ledger import state_dir
from skyward.transport import journal, private
from skyward.transport.private import is_locked

if TYPE_CHECKING:
    from skyward.events import Event

__all__ = ["AWAY", "FAILED", "FILE", "FOLDER", "Entry", "Tail", "entries", "find", "prune"]

FOLDER = "history"
FAILED = "failed"
FILE = "events.jsonl"
AWAY = "away"

_DAY = 86_400.0
_KEPT = 30 * _DAY
_MOST_BYTES = 1 << 30
_LONGEST_LINE = 4 << 20
_LAST_TIME = 1e11  # seconds since 1970: later ones are no times


@dataclass(frozen=True)
class Entry:
    id: str
    pool: str
    began: float
    path: Path
    about: dict[str, Any]

    @property
    def running(self) -> bool:
        return is_locked(self.path) or self.away is not None

    @property
    def away(self) -> dict[str, Any] | None:
        """Of which detached run on another machine it is a copy (`pool/run_history.py`), while that may be running."""
        try:
            found: dict[str, Any] = json.loads((self.path.parent / AWAY).read_bytes())
        except (OSError, ValueError):
            return None
        return found if found["until"] > time.time() else None


class Tail:
    """Events of a file, and later those that are added."""

    def __init__(self, path: Path) -> None:
        self._tail = journal.Tail(path)

    @property
    def share(self) -> float:
        try:
            return min(1.0, self._tail.offset / max(1, self._tail.path.stat().st_size))
        except OSError:
            return 1.0

    def read(self) -> Iterator[Event]:
        from skyward.history.lines import parsed  # not to list the names of pools

        for each in self._tail.lines():
            event = parsed(each)
            if event is not None:
                yield event


def entries(root: Path | None = None) -> list[Entry]:
    base = root or state_dir()
    if not private.check(base, FOLDER):
        return []
    found = [_entry(each) for each in (base / FOLDER).iterdir()]
    return sorted((entry for entry in found if entry is not None), key=lambda entry: entry.began, reverse=True)


def find(name: str, root: Path | None = None) -> Entry:
    known = entries(root)
    for matches in (
        [entry for entry in known if entry.id == name],
        [entry for entry in known if name in (entry.pool, entry.about.get("run"))],
        [entry for entry in known if entry.id.startswith(name)],
    ):
        if matches:
            return matches[0]
    near = difflib.get_close_matches(name, dict.fromkeys(entry.pool for entry in known), n=1, cutoff=0.6)
    meant = f"Did you mean {near[0]}? " if near else ""
    raise InvalidArgument(
        f"there is no history of a pool {name!r} on this computer. "
        + (
            f"{meant}`sky history` lists pools."
            if known
            else "None was kept: no pool was open here in the last 30 days."
        )
    )


def _size_of(folder: Path) -> int:
    try:
        return sum(each.stat(follow_symlinks=False).st_size for each in os.scandir(folder))
    except OSError:
        return 0  # there is none, or it is being removed


def prune(root: Path | None = None, now: float | None = None, kept: float = _KEPT, limit: int = _MOST_BYTES) -> None:
    base = root or state_dir()
    now = time.time() if now is None else now
    if not private.check(base, FOLDER):
        return
    total, failed = 0, 0
    for folder, found in sorted(_sizes(base / FOLDER), key=lambda pair: pair[1].st_mtime, reverse=True):
        total += found.st_size
        failed += (size := _size_of(folder / FAILED))
        if size and failed > limit and not is_locked(folder / FILE):
            failed -= size
            shutil.rmtree(folder / FAILED, ignore_errors=True)  # and its history stays
        if now - found.st_mtime <= kept and total <= limit:
            continue
        entry = _entry(folder)  # the others are not even opened: there may be thousands
        old = now - found.st_mtime > kept
        if old if entry is None else not entry.running:  # without an entry: a disk was full, or the file is damaged
            total -= found.st_size
            shutil.rmtree(folder, ignore_errors=True)


def _sizes(base: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for folder in base.iterdir():
        try:
            yield folder, (folder / FILE).lstat()
        except OSError:
            continue  # being made or removed at this moment


def _entry(folder: Path) -> Entry | None:
    path = folder / FILE
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # it may be a pipe: none of ours
        with open(fd, "rb") as file:
            about: Any = json.loads(file.readline(_LONGEST_LINE))
        began = float(about["began"])
        if not 0 <= began < _LAST_TIME:
            return None
        return Entry(folder.name, str(about["pool"]), began, path, about)
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None  # being made at this moment, or none of ours
