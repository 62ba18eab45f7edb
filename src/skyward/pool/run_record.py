"""What this computer knows of a detached run that it submitted: where its folder is, in a run of `history/runs.py`.

<state>/runs/<name>/journal     facts: run, open, submitted, handed, running; locked while it is submitted
<state>/runs/<name>/seen        how many bytes of its output `sky attach` has shown
<state>/runs/<name>/end         how it ended, once that was seen, if its node 0 is another machine
<state>/runs/<name>/whole       then the histories of its pools are on this computer to their ends
<state>/runs/<name>/folder      the run's folder (node/run_folder.py), if its node 0 is this computer
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skyward.errors import InvalidArgument
from skyward.history import runs
from skyward.transport.journal import Journal

__all__ = ["JOIN", "KIND", "RunRecord", "check_free", "create", "find", "free_name"]

KIND = "detached"
JOIN = "join"
"""The way back to a machine that has joined, by `setup/joined/door.py`."""
_SEEN, _END, _WHOLE = "seen", "end", "whole"


class RunRecord:
    def __init__(self, name: str, path: Path, facts: dict[str, dict[str, Any]]) -> None:
        self.name, self.path, self.facts = name, path, facts
        """The last fact of each kind."""

    @property
    def seen(self) -> int:
        return self._kept(_SEEN) or 0

    @seen.setter
    def seen(self, offset: int) -> None:
        self._keep(_SEEN, offset)

    @property
    def end(self) -> dict[str, Any] | None:
        return self._kept(_END)

    @end.setter
    def end(self, status: dict[str, Any]) -> None:
        self._keep(_END, status)

    @property
    def whole(self) -> bool:
        return bool(self._kept(_WHOLE))

    @whole.setter
    def whole(self, value: bool) -> None:
        self._keep(_WHOLE, value)

    def _kept(self, name: str) -> Any:
        try:
            return json.loads((self.path / name).read_text())
        except (OSError, ValueError):
            return None

    def _keep(self, name: str, value: object) -> None:
        part = self.path / f"{name}.{os.getpid()}"
        with contextlib.suppress(OSError):  # then it is shown, or asked for, once more
            part.write_text(json.dumps(value))
            part.rename(self.path / name)


class Submission(RunRecord):
    def __init__(self, name: str, path: Path, held: Journal) -> None:
        super().__init__(name, path, {})
        self._held = held

    def write(self, fact: str, **values: Any) -> None:
        self.facts[fact] = {"fact": fact, "time": time.time(), **values}
        self._held.append(self.facts[fact])

    def way(self, found: Mapping[str, Any] | None) -> dict[str, Any] | None:
        """The lease's way back to node 0, without its secret, which goes into a file of its own."""
        if found is None or JOIN not in found:
            return None if found is None else dict(found)
        from skyward.setup.joined.door import keep

        keep(self.path, found[JOIN])
        return {JOIN: found[JOIN]["name"]}

    def close(self) -> None:
        self._held.close()

    def drop(self) -> None:
        self._held.close()
        runs.drop(runs.find(self.name))


def free_name(wanted: str) -> str:
    """A name that no run has, made from `wanted`."""
    taken = {run.name for run in runs.runs()}
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", wanted).strip(".-") or "run"
    names = (stem if number == 1 else f"{stem}-{number}" for number in itertools.count(1))
    return next(name for name in names if name not in taken)


def check_free(name: str) -> None:
    """Raises if a run cannot have this name, or one has it."""
    runs.check_name(name)
    for run in runs.runs():
        if run.name == name:
            ends = f", and `sky stop {name}` ends it before" if run.kind == KIND else ""
            raise InvalidArgument(
                f"there is a run {name} already. Choose another name, or remove the old one: `sky runs drop {name}` "
                f"does that when it is over{ends}."
            )


def create(name: str) -> Submission:
    """Raises if there is a run of this name."""
    check_free(name)
    opened = runs.open_run(name, KIND)
    return Submission(name, opened.path, opened.journal)


def find(name: str) -> RunRecord:
    found = runs.find(name)
    if found.kind != KIND:
        raise InvalidArgument(f"{name} is no detached run, but a run of kind {found.kind!r}.")
    facts, _ = found.facts()
    return RunRecord(name, found.path, {str(fact.get("fact")): fact for fact in facts})
