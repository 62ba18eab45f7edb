"""What came of a peer's tests: how many passed, failed and were skipped, and why."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Figures", "table", "tried"]


@dataclass
class Figures:
    """The results of one part; `failures` and `skips` say which test, and why."""

    part: str
    passed: int = 0
    failures: dict[str, str] = field(default_factory=dict[str, str])
    skips: dict[str, str] = field(default_factory=dict[str, str])
    seconds: float = 0.0

    def __str__(self) -> str:
        counts = f"{self.passed} passed, {len(self.failures)} failed, {len(self.skips)} skipped in {self.seconds:.0f} s"
        failures = [f"  FAILED {name}: {reason}" for name, reason in self.failures.items()]
        return "\n".join([f"{self.part}: {counts}", *failures])


def tried(part: str, tests: Iterable[tuple[str, Callable[[], Any]]], skips: dict[str, str] | None = None) -> Figures:
    """Runs plain functions as the tests of a part; one that raises has failed."""
    figures, began = Figures(part, skips=skips or {}), time.monotonic()
    for name, test in tests:
        since = time.monotonic()
        try:
            test()
        except Exception as exc:  # reported below, and at the end
            figures.failures[name] = f"{type(exc).__name__}: {exc}"[:500]
            traceback.print_exc()
        else:
            figures.passed += 1
        how = "FAILED" if name in figures.failures else "passed"
        print(f"{part}: {name}: {how} in {time.monotonic() - since:.1f} s", flush=True)
    figures.seconds = time.monotonic() - began
    return figures


def table(parts: list[Figures]) -> str:
    """All parts, a line each, and every reason to skip."""
    lines = [f"{'':34} passed  failed  skipped  seconds"]
    for each in parts:
        counts = f"{each.passed:6}  {len(each.failures):6}  {len(each.skips):7}  {each.seconds:7.0f}"
        lines.append(f"{each.part:34} {counts}")
    for each in parts:
        reasons: dict[str, int] = {}
        for reason in each.skips.values():
            reasons[reason] = reasons.get(reason, 0) + 1
        lines += [f"{each.part}: {count} skipped: {reason}" for reason, count in reasons.items()]
        lines += [f"{each.part}: FAILED {name}: {reason}" for name, reason in each.failures.items()]
    return "\n".join(lines)
