"""How contenders are measured and compared: interleaved rounds, a fresh process for each, medians, one table.

run.py --contender calls:ray --into FILE        one contender, one round, in a process of its own
    contest.measured("calls", ...)              skyward, ray, loky, skyward, ray, loky, ... -> medians
        calls.rows(medians)                     -> [Row, ...] -> a line of the table each
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["HEADER", "Medians", "Row", "columns", "figure", "left_out", "line", "measured", "tell"]

RUN = Path(__file__).with_name("run.py")
LIMIT = 180  # seconds for one contender's round; whatever takes longer hangs
PAUSE = 0.3  # lets the processes of the last contender go
PEERS = {"ray": "ray", "dask": "distributed", "loky": "loky", "monarch": "monarch"}  # the modules that they need

Rounds = dict[str, list[dict[str, float]]]


class Medians:
    """Medians by contender and measurement; a contender that failed has nan everywhere."""

    def __init__(self, rounds: Mapping[str, Sequence[Mapping[str, float]]]) -> None:
        self._rounds = rounds

    def __call__(self, contender: str, what: str) -> float:
        values = [seen[what] for seen in self._rounds.get(contender, ()) if what in seen]
        return statistics.median(values) if values else math.nan


@dataclass(frozen=True)
class Row:
    """One line of the table; the ratio is skyward's figure divided by the peer's."""

    what: str
    ours: float
    peer: str
    theirs: float
    unit: str
    at_most: float | None = None
    at_least: float | None = None

    @property
    def ratio(self) -> float:
        """Skyward's figure in multiples of the peer's."""
        return self.ours / self.theirs if self.theirs else math.nan

    @property
    def met(self) -> bool | None:
        """Whether the aim is met; None where there is none, or nothing was measured."""
        if math.isnan(self.ratio) or (self.at_most is None and self.at_least is None):
            return None
        return (self.at_most is None or self.ratio <= self.at_most) and (
            self.at_least is None or self.ratio >= self.at_least
        )


def left_out() -> tuple[str, ...]:
    """Peers that are not installed here."""
    return tuple(peer for peer, module in PEERS.items() if importlib.util.find_spec(module) is None)


def measured(group: str, contenders: Sequence[str], rounds: int, quick: bool) -> Rounds:
    """What each contender saw in each round; one that fails in a round is left out of the next ones."""
    absent = left_out()
    seen: Rounds = {name: [] for name in contenders if name not in absent}
    failed: set[str] = set()
    for number in range(1, rounds + 1):
        for name in seen:
            if name in failed:
                continue
            began = time.perf_counter()
            result = _one_round(group, name, quick)
            took = time.perf_counter() - began
            tell(f"{group}: {name}, round {number} of {rounds}: {took:.1f} s{'' if result else ' FAILED'}")
            if result is None:
                failed.add(name)
            else:
                seen[name].append(result)
            time.sleep(PAUSE)
    return seen


def _one_round(group: str, name: str, quick: bool) -> dict[str, float] | None:
    with tempfile.TemporaryDirectory() as directory:
        into = Path(directory) / "seen.json"
        command = [sys.executable, str(RUN), "--contender", f"{group}:{name}", "--into", str(into)]
        with subprocess.Popen(
            command + ["--quick"] * quick,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            text=True,
        ) as child:
            try:
                said, _ = child.communicate(timeout=LIMIT)
            except BaseException as exc:
                os.killpg(child.pid, signal.SIGKILL)
                if not isinstance(exc, subprocess.TimeoutExpired):
                    raise
                said = f"no answer in {LIMIT} s"
        if child.returncode == 0 and into.exists():
            return json.loads(into.read_text())
        tell(f"{group}: {name} ended with {child.returncode}:\n{said[-3000:]}")
        return None


def tell(text: str) -> None:
    """Says something on standard error, beside the table."""
    print(text, file=sys.stderr, flush=True)


_WIDTHS = (50, 10, 44, 8, 8, 4)
_RIGHT = (False, True, True, True, True, False)


def columns(cells: Sequence[str], widths: Sequence[int] = _WIDTHS, right: Sequence[bool] = _RIGHT) -> str:
    """Cells as one line of a table."""
    placed = (
        cell.rjust(width) if to_the_right else cell.ljust(width)
        for cell, width, to_the_right in zip(cells, widths, right, strict=True)
    )
    return " | ".join(placed)


HEADER = (
    columns(("what", "skyward", "peer", "ratio", "aim", "met?")) + "\n" + "-+-".join("-" * width for width in _WIDTHS)
)


def line(row: Row) -> str:
    """A row as text."""
    aim = "-"
    if row.at_most is not None:
        aim = f"<= {row.at_most:.2f}"
    elif row.at_least is not None:
        aim = f">= {row.at_least:.2f}"
    met = {True: "yes", False: "NO", None: "-"}[row.met]
    ratio = "-" if math.isnan(row.ratio) else f"{row.ratio:.2f} x"
    peer = f"{row.peer} {figure(row.theirs, row.unit)}"
    return columns((row.what, figure(row.ours, row.unit), peer, ratio, aim, met))


def figure(value: float, unit: str) -> str:
    """A number with about three digits and its unit."""
    if math.isnan(value):
        return "failed"
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3
    return f"{value:,.{digits}f} {unit}"
