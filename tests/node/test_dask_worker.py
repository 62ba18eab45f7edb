"""A node's dask worker stays a member of its scheduler's cluster, whatever becomes of others of the same name."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("distributed")

from skyward.node import dask_worker
from skyward.setup.local_shell import LocalShell
from skyward.transport import certificates
from tests.support.waiting import until


class Cast:
    """A scheduler and workers, each in a process of its own, as the keeper starts them."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.authority = directory, certificates.Authority("test", 3600)
        self.processes: list[subprocess.Popen[str]] = []

    def scheduler(self) -> str:
        process = self._start("scheduler")
        assert process.stdout is not None
        return json.loads(process.stdout.readline())[1]

    def node(self, number: int, scheduler: str, **order: Any) -> subprocess.Popen[str]:
        there = {"node": number, "scheduler": scheduler, "env": {}, "cwd": "/", "paths": []}
        return self._start(f"node-{number}", **{**there, **order})

    def client(self, scheduler: str) -> Any:
        return dask_worker.connect(scheduler, self.authority.issue("client"), LocalShell().reach)

    def _start(self, who: str, **order: Any) -> subprocess.Popen[str]:
        directory = self.directory / str(len(self.processes))
        directory.mkdir()
        argv = [sys.executable, "-P", "-m", "skyward.node.dask_worker"]
        pipe = subprocess.PIPE
        process = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        self.processes.append(process)
        order |= {"host": "127.0.0.1", "directory": str(directory), "identity": vars(self.authority.issue(who))}
        assert process.stdin is not None
        process.stdin.write(json.dumps({**order, "keeper": os.getpid()}) + "\n")
        process.stdin.flush()
        return process


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


def test_a_worker_has_the_surroundings_of_user_code_and_there_is_no_dashboard(cast: Cast, tmp_path: Path) -> None:
    address = cast.scheduler()
    cast.node(0, address, env={"COLOUR": "blue"}, cwd=str(tmp_path), paths=["/somewhere"])
    with cast.client(address) as client:
        assert client.dashboard_link is None
        found = client.submit(lambda: (os.environ["COLOUR"], os.getcwd(), "/somewhere" in sys.path)).result(timeout=45)
        assert found == ("blue", str(tmp_path), True)


def test_a_machine_in_another_s_place_joins_as_soon_as_the_name_is_free(cast: Cast) -> None:
    """Rows 13, 21: a replacement has its predecessor's number; dask refuses the name while it knows the other one."""
    address = cast.scheduler()
    with cast.client(address) as client:
        old = cast.node(3, address)
        before = until(lambda: members(client))
        new = cast.node(3, address)
        assert new.stderr is not None
        assert any("name taken" in line for line in new.stderr)
        assert members(client) == before
        old.kill()
        now = until(lambda: (known := members(client)) != before and known)
        assert list(now.values()) == ["node-3"]
        assert client.submit(pow, 2, 10).result(timeout=45) == 1024


def test_a_worker_that_was_thrown_out_comes_back(cast: Cast) -> None:
    address = cast.scheduler()
    with cast.client(address) as client:
        cast.node(0, address)
        before = until(lambda: members(client))
        client.retire_workers(list(before))
        now = until(lambda: (known := members(client)) != before and known)
        assert list(now.values()) == ["node-0"]
    assert len(list((cast.directory / "1" / "dask-scratch-space").iterdir())) == 1, "what it left there is gone"


def test_peers_that_do_not_finish_their_handshake_are_sent_away(cast: Cast) -> None:
    """SEC-3: not more than 64 at a time; whoever belongs here still gets in."""
    address = cast.scheduler()
    host, port = address.removeprefix("tls://").split(":")
    silent = [socket.create_connection((host, int(port)), timeout=45) for _ in range(80)]
    try:
        assert [sock.recv(1) for sock in silent[:16]] == [b""] * 16
        with cast.client(address) as client:
            assert members(client) == {}
        silent[70].settimeout(0.0)
        with pytest.raises(BlockingIOError):  # it may still speak, for a while
            silent[70].recv(1)
    finally:
        for sock in silent:
            sock.close()


def test_without_distributed_the_scheduler_says_so(tmp_path: Path) -> None:
    (tmp_path / "dask.py").write_text("raise ImportError(\"No module named 'dask'\")")
    order = {"host": "127.0.0.1", "directory": str(tmp_path), "identity": {}, "keeper": os.getpid()}
    argv = [sys.executable, "-P", "-m", "skyward.node.dask_worker"]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(argv, input=json.dumps(order) + "\n", env=env, capture_output=True, text=True, timeout=60)
    assert json.loads(done.stdout) == ["scheduler_failed", "No module named 'dask'", 0]
