"""What machines have cost, kept when they are released: a ledger is gone by then.

<state>/spent/2026-11.jsonl    one line per machine, in the month of its end; removed after thirteen months
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from skyward.machines.ledger import History, state_dir
from skyward.machines.offers import Price
from skyward.transport import private

__all__ = ["Charge", "keep", "kept", "of_ledger", "once"]

log = logging.getLogger("skyward.spent")

_FOLDER = "spent"
_DAY = 86_400.0
_KEPT = 396 * _DAY
_LONGEST = 64 << 20


@dataclass(frozen=True)
class Charge:
    """Spread evenly between two times (seconds since 1970)."""

    pool: str
    provider: str
    began: float
    ended: float
    dollars: float
    machine: str = ""
    market: str = ""
    unknown: bool = False
    running: bool = False


def keep(charges: Iterable[Charge], root: Path | None = None) -> None:
    months: dict[str, list[str]] = {}
    for charge in charges:
        month = time.strftime("%Y-%m", time.gmtime(charge.ended))
        months.setdefault(month, []).append(json.dumps(asdict(charge)))
    try:
        folder = private.make(root or state_dir(), _FOLDER)
        for month, lines in months.items():
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
            fd = os.open(folder / f"{month}.jsonl", flags, 0o600)
            with open(fd, "wb", buffering=0) as file:
                file.write("".join(f"{line}\n" for line in lines).encode())
        oldest = time.strftime("%Y-%m", time.gmtime(time.time() - _KEPT))
        for path in folder.glob("*.jsonl"):
            if path.stem < oldest:
                path.unlink(missing_ok=True)
    except OSError as exc:
        log.warning("the cost of this pool is not recorded for `sky cost`: %s", exc)


def kept(root: Path | None = None) -> list[Charge]:
    base = root or state_dir()
    if not private.check(base, _FOLDER):
        return []
    found: list[Charge] = []
    for path in sorted((base / _FOLDER).glob("*.jsonl")):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            with open(fd, "rb") as file:
                found += filter(None, map(_read, file.read(_LONGEST).splitlines()))
        except OSError as exc:
            log.warning("%s is not read: %s", path, exc)
    return once(found)


def once(charges: Iterable[Charge]) -> list[Charge]:
    found: list[Charge] = []
    places: dict[tuple[str, str, str], list[int]] = {}
    for charge in charges:
        same = places.setdefault((charge.provider, charge.pool, charge.machine), [])
        for place in same if charge.machine else ():
            if found[place].began <= charge.ended and charge.began <= found[place].ended:
                found[place] = charge
                break
        else:
            same.append(len(found))
            found.append(charge)
    return found


def of_ledger(history: History, now: float) -> Iterator[Charge]:
    """Machines without a known end count until the pool's time is over."""
    provider = str(history.metadata.get("provider") or "")
    expires = history.metadata.get("expires")
    limit = min(now, float(expires)) if isinstance(expires, int | float) else now
    noted = {
        str(record.data["ended"]): float(record.data["at"])
        for record in history.records
        if record.fact == "note" and isinstance(record.data.get("at"), int | float) and "ended" in record.data
    }
    for kind in dict.fromkeys(record.kind for record in history.records if record.fact == "answer"):
        gone = history.gone(kind)
        for id, record in history.made(kind).items():
            price = _price(record.data)
            if price is None:
                continue
            end = noted.get(id, gone.get(id))
            ended = max(record.time, limit if end is None else end)
            cost = price.times((ended - record.time) / 3600)
            market = str(record.data.get("market") or "")
            yield Charge(
                history.pool, provider, record.time, ended, cost.known_total, id, market, not price.known, end is None
            )


def _price(data: Any) -> Price | None:
    recorded = data.get("parts") or ({"machine": data["price"]} if "price" in data else None)
    try:
        return Price.read(recorded) if recorded else None
    except ValueError:
        return None


def _read(line: bytes) -> Charge | None:
    try:
        body: Any = json.loads(line)
        pool, provider, machine, market = (body[name] for name in ("pool", "provider", "machine", "market"))
        began, ended, dollars = (float(body[name]) for name in ("began", "ended", "dollars"))
        unknown = body["unknown"] is True
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None
    good = all(isinstance(text, str) and text.isprintable() for text in (pool, provider, machine, market))
    # nobody's machine has run for longer than a century
    good = good and 0 <= began <= ended <= began + 3e9 and ended < 1e11 and 0 <= dollars < math.inf
    return Charge(pool, provider, began, ended, dollars, machine, market, unknown) if good else None
