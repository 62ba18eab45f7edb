"""A controller that is slow, restarts or refuses: no job loses its place, and no program fails for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import skyward as sky
from skyward import errors
from skyward.api.shell import JoinTarget
from skyward.providers.slurm import jobs
from skyward.providers.slurm.commands import Commands, SlurmRefused
from skyward.providers.slurm.jobs import Job, SlurmMachine, end_machines, why_gone
from skyward.providers.slurm.provider import elsewhere
from skyward.setup.joined.arrivals import open_arrivals
from skyward.setup.joined.members import MachineLeft, Member
from tests.support.leases import unreached

Says = Callable[..., Path]

DOWN = "echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1"


def row(state: str, reason: str = "None", nodes: str = "1|c1") -> str:
    return f"echo '12|{state}|{reason}|N/A|N/A|{nodes}|30:00|skyward-p|skyward pool=p expires=1'"


@pytest.fixture
def says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Says:
    """Puts a program on the path that runs one line of shell each time, the last one ever after; gives its log."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(jobs, "pauses", lambda: iter([0.01] * 1000))

    def says(program: str, *lines: str) -> Path:
        log = tmp_path / f"{program}.log"
        cases = "".join(f"{number}) {line} ;;\n" for number, line in enumerate(lines[:-1]))
        script = f'#!/bin/sh\nn=$(cat {log} 2>/dev/null | wc -l)\necho "$*" >>{log}\n'
        (tmp_path / program).write_text(f"{script}case $((n)) in\n{cases}*) {lines[-1]} ;;\nesac\n")
        (tmp_path / program).chmod(0o755)
        return log

    return says


def commands() -> Commands:
    return Commands(None, 60.0, {})


def test_a_job_keeps_its_place_while_the_controller_restarts(says: Says) -> None:
    says("squeue", row("PENDING", "Priority"), DOWN, "echo 'no memory' >&2; exit 1", row("PENDING"), row("RUNNING"))
    scancel = says("scancel", "true")
    told: list[str] = []
    assert jobs.when_started(commands(), "12", None, told.append).nodes == ("c1",)
    silent = [text for text in told if "does not answer; job 12 keeps its place in the queue" in text]
    assert len(silent) == 2
    assert "Unable to contact slurm controller" in silent[0]
    assert not scancel.exists()


def test_slurm_is_asked_no_longer_than_the_job_may_wait(says: Says) -> None:
    says("squeue", DOWN)
    with pytest.raises(SlurmRefused, match="controller does not answer"):
        jobs.when_started(commands(), "12", 0.1, lambda text: None)


def test_a_pool_is_closed_although_slurm_does_not_answer_at_first(says: Says) -> None:
    says("squeue", DOWN, DOWN, row("COMPLETED"))
    receipt = jobs.end(commands(), "p", ["12"], True, False, lambda text: None)
    assert "Slurm has ended job 12" in str(receipt)


def test_a_cancel_that_the_controller_did_not_hear_is_repeated(says: Says, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "_AGAIN", 0.0)
    says("squeue", *[row("PENDING")] * 3, row("CANCELLED"))
    scancel = says("scancel", DOWN)
    assert jobs.end(commands(), "p", ["12"], False, False, lambda text: None) is not None
    assert scancel.read_text().splitlines() == ["12"] * 3


def test_closing_gives_up_when_slurm_does_not_answer_for_long(says: Says, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "_SILENCE", 0.1)
    says("squeue", DOWN)
    with pytest.raises(SlurmRefused, match="controller does not answer"):
        jobs.end(commands(), "p", ["12"], True, False, lambda text: None)


def test_a_computer_without_slurm_is_not_asked_twice(says: Says) -> None:
    log = says("squeue", "exit 127")
    with pytest.raises(errors.CloudRefused, match="there is no squeue"):
        jobs.end(commands(), "p", ["12"], False, False, lambda text: None)
    assert len(log.read_text().splitlines()) == 1


def test_no_option_is_used_that_slurm_before_20_02_does_not_know(says: Says) -> None:
    log = says("squeue", row("RUNNING"))
    assert [job.id for job in jobs.listed(commands())] == ["12"]
    assert "--me" not in log.read_text()
    assert " -u " in log.read_text()


def wanted(commands: Commands) -> None:
    jobs.check_wanted(commands, "p", ["12"], lambda text: None)


def test_a_pool_whose_job_somebody_cancels_gets_no_other_nodes(says: Says) -> None:
    says("squeue", row("COMPLETING"), row("COMPLETING"), row("CANCELLED"), "true")
    says("scontrol", "echo JobState=COMPLETING PreemptTime=None")
    slurm = commands()
    for _ in range(2):  # also when Slurm has forgotten the job
        with pytest.raises(sky.SkywardError, match="job 12 was cancelled, so the pool gets no other nodes"):
            wanted(slurm)


