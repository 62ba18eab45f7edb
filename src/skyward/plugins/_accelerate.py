"""Makes accelerate and the Trainer work in a process that runs many calls."""

from __future__ import annotations

import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ClassVar

from skyward.api.info import InstanceInfo, current_broadcast

__all__ = ["around_call", "variables"]

_LOOK = 1.0
_told = False
_lock = threading.Lock()
_calls = 0
_inside: ContextVar[bool] = ContextVar("skyward_accelerate", default=False)


def variables(torch: Any, info: InstanceInfo) -> dict[str, str]:
    """Without them, accelerate treats each rank of a CPU node as a separate program."""
    if info.gpu_conflict is not None:
        return {"ACCELERATE_USE_CPU": "true"}
    found = torch.cuda.is_available() or (hasattr(torch, "accelerator") and torch.accelerator.is_available())
    return {} if found else {"ACCELERATE_USE_CPU": "true"}


@contextmanager
def around_call(info: InstanceInfo) -> Generator[None]:
    global _calls
    if _inside.get():
        yield
        return
    with _lock:
        if not _calls:
            _forget()
        _calls += 1
    token = _inside.set(True)
    done = threading.Event()
    if not _told and info.world_size > 1 and current_broadcast() is not None:
        threading.Thread(target=_watch, args=(info, done), name="skyward-accelerate", daemon=True).start()
    else:
        done.set()
    try:
        yield
    finally:
        if not done.is_set():
            done.set()
            _look(info)
        _inside.reset(token)
        with _lock:
            _calls -= 1
            if not _calls:
                _forget()  # a call without a group may be next


class _Unheld:
    """Without instances: the number of references to its dictionary depends on the Python version."""

    shared_state: ClassVar[dict[str, Any]] = {}


def _forget() -> None:
    state = sys.modules.get("accelerate.state")
    if state is None:
        return
    # An object of these classes has the shared dictionary as its own, so it counts as a reference to it.
    kinds = state.PartialState, state.AcceleratorState
    held = any(sys.getrefcount(kind._shared_state) > sys.getrefcount(_Unheld.shared_state) for kind in kinds)
    dist: Any = sys.modules.get("torch.distributed")
    size = dist.get_world_size() if dist is not None and dist.is_initialized() else 1
    if not held or state.PartialState._shared_state.get("num_processes") != size:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()


def _watch(info: InstanceInfo, done: threading.Event) -> None:
    while not _told and not done.wait(_LOOK):
        _look(info)


def _look(info: InstanceInfo) -> None:
    global _told
    state = sys.modules.get("accelerate.state")
    found = getattr(state, "PartialState", None)
    if _told or found is None or found._shared_state.get("num_processes") != 1:
        return
    _told = True
    if info.is_head:
        print(_APART.format(size=info.world_size), file=sys.stderr, flush=True)


_APART = (
    "accelerate treats each of the {size} ranks of this broadcast as a separate program: each trains its own model. "
    "It needs a process group: add plugins=[sky.plugins.torch()] to the pool, or @sky.integrations.transformers below "
    "@sky.compute. Where there is one, on CPUs, write PartialState(cpu=True) instead of PartialState()."
)
