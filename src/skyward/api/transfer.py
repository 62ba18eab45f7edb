"""What `pool.push` and `pool.pull` have done."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Transfer"]


@dataclass(frozen=True)
class Transfer:
    """How many files were copied, and how many were there already."""

    files: int
    """Files that were copied; of several nodes, those of all of them for `pull`, and each file once for `push`."""
    bytes: int
    """How much was copied, in bytes; what an earlier attempt had copied of a file does not count."""
    unchanged: int
    """Files that were there already, with the same size and the same time of last change."""
    left_out: tuple[str, ...] = ()
    """What was not copied, and why: links that lead out of the folder, sockets, pipes, devices, nodes without it."""
