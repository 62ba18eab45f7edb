"""Calls that are used like their results before they were sent: what Python asks of a value, answered in words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

__all__ = ["Unsent"]

_AFTERWARDS = frozenset({"result", "get", "exception", "done", "cancel", "add_done_callback", "compute", "join"})


class Unsent:
    """What has not run: it has no items, no length, no truth and no value."""

    if TYPE_CHECKING:

        def _spelled(self) -> str:
            """How it is written in a program."""
            ...

    def __bool__(self) -> bool:
        words = self._spelled()
        raise TypeError(f"{words} has not run: it has no truth value. Send it to a pool first, `{words} >> pool`.")

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Unsent):
            return self is other
        words = self._spelled()
        raise TypeError(f"{words} has not run: it equals nothing yet. Send it first: `({words} >> pool) == ...`.")

    __hash__ = object.__hash__

    def __await__(self) -> NoReturn:
        words = self._spelled()
        raise TypeError(f"{words} was not sent anywhere: `await ({words} > pool)`.")

    if not TYPE_CHECKING:  # for type checkers there are no such methods, and using them is an error

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            words = self._spelled()
            if name in _AFTERWARDS:
                hint = f"{words} has not run: it has no {name}() yet. Send it: `{words} >> pool`, or"
                raise AttributeError(f"{hint} `({words} > pool).result()` to go on meanwhile.")
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}: {words} has not run. "
                f"If its result has it: `({words} >> pool).{name}`."
            )

        def _refuse(self, *_: object) -> NoReturn:
            words = self._spelled()
            raise TypeError(f"{words} has not run: it has no value to work with yet. Send it first: `{words} >> pool`.")

        # not __iter__, __next__ and __call__: it would pass for an iterator, or for a function
        __getitem__ = __len__ = __int__ = __float__ = __neg__ = _refuse
        __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
        __floordiv__ = __mod__ = __pow__ = __ge__ = __le__ = _refuse

        def __lshift__(self, target: object) -> NoReturn:
            words = self._spelled()
            raise TypeError(f"`{words} << ...`: a call is sent with `{words} >> pool`.")

        def __or__(self, target: object) -> NoReturn:
            words = self._spelled()
            raise TypeError(
                f"`{words} | ...`: a call is sent with `{words} >> pool`; several together with `(a() & b()) >> pool`."
            )
