"""Events survive their line in the history; lines of other versions are read as far as they are known."""

from __future__ import annotations

import json
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from skyward import events
from skyward.history.lines import line, parsed

_EVENTS = (
    events.PoolOpening("p", 4, "AWS", "gpu"),
    events.NodePhase("p", None, "asking for machines"),
    events.NodePlaced(
        "p", 1, "gpu1", "/work", "/env", {"host": "gpu1", "port": 22, "config": True}, "srun", False, {"pod": "a"}
    ),
    events.PoolOpened("p", 4, 8, 1.5),
    events.PoolCost("p", 3.2),
    events.QueueLength("p", 12),
    events.CallStarted("p", "c1", "train", 2, 1, 2, "3, rate=0.1"),
    events.CallEnded("p", "c1", "train", 2, "error", 0.5, 2, "ValueError: no"),
    events.Output("p", 1, "stderr", "täxt\t\x1b[31m", "c1", rank=1),
    events.Log("p", 1, "app", 20, 5.0, "text", "a.py", 3, "f", "c1", 1),
    events.Progress("p", 1, 3.0, 10.0, {"loss": 0.25}, "c1", 1),
    events.GroupProgress("p", 1, "map", 3, 10, 2.0),
    events.Warned("p", 1, ("builtins:UserWarning", "builtins:Warning"), "text", "a.py", 3, "warn()", "c1", 1),
    events.NodeSample("p", 1, 50.0, 1 << 30, 2, (events.GpuSample(0, "A100", 99.0, 5, 10, None, 300.0),)),
    events.NodeDown("p", 1, "lost"),
    events.NodeLeaving("p", 1, 120.0),
    events.NodeUp("p", 1),
    events.Notice("p", "a sentence", "warning"),
    events.PoolClosing("p"),
    events.PoolClosed("p", 10.0, 7),
)


def test_every_kind_of_event_comes_back_as_it_was() -> None:
    assert {type(event).__name__ for event in _EVENTS} == set(events.__all__) - {
        "Event",
        "GpuSample",
        "BroadcastStalled",
    }
    for event in _EVENTS:
        written = line(event)
        assert written.count(b"\n") == 1
        assert written.endswith(b"\n")
        assert parsed(written) == event


def test_metrics_of_any_size_come_back() -> None:
    """`total_flos` of a trainer is beyond 1e18 after some hours."""
    for value in (3.2e18, -1e300, 10**19, float("inf")):
        event = events.Progress("p", 1, 3.0, 10.0, {"loss": 0.25, "total_flos": value}, "c1", 1)
        assert parsed(line(event)) == event
    assert parsed(line(events.Progress("p", 1, 3.0, 10.0, {"loss": 10**30}))) is None


def test_texts_with_quotes_and_control_characters_come_back() -> None:
    ended = events.CallEnded("p", "c1", "train", 2, "ok", 0.5, 2, "", 1, 'ü"3\n', time=100.0)
    for event in (
        ended,
        replace(ended, rank=None, outcome="error", error='"no"\n\\'),
        events.Output("p", 0, "stdout", 'say "no"\x00\x1b\\\ud800'),
    ):
        assert parsed(line(event)) == event


def test_a_line_of_a_newer_version_is_read_as_far_as_it_is_known() -> None:
    known = json.loads(line(events.NodeUp("p", 1, time=3.0)))
    assert parsed(json.dumps({**known, "colour": "red"}).encode()) == events.NodeUp("p", 1, time=3.0)
    assert parsed(json.dumps({**known, "event": "NodeDancing"}).encode()) is None


def test_a_line_without_a_field_that_is_wanted_gives_nothing() -> None:
    assert parsed(b'{"event": "NodeUp", "pool": "p"}') is None


@given(st.binary(max_size=200))
def test_nonsense_gives_nothing(text: bytes) -> None:
    assert parsed(text) is None


def test_a_very_long_line_of_output_is_cut() -> None:
    event = parsed(line(events.Output("p", 0, "stdout", "x" * 1_000_000)))
    assert isinstance(event, events.Output)
    assert len(event.text) < 70_000
    assert event.text.endswith(" ...")
