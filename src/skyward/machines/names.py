"""Names of pools: what they may be, and how a name that somebody else wrote is shown."""

from __future__ import annotations

import re

__all__ = ["shown", "usable"]


def usable(name: str) -> bool:
    """Whether it can be a pool's name: as part of a path and of a command it means nothing else."""
    return re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", name) is not None


def shown(text: str) -> str:
    """A text from a tag for people: as it is if it is harmless, else quoted, without control characters."""
    return text if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._: -]*", text) else ascii(text)
