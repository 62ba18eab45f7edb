"""When machines of an open pool ended, written down while AWS still knows: it forgets them after an hour."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from skyward.machines.ledger import History, Ledger
from skyward.providers.aws.machines import CloudMachine
from skyward.providers.aws.tags import POOL

__all__ = ["End", "ends", "note_ends"]


@dataclass(frozen=True)
class End:
    """When a machine ended, and whether AWS has taken it back."""

    time: float
    taken_back: bool = False


def note_ends(machines: Sequence[CloudMachine], by_us: bool = False) -> None:
    """Writes down which of these machines have ended; `by_us`: all of them have, just now."""
    for machine in machines:
        ledger = Ledger.held(machine.tags.get(POOL, ""))
        if ledger is None or not (by_us or machine.gone) or machine.id in ends(ledger.history):
            continue
        when = time.time() if by_us else machine.ended or time.time()
        ledger.note(ended=machine.id, at=when, taken_back=machine.taken_back and not by_us)


def ends(history: History) -> dict[str, End]:
    """What was written down, by the id of the machine; what does not read like it is passed over."""
    found: dict[str, End] = {}
    for record in history.records:
        data: dict[str, Any] = dict(record.data) if record.fact == "note" else {}
        id, when = data.get("ended"), data.get("at")
        if isinstance(id, str) and isinstance(when, int | float):
            found.setdefault(id, End(float(cast(float, when)), data.get("taken_back") is True))
    return found
