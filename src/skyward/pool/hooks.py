"""What plugins do on the client, in list order; a hook that raises is named with its plugin."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from skyward.api.image import Image
from skyward.api.plugin import Cluster, Plugin
from skyward.errors import PluginError

__all__ = ["commands", "enter", "register_joblib", "transformed"]


def transformed(plugins: Sequence[Plugin], image: Image, cluster: Cluster) -> Image:
    """The image as plugins want it, each fed the previous one's."""
    for plugin in plugins:
        if plugin.transform is not None:
            try:
                image = plugin.transform(image, cluster)
            except Exception as exc:
                raise PluginError(plugin.name, "transform", repr(exc)) from exc
            if not isinstance(image, Image):  # pyright: ignore[reportUnnecessaryIsInstance] - plugins may be untyped
                raise PluginError(plugin.name, "transform", f"it gave {image!r}, not a sky.Image")
    return image


def commands(plugins: Sequence[Plugin], cluster: Cluster) -> dict[str, Sequence[str]]:
    """The shell lines that plugins want run on each machine."""
    found: dict[str, Sequence[str]] = {}
    for plugin in plugins:
        if plugin.bootstrap is not None:
            try:
                lines = plugin.bootstrap(cluster)
            except Exception as exc:
                raise PluginError(plugin.name, "bootstrap", repr(exc)) from exc
            if isinstance(lines, str) or not all(isinstance(line, str) for line in lines):
                raise PluginError(plugin.name, "bootstrap", f"it gave {lines!r}, not a list of shell lines")
            found[plugin.name] = lines
    return found


def enter(plugins: Sequence[Plugin], pool: Any, cluster: Cluster, stack: ExitStack) -> None:
    """Enters the contexts that plugins want around the open pool."""
    for plugin in plugins:
        if plugin.around_client is not None:
            try:
                stack.enter_context(plugin.around_client(pool, cluster))
            except Exception as exc:
                raise PluginError(plugin.name, "around_client", repr(exc)) from exc


def register_joblib() -> None:
    """Has joblib.parallel_config("skyward") find the open pool by that name, if joblib is in use."""
    if "joblib" in sys.modules:
        from skyward.plugins._joblib import register

        register()
