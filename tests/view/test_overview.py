from __future__ import annotations

from skyward.events import (
    CallEnded,
    CallStarted,
    Event,
    GroupProgress,
    NodeDown,
    NodeSample,
    NodeUp,
    PoolCost,
    PoolOpened,
    PoolOpening,
    Progress,
    QueueLength,
)
from skyward.view.overview import Overview


def followed(*events: tuple[float, Event]) -> Overview:
    overview = Overview(live=True)
    for now, event in ((0.0, PoolOpening("demo", 2, "AWS")), (10.0, PoolOpened("demo", 2, 4, 10.0)), *events):
        overview.follow(event, now)
    return overview


def shown(overview: Overview, now: float) -> list[str]:
    return ["  ".join(text for text, _ in row) for row in overview.rows(now)]


def test_the_view_says_how_many_calls_wait() -> None:
    overview = followed((11.0, QueueLength("demo", 1234)))
    assert "4 slots · 0 ok, 0 failed · 1,234 queued · " in shown(overview, 12.0)[0]
    overview.follow(QueueLength("demo", 0), 13.0)
    assert "queued" not in shown(overview, 14.0)[0]


def test_a_narrow_view_keeps_the_counts_whole() -> None:
    overview = followed((11.0, QueueLength("demo", 1234)))
    whole = overview.rows(12.0)[0][0][0]
    assert overview.rows(12.0, len(whole))[0][0][0] == whole
    assert overview.rows(12.0, len(whole) - 1)[0][0][0] == whole.replace("AWS · ", "")
    assert overview.rows(12.0, 60)[0][0][0] == "skyward demo · 2 nodes · 0 ok, 0 failed · 1,234 queued"
    assert overview.rows(12.0, 30)[0][0][0] == "0 ok, 0 failed · 1,234 queued"


def test_a_node_that_is_down_shows_no_progress_any_more() -> None:
    overview = followed((11.0, CallStarted("demo", "a", "fit", 0, 0)))
    overview.recall(Progress("demo", 0, 1, 10, {}, "a"), 12.0)
    assert any("1/10" in line for line in shown(overview, 12.0))
    overview.follow(NodeDown("demo", 0, "lost"), 13.0)
    assert not any("1/10" in line for line in shown(overview, 13.0))
    overview.follow(NodeUp("demo", 0), 14.0)
    overview.follow(CallStarted("demo", "b", "fit", 0, 0), 14.0)
    assert not any("1/10" in line for line in shown(overview, 14.0))
    overview.follow(CallEnded("demo", "b", "fit", 0, "ok", 1.0), 15.0)
    overview.recall(Progress("demo", 0, 1, 10, {}, "b"), 15.1)
    assert not any("1/10" in line for line in shown(overview, 16.0)), "a report that comes after its call has ended"


def test_what_was_spent_counts_every_price_for_as_long_as_it_held() -> None:
    overview = followed((10.0, PoolCost("demo", 3.6)), (1010.0, PoolCost("demo", 7.2)))
    assert "$7.20 an hour, $2.00 so far" in shown(overview, 1510.0)[0]
    overview.follow(PoolCost("demo", float("inf")), 1510.0)
    assert "an unknown price" in shown(overview, 1600.0)[0]


def test_a_node_that_is_full_of_short_calls_is_shown_as_busy() -> None:
    overview = followed()
    for i in range(400):  # two slots, each with a call of 9 ms every 10 ms
        overview.follow(CallStarted("demo", f"c{i}", "double", 0, 0), 20.0 + i * 0.005)
        overview.follow(CallEnded("demo", f"c{i}", "double", 0, "ok", 0.009), 20.0 + i * 0.005)
    busy, idle = shown(overview, 22.0)[1:]
    assert busy.startswith("●")
    assert "90% busy" in busy
    assert busy.endswith("double 200/s")
    assert idle.startswith("○")
    assert "0% busy" in idle
    assert "0% busy" in shown(overview, 30.0)[1]


def test_the_share_counts_what_of_long_calls_is_recent() -> None:
    overview = followed(
        (12.0, CallStarted("demo", "a", "fit", 0, 0)),
        (19.0, CallStarted("demo", "b", "fit", 0, 0)),
        (19.5, CallEnded("demo", "a", "fit", 0, "ok", 7.5)),
    )
    row = shown(overview, 20.0)[1]  # from 18 to 20: a for 1.5 s, b for 1 s, of 4 s in two slots
    assert "62% busy" in row


def test_the_time_left_goes_on_while_nothing_ends() -> None:
    overview = followed((20.0, GroupProgress("demo", 1, "train", 50, 100, 60.0)))
    assert shown(overview, 20.0)[1].strip() == "train: 50/100, 0.8/s, 1:00 left"
    assert shown(overview, 35.0)[1].strip() == "train: 50/100, 0.8/s, 45.0 s left"
    assert shown(overview, 99.0)[1].strip() == "train: 50/100, 0.8/s, 0.0 s left"


def test_a_group_that_has_failed_leaves_the_view() -> None:
    overview = followed(
        (20.0, GroupProgress("demo", 1, "train", 50, 100, 60.0)),
        (21.0, GroupProgress("demo", 1, "train", 50, 100, 61.0, failed=1, over=True)),
    )
    assert not any("train" in line for line in shown(overview, 22.0))


def test_samples_stay_beside_the_share() -> None:
    overview = followed((20.0, NodeSample("demo", 0, 98.0, 10**8, 1)))
    assert "98 % CPU      100 MB" in shown(overview, 20.0)[1]
