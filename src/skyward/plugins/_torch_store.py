"""Where the ranks of a torch group leave their addresses for each other: a private file, or a port of node 0.

On one machine it is a file in the pool's directory, which no other user can open. Between machines it is torch's own
store, which has no way to know who connects: it listens at the address by which nodes reach each other, and not, as it
would by itself, at all of them.
"""

from __future__ import annotations

import os
import socket
import tempfile
from datetime import timedelta
from typing import Any

from skyward.api.info import InstanceInfo
from skyward.plugins._ranks import on_one_machine
from skyward.plugins._rendezvous import Rendezvous
from skyward.transport.blobs import SCRATCH

__all__ = ["new_store"]


def new_store(dist: Any, info: InstanceInfo, timeout: float, port: int = 0) -> Any:
    """A store that all ranks share and that is new: what one group leaves in a store would confuse the next.

    Waits for all ranks, at most `timeout` seconds. `port` is for torch's own store; 0 means any that is free.
    """
    rendezvous = Rendezvous("the torch group", info, info.ports["torch"], timeout, "timeout")
    limit = timedelta(seconds=timeout)
    if on_one_machine(info):
        return _file_store(dist, info, rendezvous, limit)
    if info.rank > 0:
        return dist.TCPStore(info.head_addr, rendezvous.meet(), timeout=limit)
    family = socket.AF_INET6 if ":" in info.head_addr else socket.AF_INET
    try:
        listener = socket.create_server((info.head_addr, port), family=family, backlog=1024)
    except OSError as exc:
        raise rendezvous.port_taken(str(exc.strerror)) from exc
    port = listener.getsockname()[1]
    options = {"is_master": True, "wait_for_workers": False, "multi_tenant": True, "timeout": limit}
    store = dist.TCPStore(info.head_addr, port, master_listen_fd=listener.detach(), **options)
    rendezvous.meet(port)
    return store


def _file_store(dist: Any, info: InstanceInfo, rendezvous: Rendezvous, limit: timedelta) -> Any:
    path = None
    if info.rank == 0:
        fd, path = tempfile.mkstemp(prefix="torch-", dir=os.environ.get(SCRATCH))  # the last one to leave removes it
        os.close(fd)
    store = dist.FileStore(rendezvous.meet(path), info.world_size)
    store.set_timeout(limit)
    return store
