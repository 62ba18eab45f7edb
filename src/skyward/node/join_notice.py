"""Waits for the notice that this machine's place is to be taken away, which the joiner writes into a file."""

from __future__ import annotations

import os
import time

__all__ = ["wait"]

_POLL = 0.5


def wait() -> float:
    """Waits until the place is to be taken away; the seconds that it has left then."""
    path = os.environ.get("SKYWARD_NOTICE", "")
    while True:
        try:
            with open(path) as file:
                return max(0.0, float(file.read()) - time.time())
        except (OSError, ValueError):  # not yet
            time.sleep(_POLL)
