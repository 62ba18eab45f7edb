"""When a node that cannot be reached counts as lost, and when it is only our own connection that is."""

from __future__ import annotations

__all__ = ["Alone", "given_up", "next_try"]

_HERE = 15.0
_REFUSED = 2.0
_SILENT = 15.0
_AWAY = 5.0  # a link that is silent counts as broken after 10 s, so this delays nothing
_GONE = 5.0
_REJOINING = 25.0  # an attempt that began while nobody could be reached takes ten seconds, and so does the next


def given_up(
    lease: float | None,
    away: float,
    silent: float,
    *,
    refused: bool,
    others_speak: bool,
    rejoined: float = float("inf"),
) -> bool:
    """Whether a node is lost: `away` seconds after its connection broke, `silent` seconds after its last message.

    `lease` is None for a node of this computer, which is lost if it cannot be reached for a while.
    Another machine is lost at once if it answers but nobody listens there. If it does not answer, it is lost if other
    nodes do; if none does, the fault is rather on our side, and the nodes work on until the lease ends. `rejoined`
    seconds ago the first of them was reached again: the others get as much time as an attempt takes.
    """
    if lease is None:
        return away > _HERE
    if refused:
        return away > _REFUSED
    if others_speak:  # a client that was stopped has heard nobody: all nodes get time to come back
        return silent > _SILENT and away > _AWAY and rejoined > _REJOINING
    return silent > lease


def next_try(away: float, *, gone: bool) -> float:
    """How long to wait before the next attempt to connect."""
    return _GONE if gone else min(2.0, 0.05 + away / 4)


class Alone:
    """Since when no node at all can be reached, and what is said of it: after half a minute, then every minute."""

    def __init__(self) -> None:
        self._since, self._told = 0.0, 0
        self.over = float("-inf")
        """When a node was reached again."""

    def began(self, now: float) -> None:
        """The last connection has broken."""
        self._since = now

    def ended(self, now: float) -> None:
        """A node is connected."""
        self.over = now if self._since else self.over
        self._since, self._told = 0.0, 0

    def told(self, now: float, lease: float) -> str:
        """What the user is told now, if anything."""
        away = now - self._since
        if not self._since or away <= 30 + 60 * self._told:
            return ""
        self._told += 1
        return (
            f"no connection to any node for {away:.0f} s. What runs there goes on; we try again until the lease "
            f"ends, {lease - away:.0f} s from now."
        )
