from __future__ import annotations

import re
from typing import Any

from skyward.events import (
    CallEnded,
    CallStarted,
    Event,
    GroupProgress,
    NodePhase,
    NodeSample,
    PoolClosed,
    PoolOpened,
    PoolOpening,
    Progress,
)
from skyward.view.console import Cells


class Notebook:
    """Keeps what a notebook would show: the last state of each display, and the cell that it is in."""

    def __init__(self) -> None:
        self.cell = 1
        self.text: dict[str, str] = {}
        self.html: dict[str, str] = {}
        self.cells: dict[str, int] = {}
        self.updates = 0
        self._cells = Cells(self._show, lambda: self.cell)

    def hear(self, event: Event, now: float, sentence: str | None = None) -> bool:
        return self._cells.hear(event, sentence, now)

    def _show(self, id: str, html: str, text: str, update: bool) -> None:
        assert update == (id in self.text), "a display is made once, and updated afterwards"
        self.cells.setdefault(id, self.cell)
        self.text[id], self.html[id] = text, html
        self.updates += 1

    def shown(self, cell: int) -> list[str]:
        return [text for id, text in self.text.items() if self.cells[id] == cell]


def group(done: int, seconds: float, number: int = 1, **more: Any) -> GroupProgress:
    return GroupProgress("demo", number, "train", done, 10, seconds, **more)


def test_a_group_has_one_display_whose_last_state_stays() -> None:
    book = Notebook()
    for done in range(1, 10):
        assert book.hear(group(done, done * 1.0), done * 1.0)
    assert book.shown(1) == ["train: 9/10, 1.0/s, 1.0 s left"]
    book.cell = 2  # the group goes on while another cell runs
    book.hear(group(10, 10.0, over=True), 10.0)
    assert book.shown(1) == ["train: 10/10, 10.0 s"]
    assert book.shown(2) == []
    assert "width:100.0%" in next(iter(book.html.values()))


def test_what_is_done_at_once_is_not_shown() -> None:
    book = Notebook()
    book.hear(group(5, 0.25), 0.25)
    book.hear(group(10, 0.4, over=True), 0.4)
    assert book.text == {}


def test_a_group_that_failed_or_was_stopped_says_so() -> None:
    book = Notebook()
    book.hear(group(5, 1.0), 1.0)
    book.hear(group(5, 1.5, failed=1, over=True), 1.5)
    book.hear(group(5, 1.0, 2), 2.0)
    book.hear(group(5, 1.5, 2, over=True), 2.5)
    assert book.shown(1) == ["train: 6/10 (1 failed), stopped after 1.5 s", "train: 5/10, stopped after 1.5 s"]


def test_a_loop_of_groups_does_not_fill_the_cell() -> None:
    book = Notebook()
    for number in range(100):
        book.hear(group(5, 1.0, number), number * 2.0)
        book.hear(group(10, 1.5, number, over=True), number * 2.0 + 1)
    assert len(book.text) <= 8
    book.cell = 2
    book.hear(group(5, 1.0, 1000), 300.0)
    assert len(book.shown(2)) == 1


def test_time_goes_on_between_two_ends() -> None:
    book = Notebook()
    book.hear(group(5, 60.0), 60.0)
    assert not book.hear(NodeSample("demo", 0, 1.0, 1, 1), 75.0)
    assert book.shown(1) == ["train: 5/10, 0.1/s, 45.0 s left"]


def test_reports_of_bodies_are_a_line_for_each_node() -> None:
    book = Notebook()
    for node in (0, 1):
        book.hear(CallStarted("demo", f"c{node}", "fit", node, 0, node), 0.0)
    for step in range(1, 101):
        for node in (0, 1):
            book.hear(Progress("demo", node, step, 100, {"loss": 1 / step}, f"c{node}", node), step * 0.01)
    assert book.updates < 20
    for node in (0, 1):
        book.hear(CallEnded("demo", f"c{node}", "fit", node, "ok", 1.0, node), 1.0)
    assert book.shown(1) == ["[node-0] 100/100 (100%) loss 0.01\n[node-1] 100/100 (100%) loss 0.01"]
    book.cell = 2
    book.hear(CallStarted("demo", "d", "fit", 1, 0, 1), 2.0)
    book.hear(Progress("demo", 1, 1, 2, {}, "d", 1), 2.0)
    assert book.shown(2) == ["[node-1] 1/2 (50%)"]


def test_very_many_short_bodies_do_not_flood_the_notebook() -> None:
    book = Notebook()
    for i in range(1000):
        now = i * 0.001
        book.hear(CallStarted("demo", f"c{i}", "fit", 0, 0, 0), now)
        book.hear(Progress("demo", 0, i, None, {}, f"c{i}", 0), now)
        book.hear(CallEnded("demo", f"c{i}", "fit", 0, "ok", 0.001, 0), now)
    assert book.updates < 30
    book.hear(NodeSample("demo", 0, 1.0, 1, 1), 2.0)
    assert book.shown(1) == ["[node-0] 999"]


def test_opening_is_one_line_that_changes() -> None:
    book = Notebook()
    book.hear(PoolOpening("demo", 2, "Local"), 0.0, "opening 2 nodes on Local")
    for i in range(20):
        assert book.hear(NodePhase("demo", 0, f"step {i}"), i * 0.1, f"node 0: step {i}")
    book.hear(PoolOpened("demo", 2, 2, 2.0), 2.0, "pool open: 2 nodes, 2 slots, 2.0 s")
    assert book.shown(1) == ["skyward: demo: open: 2 nodes, 2 slots, 2.0 s"]
    assert book.updates < 12
    assert not book.hear(NodePhase("demo", 0, "again"), 3.0, "node 0: again"), "later it is a sentence"


def test_a_pool_that_was_not_opened_says_so() -> None:
    book = Notebook()
    book.hear(PoolOpening("demo", 2, "Local"), 0.0, "opening 2 nodes on Local")
    book.hear(PoolClosed("demo", 2.0, 0), 2.0, "closed")
    assert book.shown(1) == ["skyward: demo: was not opened"]


def test_names_are_text_and_never_markup() -> None:
    book = Notebook()
    book.hear(GroupProgress("<b>demo", 1, "<script>alert(1)</script>", 5, 10, 1.0), 1.0)
    book.hear(Progress("demo", 0, 1, 2, {"<img src=x>": 1.0}, "c", 0), 1.0)
    page = "".join(book.html.values())
    assert "<script>" not in page
    assert "<img" not in page
    assert not re.search(r"\son\w+=", page)
