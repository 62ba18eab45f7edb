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
    json.dumps(_model(*OPEN, events.PoolCost("p", math.inf, time=1.0)).summary(2.0), allow_nan=False)


def test_calls_that_are_too_short_to_be_seen_are_one_block_and_a_failure_among_them_shows() -> None:
    found: list[Event] = []
    for number in range(1000):
        found += _call(number, 0, 10 + number / 1000, 0.0005, "error" if number == 500 else "ok")
    model = _model(*OPEN, *found)
    (lane, other) = model.lanes(0.0, 100.0, 1000, 100.0)
    assert other["blocks"] == []
    assert sum(block[3] for block in lane["blocks"]) == 1000
    assert len(lane["blocks"]) < 30
    assert [block[4] for block in lane["blocks"]].count("error") == 1
    (near,) = [block for block in model.lanes(10.4999, 10.5006, 1000, 100.0)[0]["blocks"] if block[4] == "error"]
    assert near[6] == "c500"


def test_a_long_call_is_in_every_window_that_it_crosses_and_a_running_one_reaches_to_now() -> None:
    model = _model(*OPEN, *_call(1, 0, 5.0, 100.0), events.CallStarted("p", "c2", "g", 1, 0, 1, time=6.0))
    lanes = model.lanes(50.0, 60.0, 100, 200.0)
    assert [block[5] for block in lanes[0]["blocks"]] == ["f"]
    assert lanes[1]["blocks"][0][:5] == [0, 6.0, 200.0, 1, "running"]


def test_calls_that_run_at_the_same_time_have_rows_of_their_own() -> None:
    model = _model(*OPEN, *(events.CallStarted("p", f"c{i}", "f", 0, 0, 0, time=1.0 + i) for i in range(3)))
    assert [block[0] for block in model.lanes(0.0, 10.0, 100, 10.0)[0]["blocks"]] == [0, 1, 2]


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


def test_a_call_that_is_tried_again_stands_on_both_nodes() -> None:
    model = _model(
        *OPEN,
        events.CallStarted("p", "c1", "f", 0, 0, 0, time=1.0),
        events.NodeDown("p", 0, "lost", time=2.0),
        events.CallStarted("p", "c1", "f", 1, 1, 1, time=3.0),
        events.CallEnded("p", "c1", "f", 1, "ok", 1.0, 1, time=4.0),
    )
    assert [lane["blocks"][0][4] for lane in model.lanes(0.0, 10.0, 100, 10.0)] == ["lost", "ok"]
    assert model.summary(5.0)["done"] == 1


def test_a_hundred_nodes_and_a_hundred_thousand_calls_give_answers_of_a_bounded_size() -> None:
    model = PageModel("p")
    model.apply([events.PoolOpening("p", 100, "AWS", time=0.0)])
    for number in range(100_000):
        model.apply(_call(number, number % 100, number / 100, 0.9))
    whole = model.lanes(0.0, 1000.0, 1200, 1000.0)
    assert sum(len(lane["blocks"]) for lane in whole) <= 20_000
    assert len(json.dumps(whole)) < 2_500_000
    assert len(json.dumps(model.calls())) < 50_000
    assert len(json.dumps(model.summary(1000.0))) < 2_000
    assert len(json.dumps(model.lanes(500.0, 501.0, 1200, 1000.0))) < 60_000
