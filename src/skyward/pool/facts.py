"""What is known of a pool: its size, its nodes at this moment, where bodies stand; and dask on its nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from skyward.api.keywords import corrects_call
from skyward.api.spec import Spec, Worker
from skyward.api.stacks import Stacks
from skyward.pool.state import PoolState

if TYPE_CHECKING:
    import weakref

    from skyward.client.engine import Engine
    from skyward.setup.bringup import PoolHosts

__all__ = ["Facts"]


class Facts:
    """The part of a pool that answers questions about it."""

    nodes: int
    spec: Spec
    worker: Worker
    _state: PoolState
    if TYPE_CHECKING:
        _engine: Engine
        _hosts: PoolHosts
        _dask_clients: weakref.WeakSet[Any]

    @property
    def concurrency(self) -> int:
        """How many calls each process runs at a time; a node has `processes_per_node` of them."""
        return self.worker.concurrency

    @property
    def world_size(self) -> int:
        """How many ranks the pool has: one for each process of each node. With "gpu" it is known once it is open."""
        engine, each = self.__dict__.get("_engine"), self.spec.processes_per_node
        return len(engine.ranks) if engine else self.nodes * (1 if each == "gpu" else each)

    @property
    def slots(self) -> int:
        """How many calls the pool runs at a time."""
        return self.world_size * self.worker.concurrency

    @property
    def is_active(self) -> bool:
        """Whether the pool takes calls."""
        return self._state.now == "open" and self._state.is_ours

    def current_nodes(self) -> int:
        """How many nodes take calls at this moment."""
        return len(self._engine.up()) if self.is_active else 0

    @corrects_call("pool.stacks", example="pool.stacks()")
    def stacks(self) -> Stacks:
        """Where every body of this pool stands, also inside C code or a collective; see `Stack`. Takes about 0.1 s."""
        self._state.check_open()
        return self._engine.stacks()

    def dask(self) -> Any:
        """A dask client of this pool's nodes; the first call starts dask there, in processes of its own.

        Needs distributed here (`pip install distributed`) and on other machines (`Image(pip=["distributed"])`).
        """
        self._state.check_open()
        client = self._hosts.dask.connect()
        self._dask_clients.add(client)
        client.wait_for_workers(len(self._hosts.by_node), timeout=60)
        return client
