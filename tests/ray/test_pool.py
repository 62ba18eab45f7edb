"""Pools on Ray, by its Jobs API: the client has neither Ray nor the cluster's Python."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward.errors import BootstrapError, CredentialsMissing, NoOffer, SkywardError
from skyward.providers.ray import provider as providers
from skyward.providers.ray.jobs import Busy, RayRefused
from skyward.setup.joined.arrivals import join_program
from skyward.testing import ProviderContract
from tests.support.leases import listening
from tests.support.ray_cluster import RayCluster


@sky.compute
def look() -> dict[str, Any]:
    """What a body finds around it."""
    import signal
    import socket

    return {
        "host": socket.gethostname(),
        "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "accelerators": sky.instance_info().accelerators,
        "inherited": sorted(name for name in os.environ if name.startswith(("RAY_", "PYTHONBREAKPOINT"))),
        "blocked": signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []),
        "child_code": os.waitstatus_to_exitcode(os.system("exit 3")),
        "oom": int(Path("/proc/self/oom_score_adj").read_text()),
        "cwd": os.getcwd(),
    }


class TestRay(ProviderContract):
    """The contract of all providers."""

    timeout = 120.0

    @pytest.fixture
    def provider(self, cluster: RayCluster) -> sky.Ray:
        return sky.Ray(cluster.url, token=cluster.token)


def test_nodes_are_machines_with_the_gpus_that_ray_gave_them(
    cluster: RayCluster, provider: sky.Ray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SEC-10, SEC-11: the secret with which machines join is in no command line, and in nothing that Ray shows."""
    opened = listening(monkeypatch)
    with sky.ComputePool(provider=provider, nodes=2, accelerator="A100", console=False) as pool:
        seen = look() @ pool
        listed = json.dumps(cluster.get("/api/jobs/"))
        (job,) = [job for job in cluster.get("/api/jobs/") if job["status"] == "RUNNING"]
        log = json.dumps(cluster.get(f"/api/jobs/{job['submission_id']}/logs"))
        shown = "".join(" ".join(process.argv) for host in cluster.network for process in host.processes())
    assert {each["host"] for each in seen} == {"h1", "h2"}, "each node is another machine, and only these have GPUs"
    assert [(each["gpus"], each["accelerators"]) for each in seen] == [("0", 1), ("0", 1)], "one of the two each"
    # what Ray sets for its own workers is not for bodies
    assert [each["inherited"] for each in seen] == [[], []]
    assert not any(each["blocked"] for each in seen), "Ray blocks SIGINT"
    assert [each["child_code"] for each in seen] == [3, 3]
    assert all(each["oom"] < 1000 for each in seen), "Ray makes its workers the first to be killed"
    # the secret by which machines join is nowhere that others see
    (arrivals,) = opened
    assert len(arrivals.text) > 40
    assert arrivals.text not in listed + log + shown


def test_two_nodes_on_one_machine_have_gpus_of_their_own(cluster: RayCluster) -> None:
    packed = sky.Ray(cluster.url, token=cluster.token, strategy="STRICT_PACK", resources={"CPU": 1, "GPU": 1})
    with sky.ComputePool(provider=packed, nodes=2, console=False) as pool:
        seen = look() @ pool
    assert len({each["host"] for each in seen}) == 1
    assert sorted(each["gpus"] for each in seen) == ["0", "1"]


def test_what_the_cluster_does_not_have_is_said_with_what_it_has(cluster: RayCluster, provider: sky.Ray) -> None:
    with pytest.raises(NoOffer) as refused, sky.ComputePool(provider=provider, nodes=2, vcpus=64, console=False):
        pass
    assert "2 x (64 CPU)" in str(refused.value)
    assert f"{cluster.network[1].address}: 4 CPU, 2 GPU" in str(refused.value)


class Clock:
    """A clock for the provider, which runs ahead when a test says so."""

    def __init__(self) -> None:
        self._ahead = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self._ahead

    time = staticmethod(time.time)

    def pass_if(self, due: bool, seconds: float) -> None:
        self._ahead += seconds if due else 0.0


def test_what_others_use_is_waited_for_and_then_said(
    cluster: RayCluster, provider: sky.Ray, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(providers, "time", clock)
    hoard = (
        "import ray, sys; ray.init('auto', log_to_driver=False, logging_level='ERROR')\n"
        "group = ray.util.placement_group([{'GPU': 2}] * 2, strategy='STRICT_SPREAD'); ray.get(group.ready())\n"
        "print('held', flush=True); sys.stdin.read()"
    )
    with cluster.client(hoard) as other:
        assert other.stdout is not None
        assert "held" in other.stdout.readline()
        few = sky.ComputePool(provider=provider, nodes=2, accelerator="A100", console=False, provision_timeout=300)
        few.on_event(lambda event: clock.pass_if("Ray has no room yet for 2 x " in str(event), 300))
        with pytest.raises(Busy, match=r"no room for 2 x (?s:.)*0 of 2 GPU"), few:
            pass
        other.communicate()


def test_a_token_that_is_missing_or_wrong_is_named(
    cluster: RayCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for token in (None, "wrong"):
        with pytest.raises(CredentialsMissing, match="RAY_AUTH_TOKEN"):
            with sky.ComputePool(provider=sky.Ray(cluster.url, token=token), console=False):
                pass
    monkeypatch.setenv("RAY_AUTH_TOKEN", cluster.token or "")
    assert sky.Ray(cluster.url).find() == []


def test_an_address_where_nothing_answers_is_named_with_what_to_do(cluster: RayCluster) -> None:
    for port in (9, 22):  # nothing, and something else
        address = f"http://{cluster.head.address}:{port}"
        with pytest.raises(RayRefused, match="port-forward") as refused:
            with sky.ComputePool(provider=sky.Ray(address), console=False):
                pass
        assert address in str(refused.value)


def test_a_job_that_fails_is_told_with_its_last_lines(provider: sky.Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyward.providers.ray.provider.driver_source", lambda: "print('hello')\n1 / 0\n")
    with pytest.raises(SkywardError, match=r"FAILED[\s\S]*hello[\s\S]*ZeroDivisionError"):
        with sky.ComputePool(provider=provider, console=False):
            pass


def test_nodes_that_cannot_reach_this_computer_are_told_of(provider: sky.Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    """It listens, but at an address that leads the nodes to themselves; they try for 3 seconds instead of 60."""
    hasty = join_program().replace("5.0, 60.0", "5.0, 3.0")
    assert hasty != join_program()
    monkeypatch.setattr("skyward.providers.ray.provider.join_program", lambda: hasty)
    with pytest.raises(BootstrapError, match="cannot connect to this computer"):
        with sky.ComputePool(provider=replace(provider, host="127.0.0.1"), console=False):
            pass
