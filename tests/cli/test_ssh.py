"""`sky ssh`: which node is meant, how it is reached, and what is said where ssh is not the way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import skyward as sky
from skyward import events
from skyward.api.provider import Machine
from skyward.api.shell import JoinTarget, PodTarget, SshTarget
from skyward.cli import main
from skyward.cli.ssh import chosen_node, ssh_command, target_of
from skyward.errors import InvalidArgument
from skyward.history.recorder import Recorder
from skyward.providers.slurm.jobs import SlurmMachine
from tests.support.contexts import pool_context
from tests.support.leases import unreached


@pytest.fixture(autouse=True)
def _state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYWARD_STATE", str(tmp_path / "state"))


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    """The history of a pool that runs."""
    opened = Recorder("lab")
    yield opened
    opened.close()


def sky_command(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "skyward", "ssh", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)


def placed(node: int, machine: str, **more: object) -> events.NodePlaced:
    return events.NodePlaced("lab", node, machine, "/w", **more)  # type: ignore[arg-type]


def test_a_node_of_this_computer_is_a_shell_where_bodies_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = tmp_path / "where"
    work.mkdir()
    monkeypatch.chdir(work)
    with sky.ComputePool(provider=sky.Local(), nodes=2, name="shells", console=False):
        monkeypatch.chdir(tmp_path)
        assert sky_command("shells", "1", "--", "pwd").stdout == f"{work}\n"
        assert sky_command("shells", "--", "exit 7").returncode == 7
        assert sky_command("--", "echo $((40 + 2)) | cat").stdout == "42\n"
        missing = sky_command("shells", "--", "no-such-program-here")
        assert missing.returncode == 127
        assert "no such program" in missing.stderr
        about = json.loads(sky_command("shells", "0", "--json").stdout)
        assert (about["node"], about["machine"], about["directory"]) == (0, "this computer", str(work))
        wrong = sky_command("shells", "2", "--", "true")
        assert wrong.returncode == 1
        assert "shells has no node 2. There are: 0 (this computer), 1 (this computer)." in wrong.stderr
    gone = sky_command("shells", "--", "true")
    assert gone.returncode == 1
    assert "shells is no longer running" in gone.stderr


def test_a_node_is_meant_by_its_number_or_by_its_machine() -> None:
    nodes = {0: placed(0, "sky@gpu1"), 1: placed(1, "gpu2"), 2: placed(2, "7"), 3: placed(3, "gpu2")}
    assert chosen_node("lab", nodes, None).node == 0
    assert chosen_node("lab", nodes, "3").node == 3
    assert chosen_node("lab", nodes, "gpu1").node == 0
    assert chosen_node("lab", nodes, "sky@gpu1").node == 0
    assert chosen_node("lab", nodes, "7").node == 2
    with pytest.raises(InvalidArgument, match="2 nodes on gpu2: say which"):
        chosen_node("lab", nodes, "gpu2")
    with pytest.raises(InvalidArgument, match="being opened"):
        chosen_node("lab", {}, None)


def test_the_options_are_those_of_the_pool_and_a_terminal_comes_on_top() -> None:
    target = SshTarget("10.0.0.7", "ada", 2222, "/k/id", "accept-new", "/k/known", False, "aws ssm x", ("AWS_TOKEN",))
    found = target_of(json.loads(json.dumps({**target.__dict__, "unknown": 1})))
    assert found == target
    argv = ssh_command(found, placed(1, "m", environment="/env"), ["ls", "a b"], terminal=False)
    assert argv[:2] == ["ssh", "-T"]
    for option in (
        "StrictHostKeyChecking=accept-new",
        'UserKnownHostsFile="/k/known"',
        "ProxyCommand=aws ssm x",
        "ForwardAgent=no",
        "none",
        "2222",
        "/k/id",
    ):
        assert option in argv
    assert argv[-2] == "10.0.0.7"
    assert argv[-1].endswith("sky /w /env ls 'a b'")
    settings = subprocess.run(
        [*ssh_command(SshTarget("h", config=False), placed(0, "h"), [], terminal=True)[:-3], "-G", "h"],
        capture_output=True, text=True, check=True,
    ).stdout.lower()  # fmt: skip
    assert "requesttty true" in settings or "requesttty yes" in settings
    assert "escapechar ~" in settings
    assert "batchmode yes" in settings


def test_a_history_that_names_an_option_as_its_host_is_refused() -> None:
    for host in ("-oProxyCommand=evil", "a b", "$(evil)", ""):
        with pytest.raises(InvalidArgument):
            target_of({"host": host})


def test_a_pod_is_entered_by_kubectl_exec_where_bodies_start(
    recorder: Recorder, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[events.Event] = []
    machine = Machine("skyward-a-0-x", pod=PodTarget("skyward-a-0-x", "research", "work"))
    pool_context(name="lab", emit=seen.append).tell_placed(0, machine, "/w", {"VIRTUAL_ENV": "/env"})
    recorder.record(seen[0])
    recorder.flush()
    assert main(["ssh", "lab", "--json", "--", "ls", "-l"]) == 0
    command = json.loads(capsys.readouterr().out)["command"]
    there = command.index("--")
    where = ["kubectl", "--context=work", "--namespace=research", "exec", "-i", "pod/skyward-a-0-x"]
    assert command[:there] == [*where, "--container=skyward"]
    assert command[there:][:3] == ["--", "sh", "-c"]
    assert command[-5:] == ["sky", "/w", "/env", "ls", "-l"]


def test_a_history_that_names_an_option_as_a_namespace_is_refused(recorder: Recorder) -> None:
    recorder.record(placed(0, "a", pod={"pod": "a", "namespace": "--token=x"}))
    recorder.flush()
    assert main(["ssh", "lab", "--print"]) == 1


def test_where_ssh_is_not_the_way_it_says_what_to_do_instead(
    recorder: Recorder, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = SlurmMachine("12/node3", joined=JoinTarget("lab", 0, "node3", unreached), job="12", node="node3")
    seen: list[events.Event] = []
    told = pool_context(name="lab", emit=seen.append)
    told.tell_placed(0, machine, "/w", {})
    told.tell_placed(1, None, "/w", {})
    recorder.record(seen[0])
    recorder.record(placed(1, "worker-9"))
    recorder.flush()
    assert main(["ssh", "lab", "0"]) == 1
    assert "srun --jobid=12 --nodelist=node3 --overlap --pty bash" in capsys.readouterr().err
    assert main(["ssh", "lab", "1"]) == 1
    said = capsys.readouterr().err
    assert "worker-9" in said
    assert "subprocess.run" in said


def test_a_node_that_has_moved_is_reached_where_it_is_now(
    recorder: Recorder, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder.record(placed(0, "old", ssh={"host": "old"}))
    recorder.record(placed(0, "new", ssh={"host": "new"}))
    recorder.flush()
    assert main(["ssh", "lab", "--print"]) == 0
    assert " -- new " in capsys.readouterr().out
    assert os.path.exists(recorder.path)
