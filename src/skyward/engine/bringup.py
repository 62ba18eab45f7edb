"""From machines to an open engine: certificates, keepers, links, and what each node is told of the pool."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from skyward import events
from skyward.accelerators import Accelerator
from skyward.blobs import SCRATCH
from skyward.bootstrap import Environment
from skyward.engine import certs
from skyward.engine.client import Engine, Plan
from skyward.engine.site import Site
from skyward.payload import Packer
from skyward.plugin import Plugin
from skyward.provider import Machine
from skyward.runtime import AcceleratorInfo, InstanceInfo, NetworkInfo, Peer
from skyward.shell import LocalShell, inherited
from skyward.spec import Worker

__all__ = ["Bringup"]

_THREADS = (
    *("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS"),
    *("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "NPROC"),  # NPROC is what XLA goes by
)


@dataclass(frozen=True)
class Bringup:
    """What is needed to bring the nodes of a pool up."""

    pool: str
    machines: list[Machine]
    environment: Environment
    worker: Worker
    plugins: Sequence[Plugin]
    accelerator: Accelerator | None
    directory: str
    max_result: int
    grace: float
    emit: Callable[[events.Event], None]
    release: Callable[[Sequence[str]], None]
    hurried: Callable[[], bool]

    def open(self, stack: ExitStack, deadline: float) -> tuple[Engine, Site, certs.Authority]:
        """Starts everything, with its ending on `stack`; returns when every node is ready for calls."""
        shell = LocalShell()
        for node in range(len(self.machines)):
            self.emit(events.NodePhase(self.pool, node, "starting"))
        # the keeper imports distributed while we make certificates
        env = {**inherited(os.environ), **self.environment.env}
        site = Site(shell, self.environment.python, env, self.directory)
        stack.callback(lambda: site.end(0.2 if self.hurried() else 10.0))
        authority = certs.Authority(self.pool)
        context = certs.context(authority.issue("client"), server=False)
        site.order(self._order(authority), deadline)
        hooks = self._hooks()

        def setup(node: int, abouts: list[dict[str, Any]], ports: list[int]) -> tuple[dict[str, Any], list[Any]]:
            return self._settings(node, abouts, ports, site.scheduler), hooks

        def reach(node: int) -> socket.socket:
            return shell.reach(*site.ports[node])

        engine = Engine(
            Plan(
                pool=self.pool,
                nodes=len(self.machines),
                slots=self.worker.concurrency,
                reach=reach,
                context=context,
                setup=setup,
                emit=self.emit,
                release=self.release,
                gang=len(self.machines) > 1 and any(p.around_app for p in self.plugins),
            )
        )
        stack.callback(self._close, engine, site)
        engine.open(deadline)
        return engine, site, authority

    def _close(self, engine: Engine, site: Site) -> None:
        site.closing()
        if self.hurried():
            engine.abandon()
        else:
            engine.close(self.grace)

    def _order(self, authority: certs.Authority) -> dict[str, Any]:
        """What the keeper is to start, and who each of them is."""
        return {
            "scheduler": {"host": self.machines[0].private_ip, "identity": vars(authority.issue("scheduler"))},
            "nodes": [
                {
                    "node": node,
                    "host": machine.private_ip,
                    "identity": vars(authority.issue(f"node-{node}")),
                    "directory": self.directory,
                }
                for node, machine in enumerate(self.machines)
            ],
        }

    def _hooks(self) -> list[Any]:
        wanted = [(p.name, p.around_app, p.decorate) for p in self.plugins if p.around_app or p.decorate]
        if not wanted:
            return []
        head, buffers = Packer(self.environment.paths).pack(wanted, "the plugins' hooks")
        return [head, *map(bytes, buffers)]

    def _settings(
        self, node: int, abouts: list[dict[str, Any]], ports: list[int], scheduler: str | None
    ) -> dict[str, Any]:
        """What an agent is told to make its runners with."""
        slots = self.worker.concurrency
        processes, threads = (slots, 1) if self.worker.process else (1, slots)
        counts = [about["accelerators"] for about in abouts]
        return {
            "scheduler": scheduler,
            "info": self._info(node, counts, ports).to_json(),
            "env": {**self._thread_counts(processes), **self.environment.env, SCRATCH: self.directory},
            "cwd": _working_directory(),
            "grace": self.grace,
            "threads": threads,
            "processes": processes,
            "runner": {
                "node": node,
                "threads": threads,
                "paths": list(self.environment.paths),
                "blobs": self.directory,
                "max_result": self.max_result,
            },
        }

    def _info(self, node: int, counts: list[int], ports: list[int]) -> InstanceInfo:
        wanted = self.accelerator
        return InstanceInfo(
            node=node,
            total_nodes=len(self.machines),
            accelerators=counts[node],
            total_accelerators=sum(counts),
            head_addr=self.machines[0].private_ip,
            head_port=ports[0],
            job_id=self.pool,
            peers=tuple(Peer(i, m.private_ip, m.public_ip) for i, m in enumerate(self.machines)),
            accelerator=None
            if wanted is None
            else AcceleratorInfo(
                type=wanted.name,
                count=counts[node],
                memory_gb=wanted.memory_gb or 0.0,
                is_trainium=wanted.name.lower().startswith("trainium"),
            ),
            network=NetworkInfo(interface="lo" if self.machines[node].reached == "local" else None),
            ports={"torch": ports[0], "jax": ports[1], "tensorflow": ports[2]},
        )

    def _thread_counts(self, processes: int) -> dict[str, str]:
        """Nodes that share this computer's cores must not each start a thread for every one of them."""
        if any(name in os.environ or name in self.environment.env for name in _THREADS):
            return {}  # the user has decided
        each = max(1, (os.cpu_count() or 1) // (len(self.machines) * processes))
        return dict.fromkeys(_THREADS, str(each))


def _working_directory() -> str:
    """Where this program works, and so its functions on this computer; the root if that has been removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return os.sep
