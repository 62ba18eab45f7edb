"""Decorators below `@sky.compute`: the body runs inside a context created on the node."""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ParamSpec, TypeVar, cast

from skyward.api.compute import Compute
from skyward.api.info import current_broadcast
from skyward.errors import InvalidArgument

__all__ = ["Enter", "around_each_call", "await_turn", "check_function", "decide_by", "inside", "requested"]


P = ParamSpec("P")
R = TypeVar("R")
Enter = Callable[[], AbstractContextManager[object]]


def inside(
    fn: Callable[P, R], enter: Enter, decorator: str, *, option: str = "", each_step: bool = False
) -> Callable[P, R]:
    """Runs the body in the context from `enter`. With `each_step`, a generator leaves it while suspended. `decorator`
    and `option` are for errors.
    """
    check_function(fn, decorator, option)
    return cast("Callable[P, R]", functools.wraps(fn)(_wrapper(fn, enter, each_step)))


_requested: list[Enter] = []


def around_each_call(enter: Enter) -> None:
    _requested.append(enter)


def requested() -> list[Callable[[Callable[..., Any]], Callable[..., Any]]]:
    found: list[Callable[[Callable[..., Any]], Callable[..., Any]]] = []
    while _requested:
        found.append(functools.partial(inside, enter=_requested.pop(0), decorator="a plugin"))
    return found


def check_function(fn: object, decorator: str, option: str = "") -> None:
    if not callable(fn):
        hint = f"({option}={fn!r})" if isinstance(fn, str) and option else ""
        where = f"{decorator}{hint}" if decorator.startswith("@") else "it"
        raise InvalidArgument(f"{decorator} got {fn!r}, not a function. Put {where} right above a def.")
    if isinstance(cast("Any", fn), Compute):
        raise InvalidArgument(
            f"{decorator} is above @sky.compute on {getattr(fn, '__name__', fn)}: there it would act on your "
            "computer, not on the nodes. Put it below @sky.compute."
        )


def _wrapper(body: Callable[..., Any], enter: Enter, each_step: bool) -> Callable[..., Any]:
    if inspect.isgeneratorfunction(body):

        def generate(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
            made, idle = enter(), nullcontext()
            whole, running = (idle, made) if each_step else (made, idle)
            with whole:
                generator = body(*args, **kwargs)
                step = functools.partial(generator.send, None)
                try:
                    while True:
                        with running:
                            try:
                                item = step()
                            except StopIteration as end:
                                return end.value
                        try:
                            step = functools.partial(generator.send, (yield item))
                        except GeneratorExit:
                            raise
                        except BaseException as error:  # thrown in here: the body's own generator handles it
                            step = functools.partial(generator.throw, error)
                finally:
                    with running:
                        generator.close()

        return generate

    if inspect.isasyncgenfunction(body):

        async def generate_async(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
            made, idle = enter(), nullcontext()
            whole, running = (idle, made) if each_step else (made, idle)
            with whole:
                generator = body(*args, **kwargs)
                step = functools.partial(generator.asend, None)
                try:
                    while True:
                        with running:
                            try:
                                item = await step()
                            except StopAsyncIteration:
                                return
                        try:
                            step = functools.partial(generator.asend, (yield item))
                        except GeneratorExit:
                            raise
                        except BaseException as error:  # as above
                            step = functools.partial(generator.athrow, error)
                finally:
                    with running:
                        await generator.aclose()

        return generate_async

    if inspect.iscoroutinefunction(body):

        async def run_async(*args: Any, **kwargs: Any) -> Any:
            with enter():
                return await body(*args, **kwargs)

        return run_async

    def run(*args: Any, **kwargs: Any) -> Any:
        with enter():
            return body(*args, **kwargs)

    return run


_STEP = 0.005

_is_turn: Callable[[str], bool] | None = None


def decide_by(is_turn: Callable[[str], bool]) -> None:
    global _is_turn
    _is_turn = is_turn


def await_turn() -> None:
    """Waits until earlier broadcasts have left this process: concurrent ones would mix their collectives differently on
    each node. In short steps, since a call can only be stopped between them.
    """
    broadcast = current_broadcast()
    while broadcast is not None and _is_turn is not None and not _is_turn(broadcast):
        time.sleep(_STEP)
