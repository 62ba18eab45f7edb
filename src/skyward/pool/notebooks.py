"""Pools in notebooks: shown as HTML, and closed when their name is bound to something else.

A notebook keeps what cells have displayed. So after each cell, pools that only this memory refers to are closed.
"""

from __future__ import annotations

import gc
import inspect
import sys
import threading
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

from skyward.api.html import card

if TYPE_CHECKING:
    from skyward.pool.pool import ComputePool

__all__ = ["pool_as_html", "watch"]

_watched: weakref.WeakSet[Any] = weakref.WeakSet()
_shells: list[Any] = []
_OF_FRAME_AND_HERE = 3  # references: the frame's, that of a variable, and that of the argument of `getrefcount`


def pool_as_html(pool: ComputePool) -> str:
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
    if pool.receipt is not None and not pool.receipt.is_empty:
        rows["receipt"] = pool.receipt
    return card(f"ComputePool {pool.name}", rows)


def watch(pool: ComputePool) -> None:
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
            print(f"{pool.name}: no name refers to this pool any longer, so it is closed.", file=sys.stderr)
            pool.close()


def _is_used(reference: weakref.ref[Any]) -> bool:
    shell = _shell()
    names: dict[str, Any] = shell.user_ns
    if any(value is reference() for name, value in list(names.items()) if not name.startswith("_")):
        return True
    objects = [shell.displayhook, getattr(shell, "last_execution_result", None)]
    attributes = [getattr(each, "__dict__", None) for each in objects]  # of Python before 3.13
    memory = set(map(id, [names, names.get("_oh"), shell.user_ns_hidden, *objects, *attributes]))
    holders = gc.get_referrers(reference())
    if any(id(holder) not in memory and not isinstance(holder, FrameType) for holder in holders):
        return True
    return any(_has(frame, reference) for frame in _frames_of_threads())


def _has(frame: FrameType, reference: weakref.ref[Any]) -> bool:
    values = frame.f_locals
    found = any(value is reference() for value in values.values())
    # Before Python 3.13 this is a copy, which the frame keeps, and with it what the function deletes. It is emptied,
    # unless the function has it too, as `locals()`, or a debugger is at work there.
    copied = isinstance(values, dict) and frame.f_code.co_flags & inspect.CO_OPTIMIZED
    if copied and frame.f_trace is None and sys.getrefcount(values) <= _OF_FRAME_AND_HERE:
        values.clear()
    return found


def _frames_of_threads() -> Iterator[FrameType]:
    """In other threads a pool is held for a moment only, or for its caller."""
    for thread, innermost in sys._current_frames().items():  # pyright: ignore[reportPrivateUsage] - documented
        frame = None if thread == threading.get_ident() else innermost
        while frame is not None:
            if not str(frame.f_globals.get("__name__")).startswith("skyward."):
                yield frame
            frame = frame.f_back


def _shell() -> Any:
    module = sys.modules.get("IPython")
    return module.get_ipython() if module is not None else None
