"""What framework plugins know of a rank: its name in messages, its GPUs, its group."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, ParamSpec, TypeVar

from skyward.api.info import InstanceInfo, current_broadcast, current_call, pool_info, require_peers, stall_timeout
from skyward.errors import InvalidArgument, SharedLost, SharedTimeout, SkywardError
from skyward.node import decorators
from skyward.node.decorators import Enter, inside
from skyward.node.gpu_shares import CUDA, HIP, own_gpus
from skyward.node.shared.names import current_channel

__all__ = [
    "Rendezvous",
    "called",
    "check_function",
    "everyone",
    "explain_lost_peer",
    "framework",
    "gpu_by_local_rank",
    "gpu_positions",
    "on_one_machine",
    "say",
    "show_node_gpus",
    "this_rank",
    "unpickled_first",
    "within",
]


_HOLD_BACK = 2.0


def called(info: InstanceInfo, ranks: Iterable[int]) -> str:
    numbers = [str(rank) for rank in ranks]
    if _one_each(info):
        names, kind = numbers, "node"
    else:
        names, kind = [f"{rank} (on node {info.node_of(int(rank))})" for rank in numbers], "rank"
    return f"{kind} {names[0]}" if len(names) == 1 else f"{kind}s {', '.join(names[:-1])} and {names[-1]}"


def this_rank(info: InstanceInfo) -> str:
    return called(info, [info.rank])


def explain_lost_peer(error: Exception, info: InstanceInfo, group: str) -> None:
    """Delays an error that only echoes another rank's failure, so that the cause is reported first."""
    time.sleep(_HOLD_BACK)  # the pool stops this call when it hears of the other
    error.add_note(
        f"{this_rank(info).capitalize()} lost its connection to another one of {group}: that one left the "
        "function, raised, or was killed before this one was done. Look at the others' output."
    )


def on_one_machine(info: InstanceInfo) -> bool:
    return all(peer.private_ip == info.head_addr for peer in info.peers)


def everyone(info: InstanceInfo) -> str:
    return f"all {info.world_size} {'nodes' if _one_each(info) else 'ranks'}"


def say(info: InstanceInfo, text: str) -> None:
    if info.is_head and text not in _said:
        _said.add(text)
        print(text, file=sys.stderr, flush=True)


def show_node_gpus(info: InstanceInfo) -> None:
    """Makes all GPUs of the node visible, as torchrun does. CUDA reads the variable once, on first use."""
    if info.local_world_size > 1 and _has_own_card(info):
        os.environ[_variable()] = ",".join(info.node_gpus)


def gpu_by_local_rank(info: InstanceInfo) -> int | None:
    positions = gpu_positions(info)
    if not positions:
        return None
    shows_all = _shown(info) == list(info.node_gpus)
    return info.local_rank if shows_all and _has_own_card(info) else positions[0]


def gpu_positions(info: InstanceInfo) -> list[int]:
    if not info.node_gpus:
        return list(range(info.accelerators))
    own = own_gpus(info.node_gpus, info.local_world_size)[info.local_rank]
    seen = _shown(info)
    return [seen.index(gpu) for gpu in own if gpu in seen] or list(range(len(own)))


def _one_each(info: InstanceInfo) -> bool:
    return info.world_size == info.total_nodes


def _shown(info: InstanceInfo) -> list[str]:
    value = os.environ.get(_variable())
    return list(info.node_gpus) if value is None else [entry.strip() for entry in value.split(",")]


def _variable() -> str:
    return HIP if HIP in os.environ else CUDA


def _has_own_card(info: InstanceInfo) -> bool:
    slices = any(gpu.startswith("MIG-") for gpu in info.node_gpus)
    return len(info.node_gpus) >= info.local_world_size and not slices


_said: set[str] = set()


# The ranks of a pool find each other before a framework forms its group.
#
#     rank 0 .. n-1  --- here I am, over the pool's own links --->  the agent of node 0, which waits for all
#     rank 0 .. n-1  <-- what rank 0 has brought ----------------   the agent of node 0
#
# It is a shared collection (`node/shared/state.py: Meeting`), so nothing listens for it, and only ranks of the pool
# can come. Each broadcast has a meeting of its own, so groups never mix. A framework that waits for a missing node
# cannot be stopped, or ends its process; so all waiting is done here.


log = logging.getLogger("skyward")

