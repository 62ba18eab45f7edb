"""dask on the nodes of a pool: started by the keepers on first use."""

from __future__ import annotations

import importlib.util
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from skyward.errors import BootstrapError, MissingPackage, SkywardError
from skyward.node.orders import ClientToKeeper
from skyward.setup.hosts import Host
from skyward.setup.network import Address
from skyward.transport.roles import CLIENT, node_role

if TYPE_CHECKING:  # as dask itself, when it is asked for
    from skyward.transport.certificates import Authority

__all__ = ["DaskCluster"]

_STARTING = 60.0


class DaskCluster:
    """A scheduler on node 0 and a worker per node, with their own certificate authority: tasks can read its keys."""

    def __init__(
        self, pool: str, ttl: float, hosts: Mapping[int, Host], addresses: Sequence[Address], blocked: str | None
    ) -> None:
        self._pool, self._ttl, self._hosts, self._addresses, self._blocked = pool, ttl, hosts, addresses, blocked
        self._authority: Authority | None = None
        self._lock = threading.Lock()

    def connect(self) -> Any:
        if self._blocked:
            raise SkywardError(
                f"the nodes of this pool cannot reach each other ({self._blocked}), so they form no dask cluster; "
                "calls with >> and @ work."
            )
        if importlib.util.find_spec("distributed") is None:
            raise MissingPackage(
                "pool.dask() needs the package distributed on this computer. Run: pip install distributed"
            )
        from skyward.node.dask_worker import connect
        from skyward.transport.certificates import Authority

        with self._lock:
            authority = self._authority = self._authority or Authority(f"{self._pool}-dask", self._ttl)
            scheduler = self._scheduler(authority)
            for node in self._hosts:
                self._start_worker(node, scheduler, authority)
        return connect(scheduler, authority.issue(CLIENT), self._hosts[0].keeper.shell.reach)

    def rejoin(self, node: int) -> None:
        scheduler = self._hosts[0].keeper.scheduler
        if self._authority is not None and scheduler is not None:
            self._start_worker(node, scheduler, self._authority)

    def _scheduler(self, authority: Authority) -> str:
        keeper = self._hosts[0].keeper
        if keeper.scheduler is not None:
            return keeper.scheduler
        order = {
            "host": self._addresses[0].ip,
            "directory": keeper.scratch,
            "identity": vars(authority.issue("scheduler")),
        }
        failure = keeper.start_scheduler(order, time.monotonic() + _STARTING)
        if keeper.scheduler is not None:
            return keeper.scheduler
        if "No module named" in failure:
            raise SkywardError(
                f"pool.dask() needs the package distributed on the nodes, too ({failure}). "
                'Give the pool image=sky.Image(pip=["distributed"]): it is installed in the version that you have here.'
            )
        raise BootstrapError("dask", f"the dask scheduler did not start on {keeper.shell.name}: {failure}", 0)

    def _start_worker(self, node: int, scheduler: str, authority: Authority) -> None:
        host = self._hosts[node]
        order = {
            "node": node,
            "host": self._addresses[node].ip,
            "scheduler": scheduler,
            "directory": host.keeper.scratch,
            "identity": vars(authority.issue(node_role(node))),
            "env": host.env,
            "cwd": host.cwd,
            "paths": host.paths,
        }
        with suppress(BootstrapError):  # a node that is gone; it gets its worker when it is set up again
            host.keeper.tell(ClientToKeeper.DaskWorker(order))
