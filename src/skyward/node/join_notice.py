"""Waits, in an agent on a joined machine, for the file by which `node/join.py` gives notice."""

from __future__ import annotations

import os
import time

__all__ = ["wait"]


def wait() -> float:
    path = os.environ.get("SKYWARD_NOTICE", "")
    while True:
        try:
            with open(path) as file:
                return max(0.0, float(file.read()) - time.time())
        except (OSError, ValueError):  # not yet
            time.sleep(0.5)
