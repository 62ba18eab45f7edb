"""A node is a member of the cluster whose scheduler was named last, whatever becomes of the others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed import Client

from skyward.transport import certificates
from tests.support.waiting import until

SCHEDULER = """
import json, sys
from skyward.node import dask_worker

order = json.loads(sys.stdin.readline())
dask_worker.configure(order["directory"])
dask_worker.run_scheduler(order, 1)
"""
NODE = """
import asyncio, json, logging, os, sys
from skyward.node import dask_worker

logging.basicConfig(level=logging.WARNING, stream=sys.stdout)
logging.getLogger("skyward.engine").setLevel(logging.INFO)

def named():
    return sys.stdin.readline().strip() or os._exit(0)

def joined(address):
    print(address, flush=True)

order = json.loads(sys.stdin.readline())
dask_worker.configure(order["directory"])
asyncio.run(dask_worker.stay_member(order, named, joined))
"""


class Cast:
    """Schedulers and nodes, each in a process of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.authority = directory, certificates.Authority("test")
        self.processes: list[subprocess.Popen[str]] = []

    def scheduler(self) -> tuple[subprocess.Popen[str], str]:
        process = self._start(SCHEDULER, "scheduler")
        assert process.stdout is not None
        return process, process.stdout.readline().strip()

    def node(self, number: int, scheduler: str) -> subprocess.Popen[str]:
        process = self._start(NODE, f"node-{number}", node=number)
        name(process, scheduler)
        return process

    def client(self, scheduler: str) -> Any:
        security = certificates.dask_security(self.authority.issue("client"))
        return Client(scheduler, security=security, set_as_default=False)

    def _start(self, source: str, who: str, **order: Any) -> subprocess.Popen[str]:
        directory = self.directory / str(len(self.processes))
        directory.mkdir()
        argv = [sys.executable, "-c", source]
        process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.processes.append(process)
        order |= {"host": "127.0.0.1", "directory": str(directory), "identity": vars(self.authority.issue(who))}
        name(process, json.dumps(order))
        return process


def name(process: subprocess.Popen[str], scheduler: str) -> None:
    assert process.stdin is not None
    process.stdin.write(scheduler + "\n")
    process.stdin.flush()


def joined(process: subprocess.Popen[str]) -> str:
    """Waits until a node says that it has joined, and where its worker listens."""
    return next(line for line in said(process) if line.startswith("tls://"))


def said(process: subprocess.Popen[str]) -> Iterator[str]:
    """What a node says, line by line."""
    assert process.stdout is not None
    return map(str.strip, iter(process.stdout.readline, ""))


def members(client: Any) -> dict[str, str]:
    """Address and name of every worker that a scheduler knows."""
    workers: dict[str, Any] = client.sync(client.scheduler.identity, n_workers=-1)["workers"]
    return {address: worker["name"] for address, worker in workers.items()}


@pytest.fixture
def cast(tmp_path: Path) -> Iterator[Cast]:
    """All processes are gone afterwards."""
    made = Cast(tmp_path)
    yield made
    for process in made.processes:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("fate", ["alive", "killed", "stopped"])
def test_a_node_goes_over_to_the_scheduler_that_was_named_last(cast: Cast, fate: str) -> None:
    """Row 19: the head may be another machine by now; the old scheduler is no hindrance, whatever its state."""
    (old, first), (_, second) = cast.scheduler(), cast.scheduler()
    node = cast.node(1, first)
    before = joined(node)
    with cast.client(first) as client:
        assert members(client) == {before: "node-1"}
        if fate == "alive":
            name(node, second)
            until(lambda: not members(client))
    if fate == "killed":
        old.kill()
        old.wait()
    elif fate == "stopped":
        os.kill(old.pid, signal.SIGSTOP)
    if fate != "alive":
        name(node, second)
    now = joined(node)
    with cast.client(second) as client:
        assert members(client) == {now: "node-1"}
        assert client.submit(pow, 2, 10).result(timeout=45) == 1024
        name(node, first)
        name(node, second)  # before anything could come of the first
        again = joined(node)
        assert client.submit(pow, 2, 11).result(timeout=45) == 2048
        until(lambda: members(client) == {again: "node-1"})


def test_the_same_scheduler_again_changes_nothing(cast: Cast) -> None:
    _, address = cast.scheduler()
    node = cast.node(0, address)
    before = joined(node)
    name(node, address)
    name(node, address)
    with cast.client(address) as client:
        assert client.submit(pow, 2, 10).result(timeout=45) == 1024
        assert members(client) == {before: "node-0"}


def test_a_body_that_runs_does_not_keep_a_node_in_a_cluster_that_is_over(cast: Cast) -> None:
    (_, first), (_, second) = cast.scheduler(), cast.scheduler()
    node = cast.node(0, first)
    joined(node)
    with cast.client(first) as client:
        running = client.submit(time.sleep, 600)
        until(lambda: any(client.processing().values()))
        name(node, second)
        now = joined(node)
        running.cancel()
    with cast.client(second) as client:
        assert members(client) == {now: "node-0"}
        assert client.submit(pow, 2, 10).result(timeout=45) == 1024


def test_a_machine_in_another_s_place_joins_as_soon_as_the_name_is_free(cast: Cast) -> None:
    """Rows 13, 21: a replacement has its predecessor's number; dask refuses the name while it knows the other one."""
    _, address = cast.scheduler()
    old = cast.node(3, address)
    before = joined(old)
    new = cast.node(3, address)
    assert any("name taken" in line for line in said(new))
    with cast.client(address) as client:
        assert members(client) == {before: "node-3"}
        old.kill()
        now = joined(new)
        assert now != before
        assert members(client) == {now: "node-3"}
        assert client.submit(pow, 2, 10).result(timeout=45) == 1024


def test_a_node_that_was_thrown_out_comes_back(cast: Cast) -> None:
    _, address = cast.scheduler()
    node = cast.node(0, address)
    before = joined(node)
    with cast.client(address) as client:
        client.retire_workers([before])
        now = joined(node)
        assert members(client) == {now: "node-0"}
    assert len(list((cast.directory / "1" / "dask-scratch-space").iterdir())) == 1, "what it left there is gone"
