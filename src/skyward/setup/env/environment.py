"""What setting up an image on a machine results in."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["MARKER", "Environment"]

MARKER = ".complete"  # the file that an environment has when all of it is there; the scripts know it by the same name


@dataclass(frozen=True)
class Environment:
    """Where user code runs: an interpreter, the variables that lead programs to it, and the pool's directory there.

    On this computer the pool has its directory elsewhere, and the image's own `env` is among the variables. `record` is
    the file that lists its packages, if they were resolved just now.
    """

    python: str
    env: dict[str, str] = field(default_factory=dict[str, str], repr=False)
    directory: str = ""
    record: str = field(default="", compare=False)
    fresh: bool = False
    """Whether it was made just now, and not found."""
