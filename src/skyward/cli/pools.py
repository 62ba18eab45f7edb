"""Which pool of this computer a command is about."""

from __future__ import annotations

from skyward.errors import InvalidArgument
from skyward.history.store import Entry, entries, find

__all__ = ["chosen"]


def chosen(name: str | None) -> Entry:
    """The history of a pool by name or id; without one, of the pool that was opened last, one that runs first."""
    if name is not None:
        return find(name)
    known = entries()
    if not known:
        raise InvalidArgument(
            "there is no history of a pool on this computer: none was opened in the last thirty days."
        )
    return next((entry for entry in known if entry.running), known[0])
