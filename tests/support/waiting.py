"""Waiting for a condition, and for what a program prints."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from typing import Any

import pytest

__all__ = ["read_until", "until"]


def until(condition: Callable[[], object], seconds: float = 60.0, what: object = None) -> Any:
    """Waits for a condition and returns its value; fails when it does not come true. `what` may be a function."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            pytest.fail(f"waited {seconds} s without effect for {what() if callable(what) else what or condition}")
        time.sleep(0.01)
    return value


def read_until(process: subprocess.Popen[str], word: str) -> list[str]:
    """What a program prints, up to a line with this word."""
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line)
        if word in line:
            return lines
    errors = process.stderr.read() if process.stderr else ""
    pytest.fail(f"the program ended without {word!r}:\n{''.join(lines)}{errors}")
