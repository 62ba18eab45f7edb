"""Turns of broadcasts that run in one process at the same time: those that share a group go one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable

from skyward.api.info import current_broadcast

__all__ = ["await_turn", "decide_by"]

_STEP = 0.005

_is_turn: Callable[[str], bool] | None = None


def decide_by(is_turn: Callable[[str], bool]) -> None:
    """Has `is_turn` say whether a broadcast is the earliest that is still in this process."""
    global _is_turn
    _is_turn = is_turn


def await_turn() -> None:
    """Waits until broadcasts that came before the current one have left this process.

    They come to all nodes in the same order. Side by side, their collectives would be mixed, in another order on each
    node. The steps are short, since a call that waits can be stopped between two of them only.
    """
    broadcast = current_broadcast()
    while broadcast is not None and _is_turn is not None and not _is_turn(broadcast):
        time.sleep(_STEP)
