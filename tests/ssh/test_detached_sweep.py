"""Detached runs whose submitting process is killed at any moment: each call ends once, nothing of output or result is
lost, and nothing is left.
"""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path

import pytest

from tests.ssh.joining import join, joiners
from tests.ssh.places import ours
from tests.support.hosts import Host, Network
from tests.support.swept_runs import SEEDS, check, killed
from tests.support.waiting import until


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "state").mkdir(mode=0o700)
    monkeypatch.setenv("SKYWARD_STATE", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)


def ran(host: Host, path: str) -> str:
    return host.run(["sh", "-c", f"cat {path} 2>/dev/null || true"], user="root").stdout


@pytest.mark.parametrize("seed", range(SEEDS or 4))
@pytest.mark.timeout(400)
def test_a_submission_that_is_killed_at_any_moment_becomes_a_whole_run_or_nothing(net: Network, seed: int) -> None:
    path = f"/run/cache/calls-{seed}-{os.getpid()}"
    hosts = f"hosts={[host.address for host in net.hosts[:2]]}, user='sky'"
    provider = f"sky.SSH({hosts}, key={str(net.key)!r}, known_hosts={str(net.known_hosts)!r})"
    check(killed(seed, provider, path, 3.0), lambda: ran(net[0], path))
    until(lambda: not any(ours(host) for host in net), 120)


@pytest.mark.parametrize("seed", range(SEEDS or 2))
@pytest.mark.timeout(400)
def test_machines_that_join_have_a_whole_run_or_nothing_too(net: Network, seed: int) -> None:
    path, file, over = f"/run/cache/joined-{seed}-{os.getpid()}", Path("join.py").absolute(), threading.Event()
    joined: list[subprocess.Popen[bytes]] = []

    def written() -> bool:
        return over.is_set() or (file.exists() and file.read_text().endswith("main())\n"))

    def come() -> None:
        until(written, 60)
        content = file.read_text() if file.exists() else ""
        if content.endswith("main())\n"):
            joined.extend(join(host, content, stdin=subprocess.DEVNULL) for host in (net[1], net[2]))

    thread = threading.Thread(target=come)
    thread.start()
    try:
        submitted = killed(seed, f"sky.Join(file={str(file)!r}, addresses=[{net.address!r}])", path, 4.0)
    finally:
        over.set()
        thread.join()
    check(submitted, lambda: ran(net[1], path))
    until(lambda: not any(ours(host) or joiners(host) for host in net), 120)
    for process in joined:
        process.wait(60)
