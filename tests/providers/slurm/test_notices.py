"""When a node of Slurm is told that it is to be taken away."""

from __future__ import annotations

from pathlib import Path

from skyward.providers.slurm.notices import wait


class Clock:
    """A clock that goes on while somebody waits."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def waited(environ: dict[str, str], asked: list[str]) -> tuple[float, float]:
    clock = Clock()
    left = wait(environ, clock, clock.sleep, lambda job: asked.pop(0))
    return left, clock.now


def test_bodies_are_told_two_minutes_before_the_time_limit() -> None:
    left, now = waited({"SKYWARD_JOB_END": "1003600", "SLURM_JOB_ID": "7"}, ["1003600"])
    assert (left, now) == (120, 1003480)


def test_in_a_short_job_they_are_told_when_a_quarter_of_the_time_is_left() -> None:
    left, now = waited({"SKYWARD_JOB_END": "1000060"}, [""])
    assert (left, now) == (15, 1000045)


def test_a_limit_that_was_raised_counts() -> None:
    left, now = waited({"SKYWARD_JOB_END": "1003600"}, ["1007200", "1007200"])
    assert (left, now) == (120, 1007080)


def test_sigterm_is_told_at_once_whatever_the_limit(tmp_path: Path) -> None:
    notice = tmp_path / "notice"
    notice.write_text("1000030.0")
    left, now = waited({"SKYWARD_JOB_END": "1003600", "SKYWARD_NOTICE": str(notice)}, [])
    assert (left, now) == (30, 1000000)
