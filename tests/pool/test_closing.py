"""The steps of closing: in reverse, all of them, and quickly after a Ctrl-C in one of them."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager

import pytest

from skyward.pool.opening import Steps


def interrupt() -> None:
    raise KeyboardInterrupt


def test_steps_run_in_reverse_and_a_ctrl_c_in_one_makes_the_rest_hurry() -> None:
    hurry, seen = threading.Event(), list[tuple[str, bool]]()
    with Steps(hurry) as opening:
        opening.callback(lambda: seen.append(("machines", hurry.is_set())))
        opening.callback(interrupt)
        opening.callback(lambda: seen.append(("engine", hurry.is_set())))
        steps = opening.pop_all()
    with pytest.raises(KeyboardInterrupt):
        steps.close()
    assert seen == [("engine", False), ("machines", True)]


def test_a_ctrl_c_while_opening_is_not_one_while_closing() -> None:
    hurry, seen = threading.Event(), list[bool]()
    with pytest.raises(KeyboardInterrupt), Steps(hurry) as steps:
        steps.callback(lambda: seen.append(hurry.is_set()))
        interrupt()
    assert seen == [False]


def test_a_context_that_is_interrupted_when_it_is_left_counts_too() -> None:
    hurry, seen = threading.Event(), list[BaseException]()

    @contextmanager
    def plugin() -> Generator[str]:
        try:
            yield "entered"
        except ValueError as exc:
            seen.append(exc)
        interrupt()

    with pytest.raises(KeyboardInterrupt), Steps(hurry) as steps:
        assert steps.enter_context(plugin()) == "entered"
        raise ValueError
    assert hurry.is_set()
    assert len(seen) == 1
