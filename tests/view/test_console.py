from __future__ import annotations

import contextlib
import io
import math
import os
import pty
import re
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import TextIO

import pytest

from skyward.errors import InvalidArgument
from skyward.events import (
    CallEnded,
    CallStarted,
    Event,
    GroupProgress,
    NodeDown,
    NodePhase,
    NodeSample,
    NodeUp,
    Notice,
    Output,
    PoolClosed,
    PoolClosing,
    PoolCost,
    PoolOpened,
    PoolOpening,
    Progress,
)
from skyward.view.console import attach


def plain(*events: Event) -> list[str]:
    file = io.StringIO()
    console = attach("plain", file=file)
    for event in events:
        console(event)
    console.close()
    return file.getvalue().splitlines()


@pytest.fixture
def terminal() -> Iterator[TextIO]:
    outer, inner = pty.openpty()
    with open(inner, "w") as file:
        yield file
    os.close(outer)


def test_what_machines_cost_is_told_once_and_when_it_changes(terminal: TextIO) -> None:
    said = plain(
        PoolOpening("demo", 2, "AWS"),
        PoolCost("demo", 0.0669),
        PoolOpened("demo", 2, 4, 1.23),
        PoolCost("demo", 0.0669),
        PoolCost("demo", math.inf),
    )
    assert said[1] == "skyward: machines cost $0.0669 an hour"
    assert said[3:] == ["skyward: machines cost an unknown price"]
    console = attach("live", file=terminal)
    console(PoolOpening("demo", 2, "AWS"))
    console(PoolCost("demo", 0.0669))
    assert "AWS · 2 nodes · $0.0669 an hour, $0 so far · opening" in console.rows()[0][0][0]
    console.close()


def test_plain_lines_tell_the_story_of_a_pool() -> None:
    assert plain(
        PoolOpening("demo", 2, "Local"),
        NodePhase("demo", None, "finding machines"),
        NodePhase("demo", 0, "starting"),
        NodePhase("demo", 0, "starting"),
        NodePhase("demo", 1, "starting"),
        PoolOpened("demo", 2, 4, 1.23),
        CallStarted("demo", "c1", "fit", 0, 0),
        NodeSample("demo", 0, 98.0, 10**8, 1),
        Output("demo", 0, "stdout", "epoch 1 [bold]loss[/bold] 0.3"),
        Output("demo", 1, "stderr", "careful"),
        CallEnded("demo", "c1", "fit", 0, "ok", 0.5),
        CallEnded("demo", "c2", "fit", 1, "error", 0.5),
        NodeDown("demo", 1, "killed by SIGKILL"),
        NodeUp("demo", 1),
        Notice("demo", "one port is closed"),
        Notice("demo", "the disk is nearly full", "warning"),
        PoolClosing("demo"),
        PoolClosed("demo", 3.21, 12),
    ) == [
        "skyward: opening 2 nodes on Local",
        "skyward: finding machines",
        "skyward: node 0: starting",
        "skyward: node 1: starting",
        "skyward: pool open: 2 nodes, 4 slots, 1.2 s",
        "[node-0] epoch 1 [bold]loss[/bold] 0.3",
        "[node-1] careful",
        "skyward: node 1 is down: killed by SIGKILL",
        "skyward: node 1 is up again",
        "skyward: one port is closed",
        "skyward: warning: the disk is nearly full",
        "skyward: pool closed: 12 calls, 1 failed, 2 nodes, 3.2 s",
    ]


def test_failures_that_nobody_raises_have_a_line_each_and_then_a_count() -> None:
    def failed(number: int, **more: int) -> CallEnded:
        ended = ("demo", str(number), "train", 2, "error", 0.5)
        return CallEnded(*ended, error="ValueError: no", arguments=str(number), **more)  # type: ignore[arg-type]

    kept = [failed(number, failed_items=1) for number in range(13)]
    over = GroupProgress("demo", 1, "train", 0, 13, 1.0, 13, over=True)
    lines = plain(failed(99), *kept, over, failed(13, failed_items=1), PoolClosing("demo"))
    assert lines == [
        *(f"skyward: train({number}) failed on node 2: ValueError: no" for number in range(10)),
        "skyward: 3 more calls of train failed",
        "skyward: train(13) failed on node 2: ValueError: no",
    ]


