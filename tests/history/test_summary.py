"""One line of an error says what happened, whatever follows or precedes it."""

from __future__ import annotations

import traceback

from skyward.errors import TaskCrashed, TaskTimeout
from skyward.events import CallEnded
from skyward.history.lines import failure, summary
from skyward.transport.exceptions import as_text


def raised(error: Exception, cause: Exception | None = None) -> str:
    try:
        raise error from cause
    except Exception as exc:
        return "".join(traceback.format_exception(exc))


def test_a_crash_is_told_by_its_signal_and_not_by_the_end_of_its_stderr() -> None:
    stderr = 'Fatal Python error: Segmentation fault\n\nCurrent thread 0x01:\n  File "<frozen runpy>", line 198 in _run'
    crash = TaskCrashed("train", 0, 0, -11, "SIGSEGV", f"Traceback (most recent call last):\n{stderr}")
    line = summary("crashed", as_text(crash))
    assert line.startswith("TaskCrashed: the process running train on node 0 was killed by SIGSEGV.")


def test_a_time_limit_is_told_by_the_limit() -> None:
    assert "its limit of 5 s" in summary("timeout", as_text(TaskTimeout("train", 0, 5.0)))


def test_an_exception_is_told_by_the_line_with_its_type_also_if_its_message_has_more_lines() -> None:
    assert summary("error", raised(ValueError("no such column\n  known: a\nb"))) == "ValueError: no such column"
    assert summary("error", raised(KeyError("lr"), ValueError("inner\nmore"))) == "KeyError: 'lr'"


def test_a_map_is_told_by_the_exception_of_its_first_item_that_failed() -> None:
    text = f"2 of 9 items have failed, the first of them item 3: f(0)\n\n{raised(ValueError('no'))}"
    assert summary("error", text) == "ValueError: no"


def test_an_exception_group_is_told_by_its_own_message() -> None:
    group = ExceptionGroup("two failed", [ValueError("a"), KeyError("b")])
    assert summary("error", raised(group)) == "ExceptionGroup: two failed (2 sub-exceptions)"


def test_a_traceback_whose_beginning_was_left_out_is_told_by_its_exception() -> None:
    text = raised(ValueError("no"))
    assert summary("error", f"... 70 characters left out ...\n{text[20:]}") == "ValueError: no"


def test_a_text_without_a_traceback_is_told_by_its_first_line() -> None:
    assert summary("error", "RuntimeError: no\nmore") == "RuntimeError: no"
    assert summary("lost", "") == ""


def test_a_failed_call_is_named_with_its_arguments_and_its_node() -> None:
    ended = CallEnded("p", "c", "train", 2, "error", 1.0, error=raised(ValueError("no")), arguments="17, rate=0.1")
    assert failure(ended) == "train(17, rate=0.1) failed on node 2: ValueError: no"
    lost = CallEnded("p", "c", "train", -1, "lost", 0.0, error="NodeLost: no node is left")
    assert failure(lost) == "train() failed before it was started: NodeLost: no node is left"


def test_failed_items_of_a_map_that_were_one_call_are_counted_with_the_first_of_them() -> None:
    error = f"3 of 10 items have failed, the first of them item 17: train(17)\n\n{raised(ValueError('no'))}"
    ended = CallEnded("p", "c", "train", 2, "error", 1.0, error=error, items=10, failed_items=3)
    assert failure(ended) == (
        "train, on node 2: 3 of 10 items have failed, the first of them item 17: train(17): ValueError: no"
    )
