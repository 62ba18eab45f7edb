"""What a real sbatch refuses is told in words: which setting is wrong, and what there is."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward.api.shell import SshTarget
from skyward.cli import main
from skyward.machines.ledger import read
from tests.support.slurm import Cluster


@sky.compute
def variable(name: str) -> str | None:
    return os.environ.get(name)


@pytest.mark.parametrize(
    ("settings", "spec", "expected"),
    [
        ({"partition": "gpuu"}, {}, "there is no partition gpuu. These exist: main, small, short, low, high"),
        ({"nodelist": "h9"}, {}, "a node in nodelist=h9 .* does not exist"),
        ({"constraint": "fast"}, {}, "no node has the feature constraint=fast"),
        ({"gres": "gpu:a100:9"}, {}, "no nodes of the partition .* have what is asked for"),
        ({}, {"memory_gb": 500}, "no nodes of the partition .* have what is asked for"),
        ({"options": {"no-such-option": "1"}}, {}, "this sbatch does not know one of the options"),
        ({}, {"accelerator": "H100"}, "nothing for 1 x H100"),
        ({}, {"accelerator": "A100:4"}, "2 x a100 on 3 nodes"),
    ],
)
def test_a_refusal_says_which_setting_is_wrong(
    cluster: Cluster, settings: dict[str, Any], spec: dict[str, Any], expected: str
) -> None:
    with pytest.raises(sky.SkywardError, match=expected):
        sky.Slurm(**settings).acquire(sky.Spec(**spec), "refused", 1, 60, lambda text: None)
    assert cluster.jobs() == []


def test_a_login_node_without_slurm_says_where_to_go(cluster: Cluster) -> None:
    """The first node stands for a host on which nobody has installed Slurm's commands."""
    network = cluster.network
    bare = cluster.nodes[0]
    bare.run(["sh", "-c", "mount -t tmpfs -o mode=755 tmpfs /etc/slurm"], user="root", check=False)
    target = SshTarget(bare.address, "sky", key=str(network.key), known_hosts=str(network.known_hosts))
    try:
        with pytest.raises(sky.SkywardError, match=r'no cluster that they belong to.*login="user@login"'):
            sky.Slurm(login=target).acquire(sky.Spec(), "nowhere", 1, 60, lambda text: None)
        assert read("nowhere") is None
    finally:
        bare.run(["umount", "/etc/slurm"], user="root")


def test_a_node_in_drain_is_named_while_the_job_waits(cluster: Cluster) -> None:
    told: list[str] = []
    with (
        cluster.down(cluster.nodes[2]),
        pytest.raises(sky.errors.NoCapacity, match="ReqNodeNotAvail, UnavailableNodes:h3") as caught,
    ):
        sky.Slurm(nodelist="h3", wait=3).acquire(sky.Spec(), "drained", 1, 60, told.append)
    assert "Give sky.Slurm(wait=...) more" in str(caught.value)
    assert "region" not in str(caught.value)
    assert any("waiting: ReqNodeNotAvail, UnavailableNodes:h3" in text for text in told)
    assert cluster.jobs() == []


def test_a_controller_that_does_not_answer_is_named(cluster: Cluster) -> None:
    pid = cluster.login.read("/run/slurmctld.pid").strip()
    cluster.admin("kill", pid)
    try:
        with pytest.raises(sky.SkywardError, match="Slurm's controller does not answer"):
            sky.Slurm().find()
    finally:
        cluster.admin("sh", "-c", f"while kill -0 {pid} 2>/dev/null; do sleep 0.1; done; /usr/sbin/slurmctld")
        cluster.resume()


def test_nodes_without_a_python_are_named_as_the_reason(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pythons = ["/usr/bin/python3*", "/usr/local/bin/python3*"]
    with Cluster(cache, 1, hide=pythons) as bare:
        for name, value in bare.environ.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(sky.SkywardError, match=r"has failed: no node has a Python from 3\.8 on"):
            sky.Slurm().acquire(sky.Spec(), "no-python", 1, 60, lambda text: None)
        assert bare.jobs() == []


def test_nodes_that_cannot_reach_the_program_are_told_with_its_addresses(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skyward.setup.joined.arrivals.addresses", lambda: [("", "192.0.2.1")])
    with pytest.raises(sky.SkywardError, match=r'not join in time.* of 192\.0\.2\.1, 127.*login="user@login"'):
        sky.Slurm().acquire(sky.Spec(), "unreached", 1, 1, lambda text: None)


def test_a_node_whose_setup_fails_is_told_with_the_setting(cluster: Cluster) -> None:
    with pytest.raises(sky.SkywardError, match=r"has failed: what sky\.Slurm has in modules= or setup= failed"):
        sky.Slurm(modules=["no-such-module"]).acquire(sky.Spec(), "no-module", 1, 60, lambda text: None)


def test_what_setup_sets_is_there_in_bodies(cluster: Cluster) -> None:
    provider = sky.Slurm(setup="export FROM_SETUP=1", python="/usr/bin/python3")
    with sky.ComputePool(provider=provider, nodes=1, console=False) as pool:
        assert variable("FROM_SETUP") >> pool == "1"


def test_offers_say_how_many_nodes_there_are_and_how_many_are_idle(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["offers", "--provider", "slurm", "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert any(re.match(r"main: 3 nodes, \d idle, time limit ", row["name"]) for row in found), found
    assert all(row["hourly_cost"] == 0 and row["vcpus"] >= 1 and row["memory_gb"] > 0 for row in found)
    assert main(["offers", "--provider", "slurm", "--accelerator", "MI300X"]) == 1
    assert "not available:\n  Slurm: " in capsys.readouterr().out
