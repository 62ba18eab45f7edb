"""A reference to an object that nodes keep: `pool.put(obj)`, or the result of `call.keep()`."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

__all__ = ["Ref", "checked_keep", "not_kept"]

T_co = TypeVar("T_co", covariant=True)

_STANDS_FOR = "a Ref stands for an object that the nodes of a pool keep"

if TYPE_CHECKING:

    class _Anything(Any):
        """A `Ref[T]` is passed for a `T`; type checkers accept what inherits from Any."""
else:

    class _Anything:
        """A Ref that is used like its object explains how to get it."""

        def __getattr__(self, name: str) -> Any:
            hint = "" if name.startswith("_") else f": {_STANDS_FOR}. If the object has it: `ref.get().{name}`."
            raise AttributeError(f"'Ref' object has no attribute {name!r}{hint}")

        def _refuse(self, *_: object) -> NoReturn:
            raise TypeError(
                f"{_STANDS_FOR}. `ref.get()` brings it here; as an argument of a call, `fn(ref) >> pool`, it becomes "
                "the object."
            )

        # not __iter__, __len__ and __call__: it would pass for an iterable, an empty one would be false
        __getitem__ = __add__ = __radd__ = __sub__ = __mul__ = __rmul__ = __truediv__ = __int__ = __float__ = _refuse


class Ref(_Anything, Generic[T_co]):
    """An object that nodes of a pool keep; as an argument of a call it becomes the object.

    It was sent there once (`pool.put`), or it is the result of a call and has never left its node (`call.keep()`).
    """

    def __init__(
        self,
        key: str,
        words: str,
        owner: object,
        get: Callable[[], Any],
        drop: Callable[[], None],
        size: int = 0,
        blobs: Sequence[tuple[str, Any]] = (),
        inner: Sequence[Ref[Any]] = (),
        kept: Any = None,
    ) -> None:
        self.key, self.owner, self._words, self._size = key, owner, words, size
        self.blobs, self.inner = tuple(blobs), tuple(inner)
        self.kept = kept  # what the pool knows of a result that stays on its node; None for what was put
        self._get = get
        self._end = weakref.finalize(self, drop)
        self._end.atexit = False  # the pool takes everything with it

    @property
    def size(self) -> int:
        """Bytes of the pickled object."""
        return self._size if self.kept is None else self.kept.size

    def get(self) -> T_co:
        """The object, brought here: another copy each time."""
        self.check()
        return self._get()

    def drop(self) -> None:
        """Frees what nodes and this computer keep of the object, as letting go of the Ref does."""
        self._end()

    def check(self) -> None:
        """Raises if the object is no longer kept."""
        if not self._end.alive:
            again = "put the object again, `pool.put(...)`" if self.kept is None else "call it again"
            raise ValueError(f"{self!r} was dropped: {again}.")

    def _where(self) -> str:
        if self.kept is None:
            return ""
        nodes = sorted(self.kept.where)
        if self.kept.state == "there" and nodes:
            return f"{'node' if len(nodes) == 1 else 'nodes'} {', '.join(map(str, nodes))}"
        return {"making": "being made again", "there": "this computer"}.get(self.kept.state, "lost")

    def __repr__(self) -> str:
        where = f", on {self._where()}" if self.kept is not None and self.kept.where else ""
        return f"<Ref to {self._words}, {self.size:,} bytes{where}{'' if self._end.alive else ', dropped'}>"

    def _repr_html_(self) -> str:
        from skyward.api.html import card

        if self.kept is None:
            return card("Ref to an object that was put", {"value": self._words, "bytes": f"{self.size:,}"})
        shown = {"result of": self._words, "kept on": self._where(), "bytes": f"{self.size:,}"}
        return card("Ref to a result that stays", shown)


def checked_keep(fn: Callable[..., Any], name: str) -> None:
    """Raises for generators: they have no result to keep."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    if inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
        raise TypeError(not_kept(name))


def not_kept(name: str) -> str:
    return (
        f"{name} yields its items one by one, so it has no result that could stay on a node or be passed to another "
        "call. Return a list there, or read the items here: `for item in call >> pool`."
    )
