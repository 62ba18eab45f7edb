"""Calls that are too short to be seen while they run."""

from __future__ import annotations

from skyward.events import GroupProgress
from skyward.view.overview import Recent, group_text


def test_short_calls_are_told_by_how_many_there_are() -> None:
    recent = Recent()
    for step in range(500):
        recent.add("double", step / 100)
    assert recent.text(5.0) == "double 100/s"
    recent.add("half", 5.0)
    assert recent.text(5.0) == "double 100/s, half 0.5/s"


def test_an_idle_node_has_nothing_to_tell() -> None:
    recent = Recent()
    assert recent.text(0.0) == ""
    recent.add("double", 0.0)
    assert recent.text(3.0) == ""


def test_very_many_calls_are_kept_within_bounds() -> None:
    recent = Recent()
    for _ in range(150_000):
        recent.add("double", 1.0)
    assert recent.text(1.0) == "double 5e+04/s"


def test_a_group_counts_calls_that_have_failed_as_ended() -> None:
    assert (
        group_text(GroupProgress("p", 1, "train", 0, 200, 110.0, 88)) == "train: 88/200 (88 failed), 0.8/s, 2:20 left"
    )
    over = GroupProgress("p", 1, "train", 485, 500, 30.0, 15, over=True)
    assert group_text(over) == "train: 500/500 (15 failed), 30.0 s"
