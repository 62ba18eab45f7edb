"""The dask side: a scheduler on the head, and on every node a worker that makes the pool a real dask cluster."""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import platform
import queue
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

from dask import config

from skyward.node.agent import Agent
from skyward.node.blob_cache import BlobCache
from skyward.node.client_listener import ClientListener
from skyward.node.gpus import count_accelerators
from skyward.transport.certificates import Identity, context, dask_security

log = logging.getLogger("skyward.engine")

__all__ = ["configure", "run_agent", "run_scheduler", "stay_member"]

_SETTINGS: dict[str, Any] = {
    "logging.distributed": "critical",
    "distributed.worker.profile.enabled": False,
    "distributed.worker.memory.target": False,
    "distributed.worker.memory.spill": False,
    "distributed.worker.memory.pause": False,
    "distributed.worker.memory.terminate": False,
    "distributed.worker.use-file-locking": False,
    "distributed.scheduler.work-stealing": False,
    "distributed.scheduler.active-memory-manager.start": False,
    "distributed.scheduler.allowed-failures": 0,
    "distributed.scheduler.worker-ttl": None,
    "distributed.admin.system-monitor.interval": "10s",
    "distributed.admin.system-monitor.gil.enabled": False,
    "distributed.admin.tick.interval": "1s",
    "distributed.diagnostics.nvml": False,
    "distributed.comm.require-encryption": True,
    "distributed.comm.timeouts.tcp": "15s",  # a machine that fell silent is forgotten after that, and its name is free
    "distributed.comm.timeouts.connect": "10s",
}
_JOINING = 60.0
_LEAVING = 2.0
_PAUSES = (0.25, 0.5, 1.0, 2.0, 5.0)


def configure(directory: str) -> None:
    """Sets dask up and imports what the forked processes will need; whatever is written goes into `directory`."""
    tempfile.tempdir = directory
    # before distributed is imported: it reads its logging settings then
    config.set({**_SETTINGS, "temporary-directory": directory})
    importlib.import_module("distributed")


def run_scheduler(order: dict[str, Any], ready: int) -> None:
    """Runs the scheduler in this process; writes its address to the file descriptor `ready`."""
    from distributed import Scheduler

    class PoolScheduler(Scheduler):
        def start_http_server(self, *_: Any, **__: Any) -> None:
            """No HTTP port: it would be open to anyone, beside the TLS one."""

    async def serve() -> None:
        scheduler = await PoolScheduler(
            host=order["host"], port=0, protocol="tls", security=dask_security(Identity(**order["identity"]))
        )
        os.write(ready, scheduler.address.encode() + b"\n")
        os.close(ready)
        await scheduler.finished()

    asyncio.run(serve())


def run_agent(
    order: dict[str, Any], listener: socket.socket, fork_server: socket.socket, heard: Callable[[float], None]
) -> NoReturn:
    """Runs a node's agent in this process, and its dask worker beside it; `heard` gets when the client last spoke."""
    addresses: queue.SimpleQueue[str] = queue.SimpleQueue()
    server = client = None
    if not order["local"]:
        identity = Identity(**order["identity"])
        server, client = context(identity, server=True), context(identity, server=False)
    about = {
        "node": order["node"],
        "python": list(sys.version_info[:3]),
        "path": sys.path,
        "hostname": platform.node(),
        "pid": os.getpid(),
        "accelerators": count_accelerators(),
        "cpus": len(os.sched_getaffinity(0)),
    }
    blob_cache = BlobCache(order["directory"], client)
    admit = partial(ClientListener, listener, order["host"], server)
    agent = Agent(admit, fork_server, addresses.put, heard, blob_cache, about)

    if order["notices"]:
        threading.Thread(target=_heed_notices, args=(order["notices"], agent.notice), daemon=True).start()

    def relay() -> None:
        code = 1
        try:
            agent.run()
            code = 0  # the client has said goodbye
        except BaseException:
            log.exception("the agent of node %d failed", order["node"])
        finally:
            os._exit(code)

    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    thread = threading.Thread(target=relay, name="skyward-agent", daemon=True)
    thread.start()
    try:
        asyncio.run(stay_member(order, addresses.get, lambda address: agent.say("member", {"address": address})))
    except BaseException:
        log.exception("node %d is no longer a member of the dask cluster", order["node"])
    while True:
        thread.join()  # calls do not need the scheduler; the thread ends the process


def _heed_notices(name: str, notice: Callable[[float], None]) -> None:
    """Waits, as the provider says how, until this machine is to be taken away."""
    module, _, function = name.partition(":")
    notice(getattr(importlib.import_module(module), function)())


async def stay_member(order: dict[str, Any], named: Callable[[], str], joined: Callable[[str], None]) -> NoReturn:
    """Keeps this node in the cluster of the scheduler that `named` gave last; `joined` is told of each joining."""
    address, stay = "", None
    while True:
        other = await asyncio.to_thread(named)
        if other == address:
            continue
        if stay is not None:
            stay.cancel()  # not waited for: the scheduler that it leaves may be dead
        address, stay = other, asyncio.create_task(_stay(order, other, joined))


async def _stay(order: dict[str, Any], scheduler: str, joined: Callable[[str], None]) -> NoReturn:
    """Joins, and joins again: its name may still be taken by a machine that is gone, or the scheduler be away."""
    failures = 0
    while True:
        try:
            await _join(order, scheduler, joined)
            failures = 0  # it was a member for a while
        except Exception as exc:
            log.info("node %d could not join %s: %s", order["node"], scheduler, exc.__cause__ or exc)
            failures += 1
        await asyncio.sleep(_PAUSES[min(failures, len(_PAUSES) - 1)])


async def _join(order: dict[str, Any], scheduler: str, joined: Callable[[str], None]) -> None:
    """A member until the scheduler is gone, or this is cancelled."""
    worker = _worker(order, scheduler)
    try:
        await worker
        joined(worker.address)
        await worker.finished()
    finally:
        with suppress(Exception):  # one that cannot be closed is left behind
            await asyncio.wait_for(worker.close(), 3 * _LEAVING)


def _worker(order: dict[str, Any], scheduler: str) -> Any:
    from distributed import Worker

    class NodeWorker(Worker):
        def start_http_server(self, *_: Any, **__: Any) -> None:
            """No HTTP port, as above."""

        async def close(self, *_: Any, reason: str = "left", **__: Any) -> str | None:
            """Without waiting for bodies that still run here: nobody takes their results any more."""
            return await super().close(_LEAVING, executor_wait=False, nanny=False, reason=reason)

    return NodeWorker(
        scheduler,
        name=f"node-{order['node']}",
        nthreads=1,
        host=order["host"],
        protocol="tls",
        memory_limit=0,
        local_directory=order["directory"],
        security=dask_security(Identity(**order["identity"])),
        death_timeout=_JOINING,
    )
