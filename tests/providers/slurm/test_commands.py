"""What Slurm's commands are given, and what is read from them: programs on the path stand for them."""

from __future__ import annotations

from pathlib import Path

import pytest

import skyward as sky
from skyward.api.secret import slurm_environment
from skyward.providers.slurm.commands import Commands, SlurmRefused
from skyward.providers.slurm.jobs import granted
from skyward.providers.slurm.provider import other_partitions

_PARTITIONS = "main|(null)\ngpu|gpu:a100:4(S:0-1)\nsmall|gpu:2\nold|gpu:v100:4\n"


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    """Commands of a cluster: each writes its environment down, and says what is in a file of its name."""
    for name in ("squeue", "sinfo", "scontrol"):
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\nenv >{tmp_path}/seen\ncat {tmp_path}/{name}.txt\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return Commands(None, 10, {})


def test_commands_of_slurm_see_no_secret(commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SEC-13."""
    for name in ("HF_TOKEN", "DATABASE_URL", "SLURM_JWT", "SBATCH_ACCOUNT", "SLURM_CONF", "MY_OWN"):
        monkeypatch.setenv(name, "canary")
    (tmp_path / "sinfo.txt").touch()
    commands.run("sinfo")
    seen = {line.partition("=")[0] for line in (tmp_path / "seen").read_text().splitlines() if "canary" in line}
    assert seen == {"SLURM_JWT", "SBATCH_ACCOUNT", "SLURM_CONF"}
    assert slurm_environment({"http_proxy": "http://me:pw@proxy", "LC_ALL": "C"}) == {"LC_ALL": "C"}


def test_a_refusal_names_the_partitions_that_have_the_gpus(
    commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sinfo.txt").write_text(_PARTITIONS)
    assert other_partitions(sky.Slurm(), commands, "gpu:a100:2") == (
        "These partitions have gpu:a100:2: gpu. Give sky.Slurm(partition=...) one."
    )
    assert "small" in other_partitions(sky.Slurm(), commands, "gpu:2")
    assert other_partitions(sky.Slurm(), commands, "gpu:h100:1") == ""
    assert other_partitions(sky.Slurm(), commands, None) == ""
    assert other_partitions(sky.Slurm(partition="main"), commands, "gpu:a100:2") == ""


@pytest.mark.parametrize(
    ("said", "spec", "expected"),
    [
        (
            "JobId=7 NumCPUs=2 ReqTRES=cpu=9,mem=9G,node=9 AllocTRES=cpu=2,mem=1000M,node=2,billing=2 Socks=*",
            sky.Spec(),
            " with 1 CPU and 500MB of memory each; vcpus= and memory_gb= ask for more",
        ),
        ("TRES=cpu=16,mem=64G,node=1,gres/gpu=2", sky.Spec(), " with 16 CPUs and 64GB of memory each"),
        ("TRES=cpu=1,node=1", sky.Spec(vcpus=1), " with 1 CPU each"),
        ("slurm_load_jobs error", sky.Spec(), ""),
    ],
)
def test_what_nodes_got_is_told(commands: Commands, tmp_path: Path, said: str, spec: sky.Spec, expected: str) -> None:
    (tmp_path / "scontrol.txt").write_text(said)
    assert granted(commands, "7", spec) == expected


def test_a_command_that_fails_is_an_error(commands: Commands) -> None:
    with pytest.raises(SlurmRefused):
        commands.run("squeue")
