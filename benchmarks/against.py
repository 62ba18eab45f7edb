"""Compares this checkout with another one in one interleaved run: `run.py --against PATH`.

    for each measure, a process of each checkout, both with their pool open:

    this    warm up   slice           slice   slice           slice   ...
    other   warm up           slice   slice           slice   slice   ...    ratio = this / other, slice by slice

Only one of the two works at a time. The other checkout's `src` comes first in PYTHONPATH, which every process of a
local pool inherits; both sides are started in this way, and say from where their nodes import Skyward.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import secrets
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self

from contest import columns, figure, tell
from slices import MEASURES, Figure

__all__ = ["THIS", "compare"]

THIS = Path(__file__).resolve().parents[1]
LIMIT = 60.0  # seconds for a slice, beyond those it was asked to last; whatever takes longer hangs
_LEAVING = 15.0  # seconds until the processes of a pool whose client has gone must have gone, too
_MARK = "SKYWARD_BENCH_SIDE"  # in the environment of everything that a side starts
_LEFT_OUT = ("PYTHONDONTWRITEBYTECODE",)  # a warm-up leaves both checkouts compiled, whoever was used before

Slices = dict[str, list[dict[str, float]]]

_WIDTHS = (42, 10, 10, 7, 15, 6)
_RIGHT = (False, True, True, True, True, False)
_HEADER = columns(("what", "this", "other", "ratio", "quartiles", "better"), _WIDTHS, _RIGHT)


class Failed(Exception):
    """A side that has ended, hangs, or uses the wrong Skyward."""


class Side:
    """A process that measures one checkout; leaving the context ends it and all that it started."""

    def __init__(self, name: str, root: Path, measure: str) -> None:
        self.name = name
        self._root = root
        self._heard = b""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed in __exit__
        env = {name: value for name, value in os.environ.items() if name not in _LEFT_OUT}
        env["PYTHONPATH"] = os.pathsep.join([str(root / "src"), *filter(None, [env.get("PYTHONPATH")])])
        env[_MARK] = self._mark = secrets.token_hex(8)
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("slices.py")), measure],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
            bufsize=0,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        reason = ""
        if kind is None:
            try:
                code = self._process.wait(LIMIT)
                reason = f"ended with {code}" if code else ""
            except subprocess.TimeoutExpired:
                reason = f"did not end within {LIMIT:.0f} s"
        self._process.kill()
        self._process.wait()
        killed = self._end_the_rest()
        if killed:
            reason = f"{reason or 'ended'}, and left {killed} processes, which were killed"
        try:
            if kind is None and reason:
                raise self._failed(reason)
        finally:
            self._process.stdout.close()
            self._errors.close()

    def check(self) -> None:
        """Waits until it is ready; fails if it or one of its nodes imports Skyward from elsewhere."""
        home = self._root / "src"
        for path in self._answer(LIMIT):
            if not Path(path).resolve().is_relative_to(home):
                raise self._failed(f"imports {path}, which is not in {home}")

    def slice(self, seconds: float) -> dict[str, float]:
        """The figures of one slice."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{seconds}\n".encode())
        except BrokenPipeError:
            pass  # it has ended; reading the answer says so
        return self._answer(LIMIT + seconds)

    def _answer(self, limit: float) -> Any:
        assert self._process.stdout is not None
        deadline = time.monotonic() + limit
        while b"\n" not in self._heard:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([self._process.stdout], [], [], left)[0]:
                raise self._failed(f"did not answer within {limit:.0f} s")
            piece = self._process.stdout.read(1 << 16)
            if not piece:
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(1)
                raise self._failed(f"ended with {self._process.returncode}")
            self._heard += piece
        line, _, self._heard = self._heard.partition(b"\n")
        return json.loads(line)

    def _failed(self, reason: str) -> Failed:
        self._errors.seek(0)
        said = self._errors.read().decode("utf-8", "replace")[-3000:]
        return Failed(f"{self.name} ({self._root}) {reason}. Its standard error:\n{said}")

    def _end_the_rest(self) -> int:
        """Waits for everything that the process started to go, and kills what does not; how many those were."""
        deadline = time.monotonic() + _LEAVING
        while self._rest() and time.monotonic() < deadline:
            time.sleep(0.05)
        rest = self._rest()
        for pid in rest:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # gone just now
        return len(rest)

    def _rest(self) -> list[int]:
        found: list[int] = []
        mark = f"{_MARK}={self._mark}".encode()
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue  # gone, or not ours
        return found


def compare(other: Path, names: Sequence[str], slices: int, seconds: float, into: Path | None) -> bool:
    """Prints a row for each figure of the named measures; False if a side failed."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))  # what was started is ended on the way out
    print(f"this = {_described(THIS)}\nother = {_described(other)}")
    print(f"ratio = this / other, median and quartiles of {slices} interleaved slices of {seconds:g} s each\n")
    print(_HEADER, "-+-".join("-" * width for width in _WIDTHS), sep="\n", flush=True)
    kept: dict[str, Slices] = {}
    fine = True
    for name in names:
        measure = MEASURES[name]
        if measure.needs and importlib.util.find_spec(measure.needs) is None:
            print(f"{name} is skipped: {measure.needs} is not installed", flush=True)
            continue
        count = min(slices, measure.slices_at_most or slices)
        kept[name] = {"this": [], "other": []}
        try:
            _measure(name, other, count, seconds, kept[name])
        except Failed as exc:
            fine = False
            tell(f"{name}: {exc}")
        for shown in measure.figures:
            print(_line(shown, kept[name], count), flush=True)
        if into is not None:
            into.write_text(json.dumps(kept, indent=1))
    return fine


def _measure(name: str, other: Path, slices: int, seconds: float, seen: Slices) -> None:
    """Adds the figures of both sides to `seen`, slice by slice."""
    began = time.perf_counter()
    with ExitStack() as stack:
        sides = [stack.enter_context(Side(who, root, name)) for who, root in (("this", THIS), ("other", other))]
        for side in sides:
            side.check()
            side.slice(seconds)  # a warm-up
        for number in range(slices):
            for side in sides if number % 2 == 0 else reversed(sides):
                seen[side.name].append(side.slice(seconds))
    tell(f"{name}: {time.perf_counter() - began:.1f} s")


def _line(shown: Figure, seen: Slices, slices: int) -> str:
    ours, theirs = ([figures[shown.name] for figures in seen[side]] for side in ("this", "other"))
    ratios = [a / b for a, b in zip(ours, theirs, strict=False)]
    better = "more" if shown.more_is_better else "less"
    cells = [
        shown.what,
        *(figure(statistics.median(values) if values else math.nan, shown.unit) for values in (ours, theirs)),
        f"{statistics.median(ratios):.2f} x" if ratios else "-",
        _quartiles(ratios),
        better if len(ratios) == slices else f"{better} FAILED after {len(ratios)} slices",
    ]
    return columns(cells, _WIDTHS, _RIGHT)


def _quartiles(values: Sequence[float]) -> str:
    if len(values) < 2:
        return "-"
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return f"{first:.2f} - {third:.2f}"


def _described(root: Path) -> str:
    """A checkout's path and commit."""
    git = ["git", "-C", str(root), "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return f"{root} ({commit or 'no commit'})"
