"""What the driver on a Ray cluster has said, and what that means in words. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from skyward.errors import NoCapacity, NoOffer

__all__ = ["Busy", "DriverReport", "NothingFits", "amounts", "read_reports"]

_MARK = "skyward: "
_SHOWN = 8


class NothingFits(NoOffer):
    """No node of a Ray cluster, or too few of them, has what was asked for; says what they have."""

    def __str__(self) -> str:
        has = "".join(f"\n  {node}" for node in self.reasons[:_SHOWN])
        more = f"\n  ... and {len(self.reasons) - _SHOWN} more" if len(self.reasons) > _SHOWN else ""
        return (
            f"Ray at {self.where} cannot have {self.wish}; nothing is left there. Its nodes have:{has}{more}\n"
            "Ask for fewer nodes or for less on each (resources=), or let several nodes be on one machine "
            '(strategy="SPREAD" or "PACK"). If the cluster grows when something is asked of it, say autoscaling=True.'
        )


class Busy(NoCapacity):
    """A Ray cluster has the nodes, and others use them."""

    def __str__(self) -> str:
        has = "".join(f"\n  {node}" for node in self.attempts[:_SHOWN])
        return (
            f"Ray did not give {self.wish} in time; nothing is left there. Others use what is missing: `ray status` "
            f"shows who. The cluster's nodes have, in all:{has}\nTry again later, ask for less, or wait longer: "
            "provision_timeout=."
        )


@dataclass(frozen=True)
class DriverReport:
    """How far a driver is."""

    waiting: str = ""
    """Ray's word for why the places are not there yet; empty once they are."""
    nodes: Sequence[str] = ()
    """What the cluster's nodes have, a line each."""
    infeasible: str = ""
    """What no node has, in words."""
    failed: str = ""
    over: bool = False
    started: Mapping[int, Mapping[str, Any]] = field(default_factory=dict[int, Mapping[str, Any]])
    """The bundles in which a joiner runs, and where that is."""
    losses: Mapping[int, Sequence[str]] = field(default_factory=dict[int, Sequence[str]])
    """By bundle, why joiners have ended there that should not have, in the order in which it happened."""
    ended: str = ""
    """Why the driver itself has ended, in one line; only a glance at it says so."""
    hopeless: str = ""
    """Why a joiner could not stay, of a bundle in which none is started again."""

    def progress(self, count: int) -> str:
        """What the user is told while places are waited for."""
        if self.waiting:
            meaning = {"INFEASIBLE": "no node fits yet", "QUEUED": "waiting for free resources"}
            return f"Ray: {meaning.get(self.waiting, f'waiting ({self.waiting})')}"
        return f"Ray: {len(self.started)} of {count} places started"


def read_reports(lines: Iterable[str]) -> DriverReport:
    """What the lines of a driver come to; lines that it did not write are skipped."""
    said: dict[str, Any] = {}
    started: dict[int, Mapping[str, Any]] = {}
    losses: dict[int, list[str]] = {}
    for line in lines:
        message = _message(line)
        match message:
            case {"waiting": str(state)}:
                said |= {"waiting": state, "nodes": _described(message.get("nodes"))}
            case {"infeasible": dict()}:
                wish = amounts(cast("Mapping[str, float]", message["infeasible"]))
                said |= {"infeasible": wish, "nodes": _described(message.get("nodes"))}
            case {"placed": _}:
                said["waiting"] = ""
            case {"started": int(index)}:
                started[index] = message
            case {"ended": int(index), "why": str(why)}:
                started.pop(index, None)
                if why:
                    losses.setdefault(index, []).append(why)
                if message.get("given_up") and why:
                    said["hopeless"] = why
            case {"failed": str(why)}:
                said["failed"] = why
            case {"over": _}:
                said["over"] = True
            case _:
                pass
    return DriverReport(**said, started=started, losses=losses)


def amounts(resources: Mapping[str, float]) -> str:
    """Resources as people write them: "4 CPU, 1 GPU, 8 GB of memory"."""
    parts: list[str] = []
    for name, amount in sorted(resources.items(), key=lambda item: (item[0] not in ("CPU", "GPU"), item[0])):
        if name == "memory":
            parts.append(f"{amount / 1e9:.3g} GB of memory")
        elif name.startswith("accelerator_type:"):
            parts.append(name.partition(":")[2])
        else:
            parts.append(f"{amount:g} {name}")
    return ", ".join(parts) or "nothing"


def _described(nodes: object) -> tuple[str, ...]:
    if not isinstance(nodes, list):
        return ()
    known = cast("list[dict[str, Any]]", nodes)
    return tuple(sorted(f"{node.get('address')}: {amounts(node.get('resources') or {})}" for node in known))


def _message(line: str) -> dict[str, Any]:
    if not line.startswith(_MARK):
        return {}
    try:
        found = json.loads(line[len(_MARK) :])
    except ValueError:
        return {}  # cut off, or not ours
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}
