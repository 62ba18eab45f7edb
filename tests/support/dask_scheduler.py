"""The dask scheduler of a pool without the pool, and the ports that this process and its children listen on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from skyward.node.dask_worker import connect
from skyward.transport.certificates import Authority
from skyward.transport.roles import CLIENT

__all__ = ["client_of_a_scheduler", "listening_ports"]


@contextmanager
def client_of_a_scheduler(directory: Path, reach: Callable[[str, int], Any]) -> Generator[Any]:
    """A dask client whose connections are made by `reach`; it is connected, and nothing listens here for it."""
    authority = Authority("dask", 3600.0)
    order = {
        "keeper": os.getpid(),
        "host": "127.0.0.1",
        "directory": str(directory),
        "identity": vars(authority.issue("scheduler")),
    }
    argv = [sys.executable, "-m", "skyward.node.dask_worker"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps(order).encode() + b"\n")
            process.stdin.flush()
            address = json.loads(process.stdout.readline())[1]
            before = listening_ports()
            with connect(address, authority.issue(CLIENT), reach) as client:
                assert client.scheduler_info()["address"] == address
                assert listening_ports() <= before
                yield client
        finally:
            process.kill()


def listening_ports() -> set[int]:
    """The TCP ports on which this process, or one that it has started, accepts connections."""
    me, found = psutil.Process(), set[int]()
    for process in [me, *me.children(recursive=True)]:
        with suppress(psutil.Error):
            for connection in process.net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN:
                    found.add(connection.laddr.port)
    return found
