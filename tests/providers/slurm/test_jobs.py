"""Jobs as squeue lists them, and what waiting means."""

from __future__ import annotations

import math
import time

import pytest

from skyward.providers.slurm.jobs import Job, comment, expand, job_name, never, parse_jobs, waiting


@pytest.mark.parametrize(
    ("short", "names"),
    [
        ("h[1-3]", ["h1", "h2", "h3"]),
        ("gpu[01-02,07],login", ["gpu01", "gpu02", "gpu07", "login"]),
        ("rack[1-2]node[08-09]", ["rack1node08", "rack1node09", "rack2node08", "rack2node09"]),
        ("h1-0d7219,h2-0d7219", ["h1-0d7219", "h2-0d7219"]),
        ("", []),
        ("(null)", []),
    ],
)
def test_shortened_lists_of_nodes_are_expanded(short: str, names: list[str]) -> None:
    assert expand(short) == names


def test_jobs_of_pools_are_told_from_others() -> None:
    said = (
        f"12|RUNNING|None|1794813042|1794814842|2|h[1-2]|30:00|{job_name('a-b1')}|{comment('a-b1', 1794820000.4)}\n"
        f"13|PENDING|Priority|N/A|N/A|1||1-00:00:00|{job_name('lost-comment')}|(null)\n"
        f"14|RUNNING|None|N/A|N/A|1|h3|UNLIMITED|renamed|site=x {comment('b-c2', 5)} y|z\n"
        "15|RUNNING|None|N/A|N/A|1|h3|UNLIMITED|somebody-elses|(null)\n"
        f"16|RUNNING|None|N/A|N/A|1|h3|UNLIMITED|evil|{comment('../../etc', 5)}\n"
        "slurm_load_jobs error: something\n"
    )
    first, second, third = parse_jobs(said)
    assert (first.id, first.pool, first.nodes, first.expires) == ("12", "a-b1", ("h1", "h2"), 1794820000)
    assert (first.start, first.end, first.limit, first.reason) == (1794813042, 1794814842, 1800, "")
    assert first.runs
    assert not first.waits
    assert (second.pool, second.expires, second.limit, second.start) == ("lost-comment", None, 86400, None)
    assert second.waits
    assert (third.pool, third.limit) == ("b-c2", math.inf)


@pytest.mark.parametrize(
    ("state", "waits", "runs", "over"),
    [
        ("PENDING", True, False, False),
        ("CONFIGURING", True, False, False),
        ("RUNNING", False, True, False),
        ("SUSPENDED", False, True, False),
        ("COMPLETING", False, False, False),
        ("COMPLETED", False, False, True),
        ("NODE_FAIL", False, False, True),
        ("PREEMPTED", False, False, True),
        ("TIMEOUT", False, False, True),
        ("REQUEUED", True, False, False),
    ],
)
def test_a_job_waits_runs_or_is_over(state: str, waits: bool, runs: bool, over: bool) -> None:
    job = Job("1", state)
    assert (job.waits, job.runs, job.over) == (waits, runs, over)


def test_why_a_job_waits_is_told_with_the_time_at_which_it_may_start() -> None:
    now = time.mktime((2026, 11, 16, 12, 0, 0, 0, 0, -1))
    assert waiting(Job("1", "PENDING", "Priority", now + 8400), now) == "waiting: Priority, estimated start 14:20"
    assert waiting(Job("1", "PENDING", "Resources", now + 90000), now) == (
        "waiting: Resources, estimated start 17 Nov 13:00"
    )
    assert waiting(Job("1", "PENDING", "Resources", None), now) == "waiting: Resources"
    assert waiting(Job("1", "PENDING", "", None), now) == "waiting: Slurm has not said why yet"
    assert waiting(Job("1", "CONFIGURING", ""), now) == "waiting: its nodes are being switched on"
    drained = "(ReqNodeNotAvail, UnavailableNodes:h3)"
    assert waiting(Job("1", "PENDING", drained), now) == "waiting: ReqNodeNotAvail, UnavailableNodes:h3"
    assert "put back into the queue" in waiting(Job("1", "REQUEUED", "BeginTime"), now)


@pytest.mark.parametrize(
    "reason",
    """PartitionNodeLimit PartitionTimeLimit PartitionConfig BadConstraints InvalidAccount QOSMaxNodePerJobLimit
    QOSMaxGRESPerJob AssocMaxWallDurationPerJobLimit QOSMaxWallDurationPerJobLimit AssocMaxNodePerJobLimit
    DependencyNeverSatisfied""".split(),
)
def test_a_job_that_will_never_start_is_told_with_what_to_do(reason: str) -> None:
    text = never(Job("7", "PENDING", reason))
    assert text.startswith(f"job 7 would never start: {reason}, which means that ")
    assert text.endswith(".")


@pytest.mark.parametrize(
    "reason",
    """Priority Resources QOSMaxJobsPerUserLimit QOSGrpNodeLimit AssocGrpGRES AssocMaxJobsLimit BeginTime Licenses
    QOSMaxCpuPerUserLimit ReqNodeNotAvail""".split(),
)
def test_what_may_change_is_waited_for(reason: str) -> None:
    assert never(Job("7", "PENDING", reason)) == ""


def test_the_end_of_a_job_is_told_in_words() -> None:
    assert "preempted" in Job("7", "PREEMPTED").ended()
    assert "time limit" in Job("7", "TIMEOUT").ended()
    assert "put back into the queue" in Job("7", "PENDING").ended()
    assert Job("7", "SOMETHING_NEW").ended() == "job 7 is something new"


def test_a_job_that_is_preempted_has_not_reached_its_time_limit() -> None:
    """Slurm sets the end of a job that it preempts to the end of the grace time."""
    assert not Job("1", "RUNNING", start=1000.0, end=2010.0, limit=7200.0).time_over(2000.0)
    assert Job("1", "RUNNING", start=1000.0, end=2200.0, limit=1200.0).time_over(2080.0), "its nodes were told so"
    assert Job("1", "TIMEOUT").time_over(0.0)