def test_a_job_that_the_pool_has_cancelled_itself_does_not_stop_other_nodes(says: Says) -> None:
    says("squeue", row("CANCELLED"))
    says("scancel", "true")
    slurm = commands()
    jobs.cancel(slurm, [Job("12", "RUNNING")])
    wanted(slurm)


@pytest.mark.parametrize("state", ["PREEMPTED", "NODE_FAIL", "FAILED", "RUNNING"])
def test_nodes_of_a_job_that_nobody_has_cancelled_are_replaced(says: Says, state: str) -> None:
    says("squeue", row(state))
    wanted(commands())


def test_nodes_of_a_job_that_is_just_being_preempted_are_replaced_at_once(says: Says) -> None:
    log = says("squeue", row("COMPLETING"))
    says("scontrol", "echo JobState=COMPLETING PreemptTime=2026-11-18T06:00:14")
    wanted(commands())
    assert len(log.read_text().splitlines()) == 1


def test_a_job_whose_prolog_fails_is_told_so_and_another_may_be_asked_for(says: Says) -> None:
    """Slurm cancels such a job by itself, which looks as if somebody had done it."""
    says("squeue", row("PENDING"), row("CANCELLED"))
    says("sinfo", "echo 'c1|drained|Prolog error'")
    slurm = commands()
    with pytest.raises(errors.BootstrapError, match="ended job 12, because the site's prolog failed on c1"):
        jobs.when_started(slurm, "12", None, lambda text: None)
    assert not slurm.final
    assert jobs.why_ended(slurm, "12", Job("12", "CANCELLED", nodes=("c1",))).endswith("prolog failed on c1")


def test_a_job_that_is_cancelled_while_it_waits_is_not_submitted_again(says: Says) -> None:
    says("squeue", row("PENDING"), row("CANCELLED"))
    slurm = commands()
    with pytest.raises(sky.SkywardError, match="job 12 was cancelled") as caught:
        jobs.when_started(slurm, "12", None, lambda text: None)
    assert not isinstance(caught.value, errors.BootstrapError), "which would be tried again"
    with pytest.raises(sky.SkywardError, match="gets no other nodes"):
        wanted(slurm)


@pytest.mark.parametrize(
    ("taken", "count", "nodelist", "exclude"),
    [
        ([], 2, "c[3-4]", None),
        ([], 1, None, "c1,c2"),  # either of them: sbatch refuses more names than nodes
        (["c3"], 1, "c4", "c3"),
        (["c1"], 1, None, "c1,c2"),
        (["c3", "c4"], 1, None, "c3,c4"),
    ],
)
def test_no_more_nodes_are_named_than_a_job_has(
    says: Says, taken: list[str], count: int, nodelist: str | None, exclude: str | None
) -> None:
    says("sinfo", "printf 'c1\\nc2\\nc3\\nc4\\n'")
    made = elsewhere(sky.Slurm(nodelist="c[3-4]"), commands(), taken, count)
    assert (made.nodelist, made.exclude) == (nodelist, exclude)


def test_nobody_waits_for_machines_of_a_job_that_slurm_says_is_over(says: Says) -> None:
    says("squeue", row("COMPLETED"))
    says("sinfo", "true")
    arrivals = open_arrivals("p", ttl=60, lease=60, host="127.0.0.1")
    try:
        arrivals._members[0] = Member(0, "c1", "", lambda member, message: None)
        target = arrivals._target(arrivals._members[0])
        machine = SlurmMachine("12/c1", joined=target, job="12", node="c1")
        assert why_gone(commands(), arrivals, [machine]) == {"12/c1": "job 12 is over"}
        with pytest.raises(MachineLeft, match="job 12 is over"):  # upon which closing says nothing of it
            target.open_shell().run(["true"])
    finally:
        arrivals.close()


def test_a_job_that_was_put_back_into_the_queue_is_cancelled_with_the_machines_that_it_had(says: Says) -> None:
    """It would start again some day, take as many nodes as before, and nobody would let them in."""
    says("squeue", row("PENDING", "BeginTime", nodes="2|"))
    scancel = says("scancel", "true")
    arrivals = open_arrivals("p", ttl=60, lease=60, host="127.0.0.1")
    slurm = commands()
    try:
        machine = SlurmMachine("12/c1", joined=JoinTarget("p", 0, "c1", unreached), job="12", node="c1")
        end_machines(slurm, arrivals, [machine])
    finally:
        arrivals.close()
    assert scancel.read_text() == "12\n"
    wanted(slurm)  # the pool itself has cancelled it, so it gets other nodes
