"""Answers spellings that are nearly right with the right one."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from skyward.api.brief import brief, described
from skyward.api.compute import Compute, PendingCompute, PendingComputeGroup, name_of
from skyward.errors import InvalidArgument

__all__ = ["Mistakes", "called_like_an_executor", "for_awaiting", "not_a_single_call", "not_mapped", "not_put"]

_STREAM = "`pool.map(fn, items)` gives a list; `sky.gather(*calls, stream=True) >> pool` gives results one by one."
_ELSEWHERE = {
    "gather": "`sky.gather(*calls) >> pool`.",
    "apply": "`pool.run(fn(x))`, or `fn(x) >> pool`.",
    "apply_async": "`pool.submit(fn(x))`, or `fn(x) > pool`.",
    "starmap": "`sky.gather(*(fn(*args) for args in items)) >> pool`.",
    **dict.fromkeys(("imap", "imap_unordered", "as_completed"), _STREAM),
    **dict.fromkeys(("shutdown", "stop", "terminate", "down"), "`pool.close()`, or leave the with-block."),
    **dict.fromkeys(("start", "launch", "up", "connect"), "`pool.open()`, or `with sky.ComputePool(...) as pool:`."),
    **dict.fromkeys(("size", "num_nodes", "n_nodes"), "`pool.nodes`, `pool.slots` or `pool.world_size`."),
    **dict.fromkeys(
        ("log", "logs"), "what bodies print is shown while they run; `pool.on_event(...)` hears each line."
    ),
    "result": "`(fn(x) > pool).result()`: a dot binds tighter than the operator.",
    "get": "`future.result()`; `fn(x) > pool` gives a future.",
    "wait": "`concurrent.futures.wait(futures)`, or `future.result()` for one.",
    "cost": "`pool.receipt` once it is closed, `pool.plan()` before it is opened.",
}


class Mistakes:
    """Such as `plain(1) >> pool`, `pool < call`, `pool.gather()`."""

    if not TYPE_CHECKING:  # type checkers say by themselves that there is no such thing

        def __rrshift__(self, other: object) -> NoReturn:
            raise _not_a_call(other, ">>")

        def __rmatmul__(self, other: object) -> NoReturn:
            raise _not_a_call(other, "@")

        def __lt__(self, other: object) -> NoReturn:
            if isinstance(other, PendingCompute | PendingComputeGroup):
                raise _turned_around(other, ">")
            raise _not_a_call(other, ">")

        def __rshift__(self, other: object) -> NoReturn:
            raise _turned_around(other, ">>")

        def __matmul__(self, other: object) -> NoReturn:
            raise _turned_around(other, "@")

        def __add__(self, other: object) -> NoReturn:
            raise TypeError("put the call in parentheses, `(fn(x) >> pool) + 1`: arithmetic binds tighter than `>>`.")

        __sub__ = __mul__ = __truediv__ = __floordiv__ = __mod__ = __pow__ = __add__

        def __call__(self, *args: object, **options: object) -> NoReturn:
            raise TypeError("a pool is not called: `fn(x) >> pool`, or `pool.run(fn(x))`, sends a call to it.")

        def __getattr__(self, name: str) -> NoReturn:
            hint = f": {_ELSEWHERE[name]}" if name in _ELSEWHERE else ""
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}")


def called_like_an_executor(fn: object, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> TypeError:
    if isinstance(fn, Compute):
        wanted = described(name_of(fn.fn), args, kwargs)
        return TypeError(f"a pool runs calls: `pool.{method}({wanted})`, with the arguments in its own brackets.")
    if isinstance(fn, PendingCompute):
        return TypeError(f"pool.{method}() takes one call. Several are sent together: `sky.gather(a(), b()) >> pool`.")
    name = name_of(fn) if callable(fn) else brief(fn)
    return TypeError(
        f"pool.{method}() takes one call of an @sky.compute function, such as `pool.{method}(train(x))`. For plain "
        f"functions there is `pool.executor`: `pool.executor.submit({name}, ...)`."
    )


def not_a_single_call(value: object) -> TypeError:
    if isinstance(value, PendingComputeGroup):
        return TypeError("that is a group of calls: send it with `group >> pool`, or `pool.run_parallel(group)`.")
    if isinstance(value, Compute):
        name = name_of(value.fn)
        return TypeError(f"{name} has not been called: add parentheses, `{name}(...)`, before it is sent.")
    return TypeError(f"a pool runs calls, such as `train(x)` of an @sky.compute function, not {brief(value)}.")


def not_put(value: object) -> TypeError:
    call = described(value.name, value.args, value.kwargs) if isinstance(value, PendingCompute) else "call"
    return TypeError(
        "pool.put() keeps objects; a call that was not sent has no result yet. To run it and leave its result on its "
        f"node: `{call}.keep() >> pool`."
    )


def not_mapped(fn: object, items: object, more: tuple[object, ...]) -> Exception | None:
    if isinstance(fn, PendingCompute):
        return TypeError(f"pool.map() calls the function itself: `pool.map({fn.name}, items)`, without parentheses.")
    if not callable(fn):
        turned = "; the function comes first" if callable(items) else ""
        return InvalidArgument(f"pool.map() takes a function and a list of items, `pool.map(fn, items)`{turned}.")
    if more:
        each = f"{name_of(fn)}(a, b) for a, b in zip(...)"
        return TypeError(f"pool.map() takes one list of items. For several: `sky.gather(*({each})) >> pool`.")
    if not isinstance(items, Iterable):
        return TypeError(f"pool.map({name_of(fn)}, {brief(items)}): pass the items as a list, or another iterable.")
    return None


def for_awaiting(results: list[Any]) -> list[Any]:
    """In an event loop, a list that answers `await pool.map(...)`."""
    asyncio: Any = sys.modules.get("asyncio")
    return _Mapped(results) if asyncio is not None and asyncio._get_running_loop() is not None else results


class _Mapped(list[Any]):
    def __await__(self) -> NoReturn:
        raise TypeError(
            "pool.map() blocks the event loop until it is done, and returns a list. In "
            "async code: `await asyncio.to_thread(pool.map, fn, items)`, or "
            "`await (sky.gather(*map(fn, items)) > pool)`."
        )

    def __reduce__(self) -> Any:
        return list, (list(self),)


def _turned_around(other: object, operator: str) -> TypeError:
    if isinstance(other, PendingCompute | PendingComputeGroup):
        return TypeError(f"the call goes on the left, the pool on the right: `call {operator} pool`.")
    return TypeError(f"`pool {operator} {brief(other)}`: a pool is what calls are sent to, `call {operator} pool`.")


def _not_a_call(value: object, operator: str) -> TypeError:
    if isinstance(value, list | tuple):
        if operator == "@":
            return TypeError("`[...] @ pool`: each call is broadcast by itself, `[call @ pool for call in calls]`.")
        return TypeError(
            f"`[...] {operator} pool`: calls in a list are sent as a group, `sky.gather(*calls) {operator} pool`."
        )
    if callable(value) and not isinstance(value, type):
        name = name_of(value)
        return TypeError(
            f"`{name} {operator} pool`: send a call, not a function. Decorate it with @sky.compute, then call "
            f"it: `{name}(...) {operator} pool`."
        )
    kind = type(value).__name__
    article = "an" if kind[0] in "aeiouAEIOU" else "a"
    return TypeError(
        f"`{brief(value)} {operator} pool`: that is {article} {kind}, not a call. Was it returned by a plain function? "
        "Only calls of functions decorated with @sky.compute are sent."
    )