_NOTICE = 10.0
_NOTICE_ALONE = 0.5
_AGAIN = 0.1
_ADVICE = (
    "A group needs the call on every node: send it with `call() @ pool`; `>>` sends it to one. "
    "If it was, find out what keeps the others from starting it, such as a firewall before node 0."
)


@dataclass(frozen=True)
class Rendezvous:
    """`port` was chosen when the runners were created: an earlier setup's runners meet elsewhere."""

    group: str
    info: InstanceInfo
    port: int
    seconds: float
    option: str = ""

    def meet(self, value: Any = None) -> Any:
        """Waits for all ranks; returns rank 0's `value` (JSON)."""
        require_peers(self.info)
        if self.info.world_size < 2:
            return value
        if _is_alone() and (limit := stall_timeout()) is not None and limit < self.seconds:
            return replace(self, seconds=limit, option="stall_timeout")._meet(value)
        return self._meet(value)

    def _meet(self, value: Any) -> Any:
        began, notice = time.monotonic(), _NOTICE_ALONE if _is_alone() else _NOTICE
        while True:
            left = began + min(notice, self.seconds) - time.monotonic()
            try:
                return self._join(value, max(0.0, left))
            except SharedTimeout as exc:
                missing: list[int] = [0] if isinstance(exc.args[0], str) else exc.args[0]  # 0 has not answered at all
            except SharedLost:  # node 0 cannot be reached, or was restarted
                missing = [0]
                time.sleep(_AGAIN)
            except InvalidArgument as exc:
                raise self._taken(str(exc)) from exc
            waited = time.monotonic() - began
            if waited >= self.seconds and missing:
                raise self._failure(missing)
            if waited >= notice and missing:
                notice = float("inf")
                # as a record: handlers of the client get it, also if its console is silent
                log.warning("%s, at most %g s. %s", self._waiting(missing), self.seconds, _ADVICE)

    def port_taken(self, reason: str) -> SkywardError:
        return self._taken(
            f"port {self.port} of node 0, chosen for {self.group} when the pool opened, is not free any more "
            f"({reason}): another program has taken it, or another runner of the node."
        )

    def _join(self, value: Any, timeout: float) -> Any:
        name = f"skyward/{self.group}/{self.port}/{current_broadcast() or ''}"
        return current_channel().ask("meeting", name, "join", [value], timeout=timeout)[0]

    def _waiting(self, missing: list[int]) -> str:
        return f"{this_rank(self.info)} waits for {called(self.info, missing)} to form {self.group}"

    def _failure(self, missing: list[int]) -> SkywardError:
        limit = f"{self.option}={self.seconds:g} s" if self.option else f"{self.seconds:g} s"
        return SkywardError(
            f"{self._waiting(missing)}. It needs {everyone(self.info)}, but {called(self.info, missing)} did not "
            f"arrive within {limit}. {_ADVICE}"
        )

    def _taken(self, reason: str) -> SkywardError:
        return SkywardError(
            f'{reason} A group has one process for each rank: if the pool has executor="process", open it without.'
        )


def _is_alone() -> bool:
    return current_call() is not None and current_broadcast() is None


P = ParamSpec("P")
R = TypeVar("R")


def within(fn: Callable[P, R], enter: Enter, name: str) -> Callable[P, R]:
    return inside(fn, enter, f"@sky.integrations.{name}", option=_option(name))


def unpickled_first(fn: Callable[P, R], name: str, value: object) -> Callable[P, R]:
    """Adds an attribute that is unpickled before the body's globals."""
    # cloudpickle restores a function's attributes before its globals and its closure, in their order; what wraps it
    # further takes them over in the same order.
    attributes = vars(fn).copy()
    vars(fn).clear()
    vars(fn).update({name: value} | attributes)
    return fn


def check_function(fn: object, name: str) -> None:
    decorators.check_function(fn, f"@sky.integrations.{name}", _option(name))


def _option(name: str) -> str:
    return "" if name == "jax" else "backend"


def framework(module: str, plugin: str) -> Any:
    try:
        return import_module(module)
    except ModuleNotFoundError as exc:
        package = module.partition(".")[0]
        if (exc.name or "").partition(".")[0] != package:
            raise
        info = pool_info()
        where = "this computer has" if info is None else f"node {info.node} has"
        raise ModuleNotFoundError(
            f"{where} no {package}, which sky.integrations.{plugin} needs; nothing in the pool's image asks for it. "
            f'Add plugins=[sky.plugins.{plugin}()] to the pool, or image=sky.Image(pip=["{package}"]).',
            name=package,
        ) from None
