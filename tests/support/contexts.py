"""A pool's context for tests that decide and open nothing."""

from __future__ import annotations

from typing import Any

from skyward.api.context import PoolContext
from skyward.api.image import Image
from skyward.api.spec import Spec, Worker
from skyward.providers.local import Local

__all__ = ["pool_context"]


def pool_context(**given: Any) -> PoolContext:
    """A local pool of one node whose events nobody hears; what is given replaces it."""
    known: dict[str, Any] = {
        "name": "pool",
        "provider": Local(),
        "spec": Spec(),
        "nodes": 1,
        "image": Image(),
        "plugins": (),
        "worker": Worker(),
        "provision_timeout": 60.0,
        "replace": None,
        "grace": 1.0,
        "max_result": 1 << 20,
        "stall_timeout": None,
        "emit": lambda event: None,
        "listening": lambda: False,
        "hurried": lambda: False,
    }
    return PoolContext(**(known | given))
