"""Runs on this computer: folders of what outlives a pool, by name.

<state>/runs/<name>/journal     the first fact has the kind of run; locked while a process writes
<state>/runs/<name>/...         what else runs of this kind have
"""

from __future__ import annotations

import difflib
import os
import shutil
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyward.errors import InvalidArgument, SkywardError
from skyward.machines.ledger import state_dir, usable
from skyward.transport import journal, private
from skyward.transport.journal import Journal

__all__ = ["FOLDER", "Opened", "Run", "check_name", "drop", "find", "open_run", "runs"]

FOLDER = "runs"
_JOURNAL = "journal"
_PATIENCE = 3.0


@dataclass(frozen=True)
class Run:
    name: str
    kind: str
    path: Path
    began: float
    changed: float
    size: int

    @property
    def journal(self) -> Path:
        return self.path / _JOURNAL

    @property
    def in_use(self) -> bool:
        return private.is_locked(self.journal)

    def facts(self) -> tuple[list[dict[str, Any]], int]:
        """Facts of its journal, and how many lines are damaged."""
        return journal.read(journal.content(self.journal))


@dataclass(frozen=True)
class Opened:
    """A run that this process may write to."""

    path: Path
    journal: Journal
    facts: list[dict[str, Any]]
    damaged: int
    """Damaged or truncated lines when it was opened."""


def open_run(name: str, kind: str, root: Path | None = None) -> Opened:
    """Created if missing; refused if another process has it, or if its kind is another."""
    check_name(name)
    base = root or state_dir()
    try:
        folder = private.make(base, FOLDER, name)
        held = _held(folder / _JOURNAL)
        try:
            return _opened(name, kind, folder, held)
        except BaseException:
            held.close()
            raise
    except BlockingIOError:
        raise SkywardError(
            f"run {name!r} is in use by {_who(base / FOLDER / name / _JOURNAL)}. Wait until it has ended, end it, or "
            "use another name."
        ) from None
    except OSError as exc:
        if isinstance(exc, SkywardError):
            raise
        raise SkywardError(
            f"run {name!r} cannot be kept in {base / FOLDER}: {exc.strerror or exc}. Make room there, or have the "
            "variable SKYWARD_STATE name a folder that can be written to."
        ) from exc


def _opened(name: str, kind: str, folder: Path, held: Journal) -> Opened:
    facts, damaged = journal.read(journal.content(held.path))
    head = _head(facts)
    if head is None:
        held.append({"fact": "run", "kind": kind, "format": 1, "began": time.time()})
    elif head.get("kind") != kind:
        raise InvalidArgument(
            f"the name {name!r} is taken by a run of another kind ({head.get('kind')}); this one is of kind {kind}. "
            f"Use another name, or remove that run: `sky runs drop {name}`."
        )
    program = os.path.basename(sys.argv[0]) if sys.argv and sys.argv[0] else "python"
    who = {"pid": os.getpid(), "host": socket.gethostname(), "program": program}
    held.append({"fact": "open", "time": time.time(), "damaged": damaged, **who})
    return Opened(folder, held, facts, damaged - (_last_open(facts).get("damaged") or 0))


def check_name(name: str) -> None:
    if not usable(name):
        raise InvalidArgument(f"{name!r} is not the name of a run. Names have letters, digits, '.', '_' and '-'.")


def runs(kind: str | None = None, root: Path | None = None) -> list[Run]:
    """Last changed first."""
    base = root or state_dir()
    if not private.check(base, FOLDER):
        return []
    found = [run for each in (base / FOLDER).iterdir() if (run := _run(each)) is not None]
    found = [run for run in found if kind is None or run.kind == kind]
    return sorted(found, key=lambda run: run.changed, reverse=True)


def find(name: str, root: Path | None = None) -> Run:
    known = {run.name: run for run in runs(root=root)}
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    meant = f"Did you mean {near[0]}? " if near else ""
    raise InvalidArgument(f"there is no run {name!r} on this computer. {meant}`sky runs` lists runs.")


def drop(run: Run) -> None:
    try:
        held = Journal(run.journal, create=False)
    except BlockingIOError:
        raise SkywardError(f"run {run.name!r} is in use by {_who(run.journal)}. End that first.") from None
    try:
        shutil.rmtree(run.path)
    finally:
        held.close()


def _held(path: Path) -> Journal:
    """Waits a moment for a process that is about to release it."""
    limit = time.monotonic() + _PATIENCE
    while True:
        try:
            return Journal(path, create=not path.exists())
        except (BlockingIOError, FileNotFoundError, FileExistsError):  # the last two: made or removed at this moment
            if time.monotonic() > limit:
                raise
            time.sleep(0.02)


def _head(facts: list[dict[str, Any]]) -> dict[str, Any] | None:
    return next((fact for fact in facts if fact.get("fact") == "run"), None)


def _last_open(facts: list[dict[str, Any]]) -> dict[str, Any]:
    return next((fact for fact in reversed(facts) if fact.get("fact") == "open"), dict[str, Any]())


def _who(path: Path) -> str:
    last = _last_open(journal.read(journal.content(path))[0])
    if not last:
        return "another process"
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(last.get("time", 0))))
    return f"process {last.get('pid')} ({last.get('program')}) on {last.get('host')} since {since}"


def _run(folder: Path) -> Run | None:
    path = folder / _JOURNAL
    try:
        with path.open("rb") as file:
            head = _head([journal.parsed(file.readline(journal.LONGEST_LINE).rstrip(b"\n")) or {}])
        head = head or _head(journal.read(journal.content(path))[0]) or {}
        found = [each.lstat() for each in folder.rglob("*")]
        changed, size = path.lstat().st_mtime, sum(each.st_size for each in found)
        return Run(folder.name, str(head["kind"]), folder, float(head["began"]), changed, size)
    except (OSError, KeyError, ValueError, TypeError):
        return None  # being made or removed at this moment, or none of ours
