"""Runs a function on several items as one call: `pool.map`. Runners load it, so it needs little."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any

from skyward.api.brief import brief
from skyward.api.compute import name_of
from skyward.transport import exceptions
from skyward.transport.codec import Described

__all__ = ["EachItem", "FailedItem", "not_for_generators"]

_LONGEST = 8 << 10  # of the traceback that listeners and histories get of a chunk's first failure
_COROUTINE: Any = CoroutineType
_GENERATORS: tuple[Any, ...] = (GeneratorType, AsyncGeneratorType)

Found = tuple[float, tuple[int, str] | None, list[Any]]
"""Seconds, how many items failed and the first of these, results."""


class EachItem:
    """A function of one map: packed once. With `keep`, failed items do not stop the others."""

    def __init__(self, fn: Callable[[Any], Any], keep: bool = False) -> None:
        self.fn, self.keep = fn, keep
        self.__name__ = self.__qualname__ = name_of(fn)  # for decorators

    def __reduce__(self) -> Any:
        return EachItem, (self.fn, self.keep)

    def __call__(self, items: Sequence[Any], start: int) -> Found:
        fn, results = self.fn, list[Any]()
        failed, first = 0, ""
        began = time.perf_counter()
        for item in items:
            try:
                result: Any = fn(item)
                if type(result) is _COROUTINE:
                    import asyncio  # takes longer than all the rest of a runner

                    result = asyncio.run(result)
                elif type(result) in _GENERATORS:
                    raise not_for_generators(fn)
            except Exception as exc:
                named = f"item {start + len(results)}: {name_of(fn)}({brief(item)})"
                exceptions.noted(exc, named)
                from skyward.node import gpu_failures  # not on the client

                gpu_failures.mark(exc)
                if not self.keep:
                    exceptions.set_partial(exc, dict(enumerate(results, start)))
                    raise
                result = FailedItem(*exceptions.capture(exc))
                failed += 1
                first = first or f"{named}\n\n{result.described['traceback'][-_LONGEST:]}"
            results.append(result)
        return time.perf_counter() - began, (failed, first) if failed else None, results


@dataclass(frozen=True)
class FailedItem:
    described: Described
    data: bytes

    def error(self) -> BaseException:
        return exceptions.packed(self.described, self.data, "raised on a node").rebuilt()


def not_for_generators(fn: Callable[..., Any]) -> TypeError:
    name = name_of(fn)
    return TypeError(
        f"pool.map({name}, ...): {name} is a generator function, and each result of a map is sent as a whole. Have it "
        f"return a list; or send calls, whose results are streams: `[{name}(item) > pool for item in items]`."
    )
