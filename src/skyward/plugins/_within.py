"""What the plugins of frameworks share: the module on a node, and decorators that work around each call."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, ParamSpec, TypeVar

from skyward.api.info import instance_info
from skyward.node import decorators
from skyward.node.decorators import Enter, inside

__all__ = ["check_function", "framework", "unpickled_first", "within"]

P = ParamSpec("P")
R = TypeVar("R")


def within(fn: Callable[P, R], enter: Enter, name: str) -> Callable[P, R]:
    """`fn` with its body run inside a context that is made on the node; a generator keeps it until it ends."""
    return inside(fn, enter, f"@sky.integrations.{name}", option=_option(name))


def unpickled_first(fn: Callable[P, R], name: str, value: object) -> Callable[P, R]:
    """`fn` with an attribute that is unpickled on the node before the globals of the body, e.g. modules, are."""
    # cloudpickle restores a function's attributes before its globals and its closure, in their order; what wraps it
    # further takes them over in the same order.
    attributes = vars(fn).copy()
    vars(fn).clear()
    vars(fn).update({name: value} | attributes)
    return fn


def check_function(fn: object, name: str) -> None:
    """Refuses what cannot be decorated."""
    decorators.check_function(fn, f"@sky.integrations.{name}", _option(name))


def _option(name: str) -> str:
    """What a text that is given instead of a function is probably meant to be."""
    return "" if name == "jax" else "backend"


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
