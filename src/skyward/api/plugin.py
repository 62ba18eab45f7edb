"""What a plugin is: a frozen record of optional hooks, each called at its own moment.

transform(image, cluster) -> image     on the client, before machines are set up; pure
bootstrap(cluster) -> commands         shell lines run on each node after the standard steps
around_client(pool, cluster)           a context manager around the open pool, on the client
around_app(info)                       a context manager around each runner's life, on the nodes
decorate(fn) -> fn                     around every function, on the nodes; the first plugin is outermost
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Never, TypeVar, cast

from skyward.api.image import Image
from skyward.api.info import InstanceInfo
from skyward.api.spec import Spec, Worker
from skyward.api.usage_errors import corrects_call
from skyward.errors import InvalidArgument

__all__ = ["Cluster", "Plugin", "makes_plugin"]

F = TypeVar("F", bound=Callable[..., "Plugin"])

_DECORATORS = {"torch": "torch", "jax": "jax", "keras": "keras", "huggingface": "transformers"}

Transform = Callable[[Image, "Cluster"], Image]
Bootstrap = Callable[["Cluster"], Sequence[str]]
Decorate = Callable[[Callable[..., Any]], Callable[..., Any]]
AroundApp = Callable[[InstanceInfo], AbstractContextManager[Any]]
AroundClient = Callable[[Any, "Cluster"], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Cluster:
    """What a plugin may know about its pool.

    Args:
        pool: its name.
        nodes: how many nodes it has.
        worker: how its processes run calls.
        spec: which machines it has.
    """

    pool: str
    nodes: int
    worker: Worker
    spec: Spec


@dataclass(frozen=True)
class Plugin:
    """A named set of hooks; see docs/guides/write-a-plugin.md.

    Args:
        name: what messages call it.
        transform: `(image, cluster) -> image`, on the client, before machines are set up. Default: none.
        bootstrap: `(cluster) -> commands`, shell lines for each node after the standard steps. Default: none.
        decorate: `(fn) -> fn`, around every function, on the nodes. Default: none.
        around_app: `(info) -> context manager`, around the life of each process, on the nodes. Default: none.
        around_client: `(pool, cluster) -> context manager`, around the open pool, on the client. Default: none.
    """

    name: str
    transform: Transform | None = None
    bootstrap: Bootstrap | None = None
    decorate: Decorate | None = None
    around_app: AroundApp | None = None
    around_client: AroundClient | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise InvalidArgument(f"a plugin needs a name, not {self.name!r}.")
        for hook in ("transform", "bootstrap", "decorate", "around_app", "around_client"):
            if getattr(self, hook) is not None and not callable(getattr(self, hook)):
                raise InvalidArgument(f"plugin '{self.name}': {hook} must be a function, not {getattr(self, hook)!r}.")

    def __call__(self, *args: Never) -> Never:
        raise _no_decorator(self.name)

    @staticmethod
    def create(name: str) -> Plugin:
        """A plugin of this `name` without hooks, to be built up with the methods below."""
        return Plugin(name)

    def with_image_transform(self, transform: Transform) -> Plugin:
        """This plugin with the hook `transform`, which changes the image."""
        return replace(self, transform=transform)

    def with_bootstrap(self, bootstrap: Bootstrap) -> Plugin:
        """This plugin with the hook `bootstrap`: shell lines for each node."""
        return replace(self, bootstrap=bootstrap)

    def with_decorator(self, decorate: Decorate) -> Plugin:
        """This plugin with the hook `decorate`: around every function."""
        return replace(self, decorate=decorate)

    def with_around_app(self, around_app: AroundApp) -> Plugin:
        """This plugin with the hook `around_app`: around the life of each process of a node."""
        return replace(self, around_app=around_app)

    def with_around_client(self, around_client: AroundClient) -> Plugin:
        """This plugin with the hook `around_client`: around the open pool."""
        return replace(self, around_client=around_client)


def makes_plugin(name: str, hints: Mapping[str, str] = {}, example: str = "") -> Callable[[F], F]:
    """For the functions of `sky.plugins`: corrects wrong options, and use as a decorator."""

    def wrap(plain: F) -> F:
        corrected = corrects_call(f"sky.plugins.{name}", hints, example)(plain)

        @functools.wraps(corrected)
        def make(*args: Any, **options: Any) -> Plugin:
            if args and callable(args[0]):
                raise _no_decorator(name)
            return corrected(*args, **options)

        return cast(F, make)

    return wrap


def _no_decorator(name: str) -> TypeError:
    of_functions = _DECORATORS.get(name)
    instead = f" For one function write @sky.integrations.{of_functions} above its def." if of_functions else ""
    return TypeError(f"the plugin {name!r} is for a pool, sky.ComputePool(plugins=[...]), not for a function.{instead}")
