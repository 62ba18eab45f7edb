"""A reference to an object that the nodes of a pool keep: `pool.put(obj)`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from skyward.api.brief import brief

__all__ = ["Ref"]

T = TypeVar("T")

if TYPE_CHECKING:

    class _Anything(Any):
        """A `Ref[T]` is passed where a `T` is wanted; type checkers accept what inherits from Any."""
else:

    class _Anything:
        pass


class Ref(_Anything, Generic[T]):
    """An object that was sent to a pool once; as an argument of a call it becomes the object."""

    def __init__(
        self,
        key: str,
        value: object,
        size: int,
        blobs: Sequence[tuple[str, Any]],
        inner: Sequence[Ref[Any]],
        owner: object,
        get: Callable[[Sequence[tuple[str, Any]]], Any],
        drop: Callable[[str, Sequence[str]], None],
    ) -> None:
        self.key, self.size = key, size
        self.kind, self._words = type(value).__name__, brief(value, 40)
        self.blobs, self.inner, self.owner = tuple(blobs), tuple(inner), owner
        self._get = get
        self._end = weakref.finalize(self, drop, key, [name for name, _ in blobs])
        self._end.atexit = False  # the pool takes everything with it

    def get(self) -> T:
        """The object, as it was put: another copy each time."""
        self.check()
        return self._get(self.blobs)

    def drop(self) -> None:
        """Frees what nodes and this computer keep of the object; letting go of the Ref does the same."""
        self._end()

    def check(self) -> None:
        """Raises if the object is not kept any more."""
        if not self._end.alive:
            raise ValueError(f"{self!r} was dropped: put the object again, `pool.put(...)`.")

    def __repr__(self) -> str:
        return f"<Ref to {self._words}, {self.size:,} bytes{'' if self._end.alive else ', dropped'}>"

    def _repr_html_(self) -> str:
        from skyward.api.html import card

        return card(f"Ref to a {self.kind}", {"value": self._words, "bytes": f"{self.size:,}"})
