"""Providers and plugins by name, also those of other packages: entry points `skyward.providers`, `skyward.plugins`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = ["Group", "found"]

Group = Literal["providers", "plugins"]


def found(group: Group) -> dict[str, EntryPoint]:
    """By name; `.load()` imports it. Our own come first, and nobody replaces them."""
    from importlib.metadata import EntryPoint, entry_points  # `import skyward` does not need it

    others = {point.name: point for point in entry_points(group=f"skyward.{group}")}
    # a checkout that is on the path without being installed has no entry points
    names: list[str] = import_module(f"skyward.{group}").__all__
    own = {name: EntryPoint(name, f"skyward.{group}:{name}", f"skyward.{group}") for name in names}
    return {**own, **{name: point for name, point in others.items() if name not in own}}