def test_the_last_line_counts_calls_that_were_stopped() -> None:
    stopped = plain(PoolOpening("demo", 1, "SSH"), PoolOpened("demo", 1, 1, 1.0), PoolClosed("demo", 3.21, 9, 0, 2))
    assert stopped[-1] == "skyward: pool closed: 9 calls (7 done, 0 failed, 2 stopped), 1 node, 3.2 s"


def test_a_pool_that_did_not_open_is_not_said_to_have_closed() -> None:
    assert plain(PoolOpening("demo", 1, "SSH"), PoolClosing("demo"), PoolClosed("demo", 3.21, 0)) == [
        "skyward: opening 1 node on SSH",
        "skyward: pool was not opened, 3.2 s",
    ]


def test_plain_lines_go_to_the_stream_they_came_from(capsys: pytest.CaptureFixture[str]) -> None:
    console = attach("plain")
    console(PoolOpening("demo", 1, "Local"))
    console(Output("demo", 0, "stdout", "result"))
    console(Output("demo", 0, "stderr", "complaint"))
    console.close()
    out, err = capsys.readouterr()
    assert out == "[node-0] result\n"
    assert err == "skyward: opening 1 node on Local\n[node-0] complaint\n"


def test_a_progress_bar_becomes_few_plain_lines() -> None:
    bar = [Output("demo", 0, "stderr", f"{i} %", progress=True) for i in range(100)]
    assert plain(*bar, Output("demo", 0, "stderr", "100 %")) == ["[node-0] 0 %", "[node-0] 100 %"]
    assert plain(*bar) == ["[node-0] 0 %", "[node-0] 99 %"], "the last state of a bar that was cut off"


def test_lines_name_the_rank_where_nodes_have_several() -> None:
    assert plain(
        PoolOpening("demo", 2, "Local", 2),
        Output("demo", 0, "stdout", "hello", rank=1),
        Output("demo", 1, "stderr", "careful", rank=2),
    )[1:] == ["[node-0 rank-1] hello", "[node-1 rank-2] careful"]
    assert plain(PoolOpening("demo", 1, "Local", "gpu"), Output("demo", 0, "stdout", "x", rank=3))[1:] == [
        "[node-0 rank-3] x"
    ]
    assert plain(PoolOpening("demo", 2, "Local", 1), Output("demo", 1, "stdout", "x", rank=1))[1:] == ["[node-1] x"]


def test_the_last_report_of_a_call_is_shown_when_it_ends_and_not_at_closing() -> None:
    file = io.StringIO()
    console = attach("plain", file=file)
    console(PoolOpening("demo", 1, "Local", 1))
    for number, (seconds, shown) in enumerate([(0.1, 1), (0.1, 1), (2.0, 2), (2.0, 3)]):
        console(CallStarted("demo", f"c{number}", "train", 0, 0, 0))
        for step in range(1, 21):
            console(Progress("demo", 0, float(step), 20.0, {}, f"c{number}", 0))
        console(CallEnded("demo", f"c{number}", "train", 0, "timeout", seconds, 0))
        assert file.getvalue().count("[node-0] 20/20 (100%)") == shown, "of short calls only now and then"
    console.close()


def test_the_progress_bars_of_two_ranks_of_a_node_do_not_mix() -> None:
    bars = [
        Output("demo", 0, "stderr", f"{rank}: {i} %", progress=True, rank=rank) for i in range(100) for rank in (0, 1)
    ]
    assert plain(PoolOpening("demo", 1, "Local", 2), *bars)[1:] == [
        "[node-0 rank-0] 0: 0 %",
        "[node-0 rank-1] 1: 0 %",
        "[node-0 rank-0] 0: 99 %",
        "[node-0 rank-1] 1: 99 %",
    ]


