"""The states of a node, as a table: (state, event) -> (state, actions). `nodes` applies it.

An event that a state has no row for changes nothing. "as before" is the state that the connection's loss interrupted.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["NODES", "Node"]

Row = tuple[str, tuple[str, ...]]

_BROKEN: Row = ("silent", ("tell down", "reconnect"))
_LOST: Row = ("lost", ("tell lost", "lose calls"))
_RETURNED: Row = ("opening", ("tell up", "lose calls", "set up"))
_REPLACED: Row = ("replaced", ("renounce",))

NODES: dict[tuple[str, str], Row] = {
    # its runners are being made
    ("opening", "ready"): ("ready", ("tell ready",)),
    ("opening", "broken"): _BROKEN,
    ("opening", "failed"): _LOST,
    ("opening", "unreachable"): _LOST,
    ("opening", "notice"): ("leaving", ("tell leaving",)),
    ("opening", "restarted"): _RETURNED,
    ("opening", "replace"): _REPLACED,
    # it takes calls
    ("ready", "ready"): ("ready", ("tell ready",)),
    ("ready", "renew"): ("opening", ()),
    ("ready", "broken"): _BROKEN,
    ("ready", "failed"): _LOST,
    ("ready", "unreachable"): _LOST,
    ("ready", "notice"): ("leaving", ("tell leaving",)),
    ("ready", "restarted"): _RETURNED,
    ("ready", "replace"): _REPLACED,
    # its machine will be taken away: no new calls
    ("leaving", "notice"): ("leaving", ("tell leaving",)),
    ("leaving", "broken"): _BROKEN,
    ("leaving", "failed"): _LOST,
    ("leaving", "unreachable"): _LOST,
    ("leaving", "restarted"): _RETURNED,
    ("leaving", "replace"): _REPLACED,
    # there is no connection, and it is tried again
    ("silent", "attached"): ("as before", ("tell up",)),
    ("silent", "restarted"): _RETURNED,
    ("silent", "renew"): ("silent", ("forget runners",)),
    ("silent", "give up"): _LOST,
    ("silent", "unreachable"): _LOST,
    ("silent", "replace"): _REPLACED,
    # it was given up
    ("lost", "attached"): _RETURNED,
    ("lost", "restarted"): _RETURNED,
    ("lost", "replace"): _REPLACED,
    # it was missing when the pool opened
    ("absent", "join"): ("joining", ("renounce",)),
    # it has come, and is connected to; who is which rank changes when it answers
    ("joining", "attached"): _RETURNED,
    ("joining", "restarted"): _RETURNED,
    ("joining", "unreachable"): ("absent", ("renounce",)),
    # another machine takes its place
    ("replaced", "attached"): _RETURNED,
    ("replaced", "restarted"): _RETURNED,
    ("replaced", "unreachable"): _LOST,
    ("replaced", "replace"): _REPLACED,
}


@dataclass(eq=False)
class Node:
    """What is known of a node."""

    number: int
    state: str = "opening"
    before: str = "opening"
    """The state in which its connection broke."""
    gone: str = ""
    """Why it was given up."""
    away: float = 0.0
    """Since when there is no connection."""
    leaving: float = 0.0
    """When its machine will be taken away."""
    refusals: int = 0
    error: BaseException | None = None
