"""The stacks that `pool.stacks()` returns, and how they are printed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Frame", "Stack", "Stacks"]

_STANDARD = ("/site-packages/", "/dist-packages/")


@dataclass(frozen=True, slots=True)
class Frame:
    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.short}:{self.line} in {self.function}"

    @property
    def short(self) -> str:
        """The file from its package on, or relative to the current directory."""
        for name in _STANDARD:
            if name in self.file:
                return self.file.rpartition(name)[2]
        here = os.getcwd() + "/"
        return self.file[len(here) :] if self.file.startswith(here) else self.file

    @property
    def of_user(self) -> bool:
        """Whether its file belongs to no package and is no part of Python."""
        return self.file.startswith("/") and not any(name in self.file for name in ("/lib/python3", *_STANDARD))


@dataclass(frozen=True, slots=True)
class Stack:
    """Where one body is, or what a process without one does."""

    rank: int
    node: int
    state: str
    """"running", "stopping", "starting" (in a plugin's hook), "idle", or in an error "returned"."""
    call: str | None = None
    name: str = ""
    seconds: float = 0.0
    """How long the body has run."""
    cpu_seconds: float = 0.0
    """CPU time of its process and what that started, over all calls."""
    frames: tuple[Frame, ...] = ()
    """The outermost first, as in a traceback."""
    problem: str = ""

    @property
    def place(self) -> Frame | None:
        """The user's own line: the innermost frame outside packages."""
        own = [frame for frame in self.frames if frame.of_user]
        return own[-1] if own else self.frames[-1] if self.frames else None

    def __str__(self) -> str:
        head = f"rank {self.rank} (node {self.node}): "
        if self.call is None:
            head += "in the hooks of plugins" if self.state == "starting" else self.state
        else:
            head += f"{self.name}, {self.state}, {self.seconds:.1f} s, {self.cpu_seconds:.1f} s CPU (call {self.call})"
        lines = [head, *(f"    {frame}" for frame in self.frames)]
        return "\n".join([*lines, f"    no stack: {self.problem}"] if self.problem else lines)


class Stacks(tuple[Stack, ...]):
    """All stacks of a pool, in the order of ranks; printed, they read like tracebacks."""

    __slots__ = ()

    def __str__(self) -> str:
        return "\n".join(map(str, self)) or "no processes"

    def of(self, ranks: Sequence[int]) -> Stacks:
        return Stacks(stack for stack in self if stack.rank in ranks)
