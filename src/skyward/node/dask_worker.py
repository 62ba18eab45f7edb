"""dask on demand: processes of its scheduler and workers, and the client's end.

Workers run user tasks, so they are separate processes. The keeper ends one when its scheduler changes or ends.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import json
import os
import socket
import ssl
import sys
import tempfile
import warnings
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn, cast

from skyward.node import processes
from skyward.node.orders import KeeperToClient, SchedulerOrder, WorkerOrder, written
from skyward.transport.backoff import backoff
from skyward.transport.certificates import Identity, context
from skyward.transport.codec import Message

__all__ = ["connect", "main"]

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
    "distributed.comm.timeouts.tcp": "15s",  # a silent machine is forgotten after that, and its name is free
    "distributed.comm.timeouts.connect": "10s",
}
_JOINING = 60.0
_LEAVING = 2.0
_PAUSES = 0.25, 5.0  # between attempts: the first one, and the longest
_HANDSHAKE = 10.0
_HANDSHAKES = 64

Reach = Callable[[str, int], socket.socket]


def connect(address: str, identity: Identity, reach: Reach) -> Any:
    from distributed import Client

    _let_clients_reach()

    class PoolClient(Client):
        @property
        def dashboard_link(self) -> None:
            """None: its port would be open to anyone."""

    with warnings.catch_warnings():  # the packages that must have one version have it
        warnings.filterwarnings("ignore", "Mismatched versions found")
        return PoolClient(address, security=_security(identity, reach), set_as_default=False)


def main() -> None:
    order = json.loads(sys.stdin.readline())
    processes.die_with_parent(order["keeper"])
    answer = os.dup(1)  # the keeper's own standard output; the tasks of users must not write there
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1):
        os.dup2(null, fd)
    os.close(null)
    if "scheduler" not in order:
        _serve(order, answer)
        return
    os.close(answer)
    os.environ.update(order["env"])
    os.chdir(order["cwd"])
    sys.path[:0] = order["paths"]
    processes.prefer_for_oom()
    _configure(order["directory"])
    asyncio.run(stay_member(order))


def _serve(order: SchedulerOrder, answer: int) -> None:
    try:
        _configure(order["directory"])
    except ImportError as exc:
        _reply(answer, KeeperToClient.SchedulerFailed(str(exc)))
    else:
        asyncio.run(run_scheduler(order, answer))


def _reply(answer: int, message: Message) -> None:
    os.write(answer, written(message) + b"\n")
    os.close(answer)


def _configure(directory: str) -> None:
    from dask import config

    tempfile.tempdir = directory
    # before distributed is imported: it reads its logging settings then
    config.set({**_SETTINGS, "temporary-directory": directory})
    importlib.import_module("distributed")
    _limit_handshakes()


def _limit_handshakes() -> None:
    """Drops peers that do not finish their TLS handshake; dask waits forever."""
    from distributed.comm import tcp

    waiting: deque[Any] = deque()

    class LimitedListener(tcp.TLSListener):
        async def _prepare_stream(self, stream: Any, address: str) -> Any:
            waiting.append(stream)
            if len(waiting) > _HANDSHAKES:
                waiting.popleft().close()
            try:
                async with asyncio.timeout(_HANDSHAKE):
                    return cast("Any", await super()._prepare_stream(stream, address))
            except TimeoutError:
                stream.close()
                return None
            finally:
                with suppress(ValueError):
                    waiting.remove(stream)

    tcp.TLSBackend._listener_class = LimitedListener  # pyright: ignore[reportPrivateUsage] - dask has no other way


@functools.cache
def _let_clients_reach() -> None:
    """Makes dask connect through a function; it only knows ports."""
    from distributed.comm import tcp

    class ReachingConnector(tcp.TLSConnector):
        async def connect(self, address: str, deserialize: bool = True, **connection_args: Any) -> Any:
            reach: Reach | None = connection_args.pop("reach", None)
            if reach is not None:
                self.client = _Way(reach)  # pyright: ignore[reportAttributeAccessIssue] - of this connection alone
            return cast("Any", await super().connect(address, deserialize, **connection_args))

    tcp.TLSBackend._connector_class = ReachingConnector  # pyright: ignore[reportPrivateUsage] - as above


class _Way:
    def __init__(self, reach: Reach) -> None:
        self._reach = reach

    async def connect(self, host: str, port: int, max_buffer_size: int, ssl_options: ssl.SSLContext) -> Any:
        from tornado.iostream import IOStream

        reaching = asyncio.get_running_loop().run_in_executor(None, self._reach, host, port)
        try:
            sock = await asyncio.shield(reaching)
        except asyncio.CancelledError:
            reaching.add_done_callback(_close_unused)
            raise
        return await IOStream(sock, max_buffer_size=max_buffer_size).start_tls(False, ssl_options)


def _close_unused(reached: asyncio.Future[socket.socket]) -> None:
    if not reached.cancelled() and reached.exception() is None:
        reached.result().close()


class _Socket(ssl.SSLSocket):
    def getsockname(self) -> Any:
        return ("localhost", 0) if self.family == socket.AF_UNIX else super().getsockname()

    def setsockopt(self, level: int, *rest: Any) -> None:
        if self.family != socket.AF_UNIX or level != socket.SOL_TCP:
            super().setsockopt(level, *rest)


async def run_scheduler(order: SchedulerOrder, answer: int) -> None:
    from distributed import Scheduler

    class PoolScheduler(Scheduler):
        def start_http_server(self, *_: Any, **__: Any) -> None:
            """None: it would be open to anyone, beside the TLS one."""

    scheduler = await PoolScheduler(
        host=order["host"], port=0, protocol="tls", security=_security(Identity(**order["identity"]))
    )
    _reply(answer, KeeperToClient.Scheduler(scheduler.address))
    await scheduler.finished()


async def stay_member(order: WorkerOrder) -> NoReturn:
    pauses = backoff(*_PAUSES)
    while True:
        try:
            await _join(order)
            pauses = backoff(*_PAUSES)  # it was a member for a while
        except Exception as exc:
            print(f"node {order['node']} could not join: {exc.__cause__ or exc}", file=sys.stderr, flush=True)
        await asyncio.sleep(next(pauses))


async def _join(order: WorkerOrder) -> None:
    worker = _worker(order)
    try:
        await worker
        await worker.finished()
    finally:
        with suppress(Exception):  # a worker that cannot be closed is left behind
            await asyncio.wait_for(worker.close(), 3 * _LEAVING)


def _worker(order: WorkerOrder) -> Any:
    from distributed import Worker

    class NodeWorker(Worker):
        def start_http_server(self, *_: Any, **__: Any) -> None:
            """None, as above."""

        async def close(self, *_: Any, reason: str = "left", **__: Any) -> str | None:
            """Does not wait for running tasks: nobody takes their results."""
            return await super().close(_LEAVING, executor_wait=False, nanny=False, reason=reason)

    return NodeWorker(
        order["scheduler"],
        name=f"node-{order['node']}",
        nthreads=1,
        host=order["host"],
        protocol="tls",
        memory_limit=0,
        local_directory=order["directory"],
        security=_security(Identity(**order["identity"])),
        death_timeout=_JOINING,
    )


def _security(identity: Identity, reach: Reach | None = None) -> Any:
    """dask itself would write the key to a file briefly."""
    from distributed.security import Security

    class PoolSecurity(Security):
        def _get_tls_context(self, tls: Any, purpose: ssl.Purpose) -> ssl.SSLContext:
            made = context(identity, server=purpose is ssl.Purpose.CLIENT_AUTH)
            made.sslsocket_class = _Socket  # that of our links has other errors than tornado expects
            return made

        def get_connection_args(self, role: str) -> dict[str, Any]:
            args = cast("dict[str, Any]", super().get_connection_args(role))
            return args if reach is None else {**args, "reach": reach}

    return PoolSecurity(require_encryption=True)


if __name__ == "__main__":
    main()
