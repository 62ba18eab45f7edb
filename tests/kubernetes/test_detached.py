"""Detached runs in pods: the program runs in the first one, and the Job ends with it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest

from skyward.cli.main import main
from skyward.machines.ledger import histories
from skyward.pool.run import Run, take_note
from skyward.providers.kubernetes.manifests import rights
from tests.kubernetes.conftest import USER
from tests.support.kubernetes.cluster import Cluster
from tests.support.leftovers import watchdogs
from tests.support.waiting import until

PROGRAM = """
import os, time
import skyward as sky

@sky.compute
def square(x):
    return x * x, os.environ["HOSTNAME"]

if __name__ == "__main__":
    provider = sky.Kubernetes(template={user}, lease=20)
    with sky.ComputePool(provider=provider, nodes=2, grace=2, name="batch", console=False) as pool:
{body}
    print("the end", flush=True)
"""
WAIT = """
print("ready", [number for number, _ in square(3) @ pool], flush=True)
try:
    time.sleep(600)
finally:
    print("clean", flush=True)
"""

Submit = Callable[..., Run]


@pytest.fixture
def submit(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Submit:
    """Submits the program in a process of its own, which is killed when it has."""
    for name in ("state", "work"):
        (tmp_path / name).mkdir(mode=0o700)
    monkeypatch.setenv("SKYWARD_STATE", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path / "work")

    def start(body: str, *words: str, before: str = "") -> Run:
        lines = "\n".join(f"        {line}" for line in dedent(body).strip().splitlines())
        Path("train.py").write_text(PROGRAM.format(user=USER, body=lines))
        code = f"import os\n{before}\nfrom skyward.cli.main import main\nmain()\nos.kill(os.getpid(), 9)"
        argv = [sys.executable, "-c", code, "run", "--detach", "train.py", "--name", "grid", *words]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == -9, done.stderr
        assert "grid runs" in done.stdout, done.stderr
        return Run("grid")

    return start


def text_of(run: Run) -> str:
    return b"".join(run.output()).decode()


def test_a_run_goes_on_in_its_pods_when_whoever_submitted_it_is_killed(cluster: Cluster, submit: Submit) -> None:
    run = submit("for i in range(50):\n    print(i, *[n for n, _ in square(i) @ pool], flush=True)\ntime.sleep(3)")
    assert run.status.stage == "running"
    assert watchdogs() == []
    argv = [sys.executable, "-m", "skyward", "attach", "grid"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [*(f"{i} {i * i} {i * i}" for i in range(50)), "the end"]
    assert (cluster.items("jobs"), list(histories())) == ([], [])
    assert text_of(run) == done.stdout, "it is on this computer now"


def test_a_run_can_be_looked_at_and_stopped(
    cluster: Cluster,
    submit: Submit,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    run = submit(WAIT)
    until(lambda: "ready [9, 9]" in text_of(run), 60)
    (first, _) = sorted(pod["metadata"]["name"] for pod in cluster.items("pods"))
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("SKYWARD_STATE", str(tmp_path / "elsewhere"))
        take_note("grid", f"pod/{first}")
        assert "ready [9, 9]" in text_of(Run("grid"))
    assert main(["down", "--all", "--yes"]) == 1
    assert "a detached run has it" in capfd.readouterr().out
    assert main(["stop", "grid"]) == 0
    assert "grid is over: stopped" in capfd.readouterr().out
    assert "clean" in text_of(run)
    assert (cluster.items("jobs"), list(histories())) == ([], [])


def test_pods_end_by_themselves_when_nobody_comes_back(cluster: Cluster, submit: Submit) -> None:
    submit("pass", before="import skyward.pool.detached\nskyward.pool.detached._HOLD = 2.0")
    until(lambda: cluster.items("jobs")[0]["status"].get("succeeded") == 2, 120, "both pods end well")
    cluster.kubectl("delete", "job", cluster.items("jobs")[0]["metadata"]["name"])  # as its ttlSecondsAfterFinished


def test_it_is_refused_where_nothing_reaches_its_pods(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    cluster.kubectl("create", "namespace", "closed", check=False)
    rules = [
        {"apiGroups": [group], "resources": [resource], "verbs": [verb]} for verb, group, resource in rights(False)
    ]
    monkeypatch.setenv("KUBECONFIG", str(cluster.user("erin", "closed", rules)))
    monkeypatch.setenv("SKYWARD_STATE", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(PROGRAM.format(user=USER, body="        pass"))
    assert main(["run", "--detach", "train.py"]) != 0
    assert "a detached run needs the right to `create pods/exec`" in capfd.readouterr().err
    assert cluster.items("jobs", "closed") == []
