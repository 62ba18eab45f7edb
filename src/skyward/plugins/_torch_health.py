"""The plugin's torch group between calls: formed again on all nodes once it is broken, and its errors explained.

A rank whose collective failed, whose body raised, or whose body destroyed the group, says so in the group's store. All
ranks look there before a broadcast begins, so all of them form the group again, or none does.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

from skyward.api import progress
from skyward.api.info import InstanceInfo, current_broadcast
from skyward.node.turns import await_turn
from skyward.plugins._ranks import explain_lost_peer
from skyward.plugins._torch_init import OwnGroups, await_ranks, end_group

__all__ = ["PoolGroup", "entered", "explain"]

_PEER_GONE = re.compile(
    r"connection (closed|reset|refused)|broken pipe|remote process exited|socket (closed|error)", re.I
)


class PoolGroup:
    """The process group that all calls of this process share."""

    def __init__(self, dist: Any, info: InstanceInfo, backend: str, timeout: float) -> None:
        self._dist, self._info, self._backend, self._timeout = dist, info, backend, timeout
        self._store = dist.distributed_c10d._get_default_store()  # held here, it outlives the group
        self._group = dist.group.WORLD
        self._generation = 0
        self._own = OwnGroups(dist, info, self._store, timeout)
        self._own.begin(self._group, self._key("own"))
        self.offered = self._own.offered
        self._users = 0
        self._changed = threading.Condition()
        progress.count_by(partial(entered, dist))

    @contextmanager
    def around_call(self) -> Generator[None]:
        """A call that finds the group whole, if it is on all nodes, and reports the group if it leaves it broken."""
        await_turn()
        broadcast = current_broadcast() is not None
        with self._changed:
            if broadcast and self._is_broken():
                self._changed.wait_for(lambda: not self._users)
                if self._is_broken():
                    self._form_again()
            self._users += 1
        broken = broadcast  # whatever leaves a broadcast early leaves its collectives out of step
        try:
            yield
            broken = False
        except Exception as exc:  # the user's, or torch's; it goes on its way with a note
            if isinstance(exc, RuntimeError):
                broken = explain(exc, self._info, self._timeout, "sky.plugins.torch") or broken
            raise
        finally:
            with self._changed:
                self._users -= 1
                self._changed.notify_all()
                if broken or self._dist.group.WORLD is not self._group:
                    self._store.add(self._key("broken"), 1)

    def _is_broken(self) -> bool:
        return self._store.check([self._key("broken")])

    def _form_again(self) -> None:
        end_group(self._dist, failed=True)  # first: a rank that still waits in it is let go
        await_ranks(self._store, self._key("again"), self._info, self._timeout, "form the torch group again")
        store = self._dist.PrefixStore(self._key("group"), self._store)
        limit, size = timedelta(seconds=self._timeout), self._info.world_size
        self._dist.init_process_group(self._backend, store=store, rank=self._info.rank, world_size=size, timeout=limit)
        self._group = self._dist.group.WORLD
        self._generation += 1
        self._own.begin(self._group, self._key("own"))

    def _key(self, name: str) -> str:
        return f"skyward/{self._generation}/{name}"


def entered(dist: Any) -> int:
    """How many collectives this process has entered in its group; torch counts them for itself."""
    return dist.group.WORLD._get_sequence_number_for_group()


def explain(exc: RuntimeError, info: InstanceInfo, timeout: float, option: str) -> bool:
    """Says what an error of a collective means, and whether it is one.

    An error that only echoes another node's failure waits a little, so that the other's is heard first.
    """
    if _PEER_GONE.search(str(exc)):
        explain_lost_peer(exc, info, "its torch group")
        return True
    if "duplicate gpu" in str(exc).lower():
        exc.add_note(
            f"NCCL needs a GPU for each rank, but {info.gpu_conflict or 'two ranks use the same one'}. Leave "
            'backend="nccl" out, or write backend="gloo": then ranks can share a GPU.'
        )
        return True
    if "timed out" in str(exc).lower():
        exc.add_note(
            f"The torch group's limit is timeout={timeout:g} s: a node did not enter this collective in that time. "
            "All nodes must enter the same collectives in the same order, and make equally many steps; if one is only "
            f"slow, raise {option}(timeout=...)."
        )
        return True
    return False
