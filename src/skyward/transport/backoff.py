"""How long to wait between attempts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

__all__ = ["backoff"]


def backoff(
    first: float, longest: float, factor: float = 2.0, jitter: Callable[[], float] = lambda: 1.0
) -> Iterator[float]:
    """Endless pauses in seconds, each `factor` times the last, multiplied by `jitter`."""
    pause = first
    while True:
        pause = min(longest, pause)
        yield pause * jitter()
        pause *= factor
