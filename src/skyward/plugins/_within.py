"""Decorators whose work lasts as long as the body: a context that is made on the node, around each call."""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AbstractContextManager, aclosing
from importlib import import_module
from typing import Any, ParamSpec, TypeVar, cast

from skyward.api.compute import Compute
from skyward.api.info import instance_info
from skyward.errors import InvalidArgument

__all__ = ["check_function", "framework", "within"]

P = ParamSpec("P")
R = TypeVar("R")
Enter = Callable[[], AbstractContextManager[object]]


def within(fn: Callable[P, R], enter: Enter, name: str) -> Callable[P, R]:
    """`fn` with its body run inside a context that is made on the node; a generator keeps it until it ends."""
    check_function(fn, name)
    return cast("Callable[P, R]", functools.wraps(fn)(_wrapper(fn, enter)))


def check_function(fn: object, name: str) -> None:
    """Refuses what cannot be decorated."""
    if not callable(fn):
        hint = f"(backend={fn!r})" if isinstance(fn, str) and name != "jax" else ""
        raise InvalidArgument(
            f"@sky.integrations.{name} got {fn!r}, not a function. "
            f"Put @sky.integrations.{name}{hint} right above a def."
        )
    if isinstance(cast("Any", fn), Compute):
        raise InvalidArgument(
            f"@sky.integrations.{name} stands above @sky.compute on {getattr(fn, '__name__', fn)}: there it would act "
            "on your computer, not on the nodes. Put it below @sky.compute."
        )


def framework(module: str, plugin: str) -> Any:
    """A module of a framework; where a node has none, the error says what to add to the pool."""
    try:
        return import_module(module)
    except ModuleNotFoundError as exc:
        package = module.partition(".")[0]
        if (exc.name or "").partition(".")[0] != package:
            raise
        info = instance_info()
        where = "this computer has" if info is None else f"node {info.node} has"
        raise ModuleNotFoundError(
            f"{where} no {package}, which sky.integrations.{plugin} needs; nothing in the pool's image asks for it. "
            f'Add plugins=[sky.plugins.{plugin}()] to the pool, or image=sky.Image(pip=["{package}"]).',
            name=package,
        ) from None


def _wrapper(body: Callable[..., Any], enter: Enter) -> Callable[..., Any]:
    if inspect.isgeneratorfunction(body):

        def generate(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
            with enter():
                return (yield from cast("Generator[Any, Any, Any]", body(*args, **kwargs)))

        return generate

    if inspect.isasyncgenfunction(body):

        async def generate_async(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
            with enter():
                async with aclosing(body(*args, **kwargs)) as items:
                    async for item in items:
                        yield item

        return generate_async

    if inspect.iscoroutinefunction(body):

        async def wait(*args: Any, **kwargs: Any) -> Any:
            with enter():
                return await body(*args, **kwargs)

        return wait

    def call(*args: Any, **kwargs: Any) -> Any:
        with enter():
            return body(*args, **kwargs)

    return call
