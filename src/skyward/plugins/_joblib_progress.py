"""How far a Parallel of joblib's is: tasks are counted as their batches end, and how many there are is found out.

joblib reads its tasks from an iterator as it needs them, mostly a generator expression over something of known length.
That length is looked up, without reading anything ahead; where it cannot be, the total is known once joblib has come to
the end of the iterator.
"""

from __future__ import annotations

import dis
import gc
import itertools
import math
import operator
from concurrent.futures import Future
from types import CodeType, GeneratorType
from typing import Any, cast

from skyward.api.compute import name_of
from skyward.plugins._joblib import Slots

__all__ = ["TaskCounter", "tasks_in"]

_DEEPEST = 5


class TaskCounter:
    """Counts the tasks of one call of a Parallel."""

    def __init__(self, pool: Slots, parallel: Any) -> None:
        self._pool, self._parallel = pool, parallel
        self._counter: Any = None
        self._began = False

    def sent(self, batch: Any) -> None:
        """joblib has cut off a batch; called with its lock held."""
        if not self._began:
            self._began = True
            self._counter = self._pool.follow_group(name_of(batch.items[0][0]), self._expected())

    def ended(self, batch: Any, future: Future[Any]) -> None:
        """A batch is done."""
        if self._counter is None:
            return
        self._look_for_end()
        count = len(batch.items)
        if future.cancelled():
            self._counter.add(0, stopped=count)
        elif future.exception() is not None:
            self._counter.add(0, count)
        else:
            self._counter.add(count)

    def end(self) -> None:
        """The call is over."""
        if self._counter is not None:
            self._look_for_end()
            self._counter.end()

    def _expected(self) -> int | None:
        """How many tasks there are, asked when the first of them are sent."""
        known = getattr(self._parallel, "n_tasks", None)
        if known is not None:
            return known
        iterator = getattr(self._parallel, "_original_iterator", None)
        ahead: Any = getattr(self._parallel, "_ready_batches", None)
        if iterator is None or ahead is None:
            return None
        taken = self._parallel.n_dispatched_tasks + sum(len(batch) for batch in list(ahead.queue))
        return tasks_in(iterator, taken)

    def _look_for_end(self) -> None:
        """Once joblib has read all tasks, how many there are is known."""
        parallel = self._parallel
        ahead: Any = getattr(parallel, "_ready_batches", None)
        read = getattr(parallel, "_original_iterator", self) is None and not getattr(parallel, "_aborting", False)
        if read and ahead is not None and ahead.empty():
            self._counter.expect(parallel.n_dispatched_tasks)


def tasks_in(iterator: Any, taken: int, depth: int = 0) -> int | None:
    """How many items an iterator has in all, of which so many were taken; None if that cannot be told."""
    if depth > _DEEPEST:
        return None
    if isinstance(iterator, GeneratorType):
        frame = iterator.gi_frame
        if frame is None or not _is_plain(iterator.gi_code):
            return taken if frame is None else None
        return tasks_in(frame.f_locals.get(".0"), taken, depth + 1)
    if isinstance(iterator, enumerate | zip):
        parts = cast("tuple[Any, ...]", iterator.__reduce__()[1])  # type: ignore[index]
        inner = parts[:1] if isinstance(iterator, enumerate) else parts
        found = [tasks_in(part, taken, depth + 1) for part in inner]
        counts = [count for count in found if count is not None]
        return min(counts) if counts and len(counts) == len(found) else None
    if isinstance(iterator, itertools.product):
        referred: list[Any] = gc.get_referents(iterator)  # what is multiplied comes first
        pools: Any = referred[0] if referred else None
        if not isinstance(pools, tuple) or not all(isinstance(pool, tuple) for pool in cast("Any", pools)):
            return None
        return math.prod(map(len, cast("tuple[Any, ...]", pools)))
    if type(iterator).__module__ != "builtins":
        return None  # what the user wrote is not asked
    left = operator.length_hint(iterator, -1)
    return taken + left if left >= 0 else None


def _is_plain(code: CodeType) -> bool:
    """Whether it is a generator expression with one loop and no condition: an item of it for each of another."""
    if code.co_name != "<genexpr>":
        return False
    names = [instruction.opname for instruction in dis.get_instructions(code)]
    return names.count("FOR_ITER") == 1 and not any("JUMP" in name and "IF" in name for name in names)
