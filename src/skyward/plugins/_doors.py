"""The way to a framework on a node, for plugins and decorators alike."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from skyward.runtime import instance_info

__all__ = ["framework"]


def framework(module: str, plugin: str) -> Any:
    """The module of a framework on this node; where it is missing, the error says what to add."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        name = module.partition(".")[0]
        if (error.name or "").partition(".")[0] != name:
            raise
        info = instance_info()
        raise ModuleNotFoundError(
            f"there is no {name} {'here' if info is None else f'on node {info.node}'}, which sky.integrations.{plugin} "
            f"needs; nothing in the pool's image asks for it. Add plugins=[sky.plugins.{plugin}()] to the pool, or "
            f'image=sky.Image(pip=["{name}"]).',
            name=name,
        ) from None
