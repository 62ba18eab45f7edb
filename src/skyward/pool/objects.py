"""Objects that the nodes of a pool keep for calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from skyward.api.keywords import corrects_call
from skyward.api.ref import Ref

if TYPE_CHECKING:
    from skyward.client.refs import Refs
    from skyward.pool.state import PoolState

__all__ = ["Objects"]

T = TypeVar("T")


class Objects:
    """The part of a pool that keeps objects."""

    if TYPE_CHECKING:
        _state: PoolState
        _refs: Refs

    @corrects_call("pool.put", example="pool.put(obj)")
    def put(self, value: T) -> Ref[T]:
        """Keeps an object (`value`) for calls: `train(pool.put(table), rate)`; it is sent to each machine once.

        As an argument, also inside lists and dicts, the Ref becomes the object: unpickled once in each process, so
        calls of one process share it, and what one of them changes the others see. Letting go of the Ref frees it.
        """
        self._state.check_open()
        return self._refs.put(value)
