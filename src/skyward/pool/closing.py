"""The steps by which a pool is closed: each is registered when its part is opened, and they run in reverse.

A Ctrl-C during one step makes the rest quick: `PoolContext.hurried` is true from then on. What a step leaves undone is
carried out by the watchdog, whose own step comes after those of hosts and machines.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, ParamSpec, TypeVar

__all__ = ["Steps"]

T = TypeVar("T")
P = ParamSpec("P")


class Steps(ExitStack):
    """An ExitStack that notices when the user interrupts one of its steps."""

    def __init__(self, hurry: threading.Event | None = None) -> None:
        super().__init__()
        self._hurry = hurry or threading.Event()

    def callback(self, callback: Callable[P, T], /, *args: P.args, **kwds: P.kwargs) -> Callable[P, T]:
        self._add(lambda *_: bool(callback(*args, **kwds) and False))
        return callback

    def enter_context(self, cm: AbstractContextManager[T, Any]) -> T:
        entered = cm.__enter__()
        self._add(cm.__exit__)
        return entered

    def _add(self, leave: Callable[..., Any]) -> None:
        hurry = self._hurry

        def step(*error: Any) -> Any:
            try:
                return leave(*error)
            except KeyboardInterrupt:
                hurry.set()
                raise

        self.push(step)
