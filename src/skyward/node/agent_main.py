"""The process of a node's agent."""

from __future__ import annotations

import importlib
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from skyward.api.hardware import Gpu, seen_by_one_process
from skyward.node.agent import Agent, Surroundings
from skyward.node.blob_cache import BlobCache
from skyward.node.client_link import ClientListener
from skyward.node.gpu_shares import names, variable
from skyward.node.gpus import look
from skyward.node.settings import system
from skyward.transport.roles import node_role

if TYPE_CHECKING:
    import ssl

    from skyward.node.gpu_meter import GpuMeter
    from skyward.node.terms import TermsSlot

__all__ = ["run_agent"]


log = logging.getLogger("skyward.engine")

_DIALLING = 10.0


def run_agent(order: dict[str, Any], listener: socket.socket, fork_server: socket.socket, slot: TermsSlot) -> NoReturn:
    """Exits with 0 after the client's `bye`."""
    code = 1
    try:
        agent = _agent(order, listener, fork_server, slot)
        if order["notices"]:
            threading.Thread(target=_wait_for_notice, args=(order["notices"], agent.notice), daemon=True).start()
        agent.run()
        code = 0
    except BaseException:
        log.exception("the agent of node %d failed", order["node"])
    finally:
        os._exit(code)


def _agent(order: dict[str, Any], listener: socket.socket, fork_server: socket.socket, slot: TermsSlot) -> Agent:
    server = client = None
    if not order["local"]:
        from skyward.transport.certificates import Identity, context

        identity = Identity(**order["identity"])
        server, client = context(identity, server=True), context(identity, server=False)
    found = look()
    called = names(found.gpus, os.environ)
    metadata = {
        "node": order["node"],
        "python": list(sys.version_info[:3]),
        "path": sys.path,
        "hostname": os.uname().nodename,
        "system": system(),
        "pid": os.getpid(),
        "accelerators": seen_by_one_process(found.gpus),
        **found.to_json(),
        "gpu_names": called,
        "gpu_variable": variable(found.gpus),
        "cpus": len(os.sched_getaffinity(0)),
    }
    around = Surroundings(gpus=lambda: _gpu_meter(found.gpus, called), dial=partial(_dial, client))
    admit = partial(ClientListener, listener, order["host"], server, order["session"], slot)
    return Agent(admit, fork_server, slot, BlobCache(order["directory"], client), metadata, around)


def _dial(context: ssl.SSLContext | None, host: str, port: int) -> socket.socket:
    from skyward.transport.certificates import secure

    assert context is not None, "runners of one computer connect to node 0 themselves"
    return secure(socket.create_connection((host, port), timeout=_DIALLING), context, _DIALLING, node_role(0))


def _gpu_meter(gpus: Sequence[Gpu], called: Sequence[str]) -> GpuMeter | None:
    if not gpus:
        return None
    from skyward.node.gpu_meter import GpuMeter

    return GpuMeter(gpus, called)


def _wait_for_notice(name: str, notice: Callable[[float], None]) -> None:
    module, _, function = name.partition(":")
    notice(getattr(importlib.import_module(module), function)())
