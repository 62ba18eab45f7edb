"""Detached runs whose submitting process is killed at any moment: each call ends once, nothing of output or result is
lost, and nothing is left.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from skyward.history import runs
from skyward.pool.run import Run
from tests.ssh.places import ours
from tests.support.hosts import Network
from tests.support.waiting import until

SEEDS = int(os.environ.get("SKYWARD_SWEEP_SEEDS", "4"))
CALLS = 200

PROGRAM = """
import os
import sys
import skyward as sky
import skyward.pool.detached

skyward.pool.detached._GO_WITHIN = 5.0

@sky.compute
def double(n, path):
    with open(path, "a") as file:
        print(n, file=file)
    print("call", n, flush=True)
    return 2 * n

def work(count, path):
    for n in range(10):
        print("line", n, flush=True)
    found = list(sky.gather(*[double(n, path) for n in range(count)]) >> sky)
    print("all done", flush=True)
    return found

if __name__ == "__main__":
    name, path, hosts, key, known = sys.argv[1:]
    provider = sky.SSH(hosts=hosts.split(","), user="sky", key=key, known_hosts=known)
    print("begun", flush=True)
    sky.detach(work, {calls}, path, pool=sky.ComputePool(provider=provider, console=False), name=name)
    print("submitted", flush=True)
    input()
"""


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.timeout(400)
def test_a_submission_that_is_killed_at_any_moment_becomes_a_whole_run_or_nothing(
    net: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    (tmp_path / "state").mkdir(mode=0o700)
    monkeypatch.setenv("SKYWARD_STATE", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    Path("submit.py").write_text(PROGRAM.replace("{calls}", str(CALLS)))
    chance, record = random.Random(seed), f"/run/cache/calls-{seed}-{os.getpid()}"
    hosts = ",".join(host.address for host in net.hosts[:2])
    argv = [sys.executable, "submit.py", "swept", record, hosts, str(net.key), str(net.known_hosts)]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"begun\n"
    time.sleep(chance.uniform(0, 3) if chance.random() < 0.8 else chance.uniform(3, 9))
    process.send_signal(signal.SIGKILL)
    submitted = process.communicate()[0] == b"submitted\n"
    print(f"seed {seed}: {'submitted' if submitted else 'cut'}, {[r.name for r in runs.runs()]}")
    if not runs.runs():
        assert not submitted
    else:
        run = Run("swept")
        until(lambda: run.status.over, 240)
        print(f"seed {seed}: {run.status.stage}")
        said = b"".join(run.output()).decode()
        assert run.status.stage == "finished" or not submitted, said
        ran = net[0].run(["sh", "-c", f"cat {record} 2>/dev/null || true"], user="root").stdout.split()
        assert run.status.stage in ("finished", "expired", "lost"), said
        if run.status.stage == "finished":
            assert sorted(map(int, ran)) == list(range(CALLS)), "each call has run once"
            assert run.result() == [2 * n for n in range(CALLS)]
            lines = said.splitlines()
            assert [line for line in lines if line.startswith("line")] == [f"line {n}" for n in range(10)]
            assert lines[-1] == "all done"
        else:
            assert ran == []
    until(lambda: not any(ours(host) for host in net), 120)
