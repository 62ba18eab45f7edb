"""Spellings that are nearly right, answered with the right one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from skyward.api.brief import brief, described
from skyward.api.compute import Compute, PendingCompute, PendingComputeGroup, name_of

__all__ = ["Mistakes", "called_like_an_executor"]


class Mistakes:
    """The part of a pool that hears what was not meant for it: `plain(1) >> pool`, `pool < call`."""

    def __rrshift__(self, other: object) -> NoReturn:
        raise _not_a_call(other, ">>")

    def __rmatmul__(self, other: object) -> NoReturn:
        raise _not_a_call(other, "@")

    def __lt__(self, other: object) -> NoReturn:
        if isinstance(other, PendingCompute | PendingComputeGroup):
            raise TypeError("a call stands on the left, the pool on the right: `call > pool`.")
        raise _not_a_call(other, ">")


def called_like_an_executor(fn: object, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> TypeError:
    """The error for `pool.submit(fn, 1)`."""
    if isinstance(fn, Compute):
        wanted = described(name_of(fn.fn), args, kwargs)
        return TypeError(f"a pool runs calls: `pool.{method}({wanted})`, with the arguments in its own brackets.")
    name = name_of(fn) if callable(fn) else brief(fn)
    return TypeError(
        f"pool.{method}() takes one call of an @sky.compute function, such as `pool.{method}(train(x))`. For plain "
        f"functions there is `pool.executor`: `pool.executor.submit({name}, ...)`."
    )


def _not_a_call(value: object, operator: str) -> TypeError:
    if isinstance(value, list | tuple):
        return TypeError(
            f"`[...] {operator} pool`: calls in a list are sent as a group, `sky.gather(*calls) {operator} pool`."
        )
    return TypeError(
        f"`{brief(value)} {operator} pool`: that is a {type(value).__name__}, not a call. Was it returned by a plain "
        "function? Only calls of functions decorated with @sky.compute are sent."
    )
