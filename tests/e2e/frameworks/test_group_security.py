"""What others on a computer can reach of a group while it is formed, and while it works."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

import skyward as sky
from skyward.plugins._ranks import Rendezvous
from tests.support.waiting import until

STRANGER = """
import json, os, socket, sys
ports, joins = json.loads(sys.argv[1]), json.loads(sys.argv[2])
socket.getaddrinfo("127.0.0.1", 0)  # loads what the other user cannot read
os.setgroups([])
os.setuid(65534)
for port in ports:
    for words in joins:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=5) as sock:
                sock.sendall(words.encode())
                print(sock.recv(100))
        except OSError as exc:
            print(exc)
"""


@sky.compute
def meet(flag: str) -> str:
    info = sky.instance_info()
    assert info is not None
    if info.rank == 1:
        until(lambda: Path(flag).exists(), 60)
    return Rendezvous("the group", info, info.ports["torch"], 60).meet(f"from {info.rank}")


@sky.compute
def torch_sum(flag: str) -> float:
    import torch

    total = torch.ones(1)
    torch.distributed.all_reduce(total)
    if flag:
        until(lambda: Path(flag).exists(), 60)
    return float(total)


@sky.compute
def jax_sum(flag: str) -> float:
    import numpy as np
    from jax.experimental import multihost_utils

    total = multihost_utils.process_allgather(np.ones(1)).sum()
    if flag:
        until(lambda: Path(flag).exists(), 60)
    return float(total)


def listeners() -> set[tuple[str, int]]:
    """Where the processes of the pools of this program listen."""
    found: set[tuple[str, int]] = set()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            for each in process.net_connections("inet"):
                if each.status == psutil.CONN_LISTEN or (each.type == 2 and not each.raddr):
                    found.add(tuple(each.laddr))
    return found


@pytest.fixture
def flag(tmp_path: Path) -> Iterator[Path]:
    """A file for which the bodies of a test wait."""
    path = tmp_path / "flag"
    yield path
    path.touch()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_nothing_listens_while_ranks_meet_so_no_other_user_can_be_one(flag: Path) -> None:
    """SEC-2, SEC-3, SEC-7: who came as rank 1 had its pickles loaded by rank 0."""
    with sky.ComputePool(nodes=2, console=False) as pool, ThreadPoolExecutor(1) as threads:
        met = threads.submit(lambda: meet(str(flag)) @ pool)
        until(
            lambda: any(
                stack.rank == 0 and "meet" in frame.function for stack in pool.stacks() for frame in stack.frames
            )
        )
        words = [json.dumps([pool.name, 1]) + "\n", json.dumps({"share": 1}) + "\n"]
        found = sorted(port for _, port in listeners())
        argv = [sys.executable, "-IS", "-c", STRANGER, json.dumps(found), json.dumps(words)]
        heard = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
        flag.touch()
        assert met.result(60) == ["from 0", "from 0"]
    assert "answer" not in heard
    assert found == []


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_group_of_this_computer_is_reached_through_loopback_only(framework: str, flag: Path) -> None:
    """SEC-2: torch's store and JAX's coordinator, which believe whoever connects, are files that others cannot open."""
    plugin: Any = getattr(sky.plugins, framework)()
    body = {"torch": torch_sum, "jax": jax_sum}[framework]
    with sky.ComputePool(nodes=2, plugins=[plugin], console=False) as pool, ThreadPoolExecutor(1) as threads:
        assert body("") @ pool == [2.0, 2.0]  # all connections are made
        working = threads.submit(lambda: body(str(flag)) @ pool)
        found = listeners()
        flag.touch()
        assert working.result(60) == [2.0, 2.0]
    assert {address for address, _ in found} == {"127.0.0.1"}
    assert len(found) == 2  # of the collectives, one for each rank
