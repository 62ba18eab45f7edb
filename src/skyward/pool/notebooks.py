"""Pools in notebooks: shown as HTML, and closed when their name is bound to something else.

A notebook keeps what its cells have displayed, so a pool that was shown is never dropped. After each cell, pools that
nothing but this memory of the notebook refers to are closed.
"""

from __future__ import annotations

import gc
import sys
import weakref
from types import FrameType
from typing import TYPE_CHECKING, Any

from skyward.api.html import card

if TYPE_CHECKING:
    from skyward.pool.pool import ComputePool

__all__ = ["pool_as_html", "watch"]

_watched: weakref.WeakSet[Any] = weakref.WeakSet()
_shells: list[Any] = []


def pool_as_html(pool: ComputePool) -> str:
    """What a notebook shows of a pool."""
    rows: dict[str, object] = {
        "state": "open" if pool.is_active else "not open",
        "nodes": f"{pool.current_nodes()} of {pool.nodes} take calls" if pool.is_active else pool.nodes,
        "from": pool.provider.name,
        "slots": pool.slots,
    }
    if pool.spec.accelerator is not None:
        rows["accelerator"] = pool.spec.accelerator.name
    if pool.plugins:
        rows["plugins"] = ", ".join(plugin.name for plugin in pool.plugins)
    if pool.receipt is not None:
        rows["receipt"] = pool.receipt
    return card(f"ComputePool {pool.name}", rows)


def watch(pool: ComputePool) -> None:
    """Has a pool of a notebook closed when no name is bound to it any more; does nothing elsewhere."""
    shell = _shell()
    if shell is None:
        return
    _watched.add(pool)
    if shell not in _shells:
        _shells.append(shell)
        shell.events.register("post_run_cell", _close_forgotten)


def _close_forgotten(*_: object) -> None:
    for reference in [weakref.ref(pool) for pool in _watched if pool.is_active]:
        if not _is_used(reference) and (pool := reference()) is not None:
            print(f"{pool.name}: no name refers to this pool any more; it is closed.", file=sys.stderr)
            pool.close()


def _is_used(reference: weakref.ref[Any]) -> bool:
    """Whether something refers to a pool, beside what the notebook remembers of its output."""
    shell = _shell()
    names: dict[str, Any] = shell.user_ns
    if any(value is reference() for name, value in list(names.items()) if not name.startswith("_")):
        return True
    objects = [shell.displayhook, getattr(shell, "last_execution_result", None)]
    attributes = [getattr(each, "__dict__", None) for each in objects]  # of Python before 3.13
    memory = set(map(id, [names, names.get("_oh"), shell.user_ns_hidden, *objects, *attributes]))
    holders = gc.get_referrers(reference())
    return any(id(holder) not in memory and not isinstance(holder, FrameType) for holder in holders)


def _shell() -> Any:
    """The notebook or IPython that this program runs in, or None."""
    module = sys.modules.get("IPython")
    return module.get_ipython() if module is not None else None