def test_the_view_says_which_ranks_of_a_node_run_a_call(terminal: TextIO) -> None:
    console = attach("live", file=terminal)
    try:
        console(PoolOpening("demo", 2, "Local", 2))
        console(PoolOpened("demo", 2, 4, 1.0))
        for rank in range(4):
            console(CallStarted("demo", f"c{rank}", "fit", rank // 2, 0, rank))
        console(CallEnded("demo", "c1", "fit", 0, "ok", 0.5, 1))
        console(Output("demo", 1, "stderr", "50 %", progress=True, rank=3))
        shown = ["".join(text for text, _ in row) for row in console.rows()]
        assert re.search(r"fit [\d.]+ s \(rank 0\)$", shown[1])
        assert re.search(r"fit ×2 [\d.]+ s \(ranks 2 3\)$", shown[2])
        assert shown[3].strip() == "rank-3 50 %"
    finally:
        console.close()


def test_twenty_thousand_lines_from_four_threads_arrive_in_order() -> None:
    file = io.StringIO()
    console = attach("plain", file=file)

    def work(node: int) -> None:
        for i in range(5_000):
            console(Output("demo", node, "stdout", f"line {i}"))

    threads = [threading.Thread(target=work, args=(node,)) for node in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    console.close()
    lines = file.getvalue().splitlines()
    assert len(lines) == 20_000
    for node in range(4):
        assert [line for line in lines if line.startswith(f"[node-{node}]")] == [
            f"[node-{node}] line {i}" for i in range(5_000)
        ]


def test_a_silent_console_writes_nothing_and_starts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    before = threading.active_count()
    for mode in (False, "silent"):
        console = attach(mode)
        console(PoolOpening("demo", 1, "Local"))
        console(Output("demo", 0, "stdout", "text"))
        console(PoolClosed("demo", 1.0, 1))
        assert threading.active_count() == before
        console.close()
        console.close()
    assert capsys.readouterr() == ("", "")


def test_an_unknown_mode_names_the_known_ones() -> None:
    with pytest.raises(InvalidArgument, match=r"console='plian'.*perhaps 'plain' was meant.*'auto', 'live'"):
        attach("plian")


def test_a_reader_that_went_away_does_not_break_the_pool() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with contextlib.suppress(BrokenPipeError), open(writing, "w") as file:
        console = attach("plain", file=file)
        for i in range(10_000):
            console(Output("demo", 0, "stdout", f"line {i}"))
        console.close()


@pytest.mark.parametrize(
    ("name", "value", "view"),
    [
        ("TERM", "xterm", True),
        ("TERM", "dumb", False),
        ("CI", "true", False),
        ("CI", "false", True),
        ("JENKINS_URL", "http://localhost", False),
    ],
)
def test_a_view_is_drawn_only_for_people(
    name: str, value: str, view: bool, terminal: TextIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    for other in ("CI", "TF_BUILD", "TEAMCITY_VERSION", "JENKINS_URL"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv(name, value)
    console = attach(True, file=terminal)
    assert console.live is view
    console.close()


def test_notebooks_and_files_get_plain_lines(terminal: TextIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("CI", raising=False)
    for file, mode in ((io.StringIO(), "auto"), (io.StringIO(), "live"), (terminal, "plain")):
        console = attach(mode, file=file)
        assert not console.live
        console.close()
    notebook = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=object()))
    monkeypatch.setitem(sys.modules, "IPython", notebook)  # type: ignore[arg-type]
    console = attach(file=terminal)
    assert not console.live
    console.close()


def test_plain_lines_do_without_rich() -> None:
    script = textwrap.dedent("""
        import sys
        from skyward.view.console import attach
        from skyward.events import Output
        console = attach()
        console(Output("demo", 0, "stdout", "x"))
        console.close()
        print("rich" in sys.modules)
    """)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=180)
    assert done.stdout == "[node-0] x\nFalse\n"
