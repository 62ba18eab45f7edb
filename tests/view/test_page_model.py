"""What the page is told: small answers, however many nodes, calls and lines there are."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

from skyward import events
from skyward.events import Event
from skyward.view.page.model import PageModel


def _model(*found: Event) -> PageModel:
    model = PageModel("p")
    model.apply(found)
    return model


def _call(
    number: int, node: int, start: float, seconds: float, outcome: str = "ok", name: str = "f", error: str = ""
) -> Iterator[Event]:
    yield events.CallStarted("p", f"c{number}", name, node, 0, node, f"{number}", time=start)
    yield events.CallEnded("p", f"c{number}", name, node, outcome, seconds, node, error, time=start + seconds)  # type: ignore[arg-type]


OPEN = (events.PoolOpening("p", 2, "Local", time=0.0), events.PoolOpened("p", 2, 2, 1.0, time=1.0))


def test_the_top_of_the_page_counts_nodes_calls_and_money() -> None:
    model = _model(
        *OPEN,
        events.PoolCost("p", 3.6, time=0.0),
        *_call(1, 0, 2.0, 1.0),
        *_call(2, 1, 2.0, 1.0, "error"),
        events.CallStarted("p", "c3", "f", 0, 0, 0, time=4.0),
        events.GroupProgress("p", 1, "map", 3, 10, 2.0, time=4.0),
        events.NodeDown("p", 1, "lost", time=5.0),
    )
    found = model.summary(10.0)
    assert (found["state"], found["nodes"], found["up"]) == ("open", 2, 1)
    assert (found["running"], found["done"], found["failed"]) == (1, 1, 1)
    assert math.isclose(found["cost"], 0.01)
    (group,) = found["groups"]
    assert group == {"name": "map", "done": 3, "failed": 0, "total": 10, "left": 7 / 1.5, "rate": 1.5, "over": False}


def test_a_price_that_is_not_known_is_no_number_in_the_answer() -> None:
    found = _model(*OPEN, events.PoolCost("p", math.inf, time=1.0)).summary(2.0)
    json.dumps(found, allow_nan=False)
    assert found["unpriced"]


def test_calls_that_are_too_short_to_be_seen_are_one_block_and_a_failure_among_them_shows() -> None:
    found: list[Event] = []
    for number in range(1000):
        found += _call(number, 0, 10 + number / 1000, 0.0005, "error" if number == 500 else "ok")
    model = _model(*OPEN, *found)
    blocks = model.lanes(0.0, 100.0, 1000, 100.0)["blocks"]
    assert blocks[1] == []
    assert sum(block[3] for block in blocks[0]) == 1000
    assert len(blocks[0]) < 30
    assert [block[4] for block in blocks[0]].count("error") == 1
    assert sum(block[7] for block in blocks[0]) == 1
    near = model.lanes(10.4999, 10.5006, 1000, 100.0)["blocks"][0]
    assert [block[6] for block in near if block[4] == "error"] == ["c500"]


def test_a_long_call_is_in_every_window_that_it_crosses_and_a_running_one_reaches_to_now() -> None:
    model = _model(*OPEN, *_call(1, 0, 5.0, 100.0), events.CallStarted("p", "c2", "g", 1, 0, 1, time=6.0))
    blocks = model.lanes(50.0, 60.0, 100, 200.0)["blocks"]
    assert [block[5] for block in blocks[0]] == ["f"]
    assert blocks[1][0][:5] == [0, -44.0, 150.0, 1, "running"]


def test_calls_that_run_at_the_same_time_have_rows_of_their_own() -> None:
    model = _model(*OPEN, *(events.CallStarted("p", f"c{i}", "f", 0, 0, 0, time=1.0 + i) for i in range(3)))
    assert [block[0] for block in model.lanes(0.0, 10.0, 100, 10.0)["blocks"][0]] == [0, 1, 2]


def test_calls_are_found_by_name_argument_error_node_and_outcome() -> None:
    model = _model(
        *OPEN,
        *_call(1, 0, 1.0, 1.0, name="train"),
        *_call(2, 1, 2.0, 1.0, "error", "train", "Traceback\nValueError: bad luck"),
        *_call(3, 1, 3.0, 1.0, name="score"),
    )
    assert [row["id"] for row in model.calls()] == ["c3", "c2", "c1"]
    assert [row["id"] for row in model.calls("TRAIN")] == ["c2", "c1"]
    assert [row["id"] for row in model.calls("bad luck")] == ["c2"]
    assert [row["id"] for row in model.calls(outcome="failed")] == ["c2"]
    assert [row["id"] for row in model.calls(node=1)] == ["c3", "c2"]
    assert [row["id"] for row in model.calls(before=2, limit=1)] == ["c2"]
    assert model.calls()[1]["why"] == "ValueError: bad luck"


def test_a_call_has_its_output_and_its_error() -> None:
    line = events.Output("p", 0, "stdout", "hello", "c1", time=1.5)
    model = _model(*OPEN, *_call(1, 0, 1.0, 1.0, "error", error="ValueError: no"), line)
    found = model.call("c1")
    assert found is not None
    assert found["error"] == "ValueError: no"
    assert [each["text"] for each in found["output"]] == ["hello"]
    assert model.call("c9") is None


def test_output_is_searched_and_older_lines_can_be_had() -> None:
    model = _model(*OPEN, *(events.Output("p", i % 2, "stdout", f"line {i}") for i in range(10)))
    assert [each["text"] for each in model.output(limit=2)] == ["line 9", "line 8"]
    assert [each["text"] for each in model.output(before=8, limit=2)] == ["line 7", "line 6"]
    assert [each["text"] for each in model.output("LINE 3")] == ["line 3"]
    assert [each["text"] for each in model.output(node=0, limit=1)] == ["line 8"]


def test_curves_are_thinned_and_keep_their_ends_and_peaks() -> None:
    found = [
        events.Progress("p", 0, float(i), None, {"loss": 100.0 if i == 7777 else 1.0}, "c1", 0) for i in range(9999)
    ]
    (curve,) = _model(*OPEN, *found).metrics()
    assert len(curve["points"]) == 300
    assert curve["points"][0][0] == 0
    assert curve["points"][-1][0] == 9998
    assert max(value for _, value in curve["points"]) == 100.0


def test_a_figure_that_is_no_number_is_left_out_of_the_curve() -> None:
    model = _model(*OPEN, events.Progress("p", 0, 1.0, None, {"loss": math.nan, "ok": 1.0}, "c1", 0))
    assert [curve["name"] for curve in model.metrics()] == ["ok"]


def test_curves_that_are_no_longer_kept_are_still_counted() -> None:
    found = [events.Progress("p", 0, 1.0, 2.0, {"loss": 1.0, "lr": 0.1}, f"c{i}", 0) for i in range(500) for _ in "ab"]
    curves = _model(*OPEN, *found).metrics()
    told = {(curve["by"], curve["name"], curve["of"]) for curve in curves}
    assert told == {("time", "progress", 500), ("step", "loss", 500), ("step", "lr", 500)}
    assert len(curves) == 800


def test_a_node_without_processes_does_not_end_its_memory_at_zero() -> None:
    model = _model(
        *OPEN,
        events.NodeSample("p", 0, 50.0, 1_000_000, 1, time=2.0),
        events.NodeSample("p", 0, 0.0, 0, 0, time=3.0),
        events.PoolClosed("p", 3.0, 1, 0, 0, time=3.5),
    )
    assert model.nodes()[0]["memory"] == [(2.0, 1_000_000)]
    assert len(model.nodes()[0]["cpu"]) == 2


def test_a_lost_call_ends_when_its_node_was_last_heard_not_when_the_loss_was_noticed() -> None:
    model = _model(
        *OPEN,
        events.CallStarted("p", "c1", "f", 0, 0, 0, time=1.0),
        *(events.NodeSample("p", 0, 50.0, 1_000_000, 1, time=float(at)) for at in range(2, 10)),
        events.NodeDown("p", 0, "lost", time=60.0),
        events.CallStarted("p", "c1", "f", 1, 1, 1, time=60.0),
    )
    assert model.lanes(0.0, 100.0, 1000, 100.0)["blocks"][0][0][:3] == [0, 1.0, 10.0]


def test_a_call_that_is_tried_again_stands_on_both_nodes() -> None:
    model = _model(
        *OPEN,
        events.CallStarted("p", "c1", "f", 0, 0, 0, time=1.0),
        events.NodeDown("p", 0, "lost", time=2.0),
        events.CallStarted("p", "c1", "f", 1, 1, 1, time=3.0),
        events.CallEnded("p", "c1", "f", 1, "ok", 1.0, 1, time=4.0),
    )
    blocks = model.lanes(0.0, 10.0, 100, 10.0)["blocks"]
    assert [blocks[node][0][4] for node in (0, 1)] == ["lost", "ok"]
    assert model.summary(5.0)["done"] == 1
    found = model.call("c1")
    assert found is not None
    assert [(each["node"], each["outcome"], each["seconds"]) for each in found["earlier"]] == [(0, "lost", 2.0)]


def test_a_call_that_was_cancelled_or_lost_is_as_long_as_it_ran() -> None:
    model = _model(
        *OPEN,
        events.CallStarted("p", "c1", "f", 0, 0, 0, time=1.0),
        events.CallEnded("p", "c1", "f", 0, "cancelled", 0.0, 0, time=4.0),
    )
    assert model.calls()[0]["seconds"] == 3.0
    assert model.summary(5.0)["cancelled"] == 1


def test_a_broadcast_is_one_row_and_a_band_across_its_nodes() -> None:
    begun = [events.CallStarted("p", f"b{n}", "train", n, 0, n, "5", "b0", 0.5, time=2.0) for n in range(2)]
    ended = events.CallEnded(
        "p", "b1", "train", 1, "error", 3.0, 1, "ValueError: no", 0, "5", group="b0", waited=0.5, time=5.0
    )
    model = _model(*OPEN, *begun, ended, *_call(1, 0, 6.0, 1.0))
    assert [row["id"] for row in model.calls()] == ["c1", "b1"]
    group = model.calls()[1]["broadcast"]
    assert (group["ranks"], group["running"], group["failed"], group["nodes"]) == (2, 1, 1, [0, 1])
    (band,) = model.lanes(0.0, 10.0, 100, 8.0)["broadcasts"]
    assert (band["began"], band["ended"]) == (2.0, 8.0)
    assert [row["id"] for row in model.calls(node=0)] == ["c1", "b0"]
    details = model.call("b0")
    assert details is not None
    assert [rank["outcome"] for rank in details["ranks"]] == ["running", "error"]
    assert details["waited"] == 0.5


def test_calls_that_wait_are_a_curve_above_the_lanes() -> None:
    model = _model(*OPEN, events.QueueLength("p", 7, time=2.0), events.QueueLength("p", 0, time=3.0))
    assert model.lanes(1.0, 10.0, 100, 10.0)["waiting"] == [(1.0, 7.0), (2.0, 0.0)]


def test_a_block_is_the_same_whether_it_was_kept_or_made_again() -> None:
    model, other = PageModel("p"), PageModel("p")
    for number in range(3000):
        found = [*_call(number, 0, 10 + number / 10, 30.0 if number % 100 == 0 else 0.05)]
        model.apply(found)
        other.apply(found)
        if number % 50 == 0:
            model.lanes(0.0, 400.0, 900, 400.0)
            model.lanes(100.0, 101.0, 900, 400.0)
    for start, end in ((0.0, 400.0), (100.0, 101.0), (123.4, 170.0)):
        assert model.lanes(start, end, 900, 400.0) == other.lanes(start, end, 900, 400.0)


def test_the_progress_of_a_call_is_a_curve_over_time_and_stands_beside_it() -> None:
    model = _model(
        *OPEN,
        events.CallStarted("p", "c1", "f", 0, 0, 0, "3", time=1.0),
        *(events.Progress("p", 0, step, 4.0, {}, "c1", 0, time=1.0 + step) for step in range(3)),
    )
    (curve,) = model.metrics()
    assert (curve["by"], curve["arguments"]) == ("time", "3")
    assert curve["points"] == [(0.0, 0.0), (1.0, 25.0), (2.0, 50.0)]
    assert model.calls()[0]["progress"] == (2, 4.0)


def test_colours_and_other_control_characters_are_left_out_of_the_output() -> None:
    model = _model(*OPEN, events.Output("p", 0, "stdout", "\x1b[31mred\x1b[0m\x00\x07 \u202eleft"))
    assert model.output()[0]["text"] == "red left"


def test_one_answer_is_small_however_long_lines_are() -> None:
    model = _model(*OPEN, *(events.Output("p", 0, "stdout", "x" * 60_000, "c1") for _ in range(300)))
    assert len(json.dumps(model.output(limit=1000))) < 300_000


def test_a_hundred_nodes_and_a_hundred_thousand_calls_give_answers_of_a_bounded_size() -> None:
    model = PageModel("p")
    model.apply([events.PoolOpening("p", 100, "AWS", time=0.0)])
    for number in range(100_000):
        model.apply(_call(number, number % 100, number / 100, 0.9))
    whole = model.lanes(0.0, 1000.0, 1200, 1000.0, 0, 30)
    assert sum(len(blocks) for blocks in whole["blocks"].values()) <= 12_000
    assert len(json.dumps(whole)) < 500_000
    assert len(json.dumps(model.calls())) < 50_000
    assert len(json.dumps(model.summary(1000.0))) < 2_000
    assert len(json.dumps(model.lanes(500.0, 501.0, 1200, 1000.0, 0, 30))) < 60_000
    assert len(json.dumps(model.nodes(0.0, 0, 24))) < 60_000


def test_a_process_that_died_is_an_event_and_the_address_of_the_page_is_none() -> None:
    why = "TaskCrashed: the process running f on node 1 exited with status 7. It was not started again."
    model = _model(
        *OPEN,
        events.Notice("p", "its page, for one browser: http://127.0.0.1:1/?token=abc", time=1.5),
        *_call(1, 1, 2.0, 1.0, "crashed", error=f"{why}\nWhat it wrote:\n  ..."),
        *_call(2, 0, 2.0, 1.0, "crashed"),
    )
    found = [(moment["node"], moment["kind"], moment["text"]) for moment in model.moments()]
    assert found[:2] == [
        (0, "warning", "the process that ran f died"),
        (1, "warning", "the process running f on node 1 exited with status 7"),
    ]
    assert "token" not in str(found)
