"""What a runner says on its status page, and what its agent reads there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from skyward.node.status_page import StatusPage, page_size


@pytest.fixture
def memory() -> Iterator[int]:
    fd = os.memfd_create("skyward-test")
    os.ftruncate(fd, page_size(3))
    yield fd
    os.close(fd)


def test_a_page_on_which_nothing_was_said_is_empty(memory: int) -> None:
    assert StatusPage(memory, 3).read() == []


def test_each_thread_says_what_it_has_begun_last(memory: int) -> None:
    runner, agent = StatusPage(memory, 3), StatusPage(memory, 3)
    runner.begin(0, "aaaaaaaaaaaa", 1.5)
    runner.begin(2, "bbbbbbbbbbbb", 2.5)
    runner.begin(0, "cccccccccccc", 3.5)
    assert agent.read() == [("cccccccccccc", 3.5, 0.0), ("bbbbbbbbbbbb", 2.5, 0.0)]


def test_a_thread_says_when_it_enters_the_body_of_its_call(memory: int) -> None:
    runner, agent = StatusPage(memory, 3), StatusPage(memory, 3)
    runner.begin(1, "aaaaaaaaaaaa", 1.5, 77)
    runner.enter(1, 2.0)
    assert agent.read() == [("aaaaaaaaaaaa", 1.5, 2.0)]
    assert agent.native_ids() == {"aaaaaaaaaaaa": 77}
    runner.begin(1, "bbbbbbbbbbbb", 2.5)
    assert agent.read() == [("bbbbbbbbbbbb", 2.5, 0.0)]


def test_what_was_said_outlives_the_process_that_said_it(memory: int) -> None:
    program = (
        "import os, sys; from skyward.node.status_page import StatusPage; "
        "StatusPage(int(sys.argv[1]), 3).begin(1, 'aaaaaaaaaaaa', 7.0); os.kill(os.getpid(), 9)"
    )
    ended = subprocess.run([sys.executable, "-c", program, str(memory)], pass_fds=[memory], check=False)
    assert ended.returncode == -9
    assert StatusPage(memory, 3).read() == [("aaaaaaaaaaaa", 7.0, 0.0)]


def test_a_write_that_was_cut_short_says_nothing(memory: int) -> None:
    """The process was killed between two bytes of an entry: the body had not begun."""
    runner, agent = StatusPage(memory, 3), StatusPage(memory, 3)
    runner.begin(0, "aaaaaaaaaaaa", 1.0)
    os.pwrite(memory, (3).to_bytes(8, "little"), 0)  # an odd version: a write is in progress
    assert agent.read() == []


@pytest.mark.parametrize("threads", [1, 128, 129, 1000])
def test_there_is_room_for_every_thread(threads: int) -> None:
    fd = os.memfd_create("skyward-test")
    os.ftruncate(fd, page_size(threads))
    runner, agent = StatusPage(fd, threads), StatusPage(fd, threads)
    for thread in range(threads):
        runner.begin(thread, f"{thread:012d}", float(thread))
    assert agent.read() == [(f"{thread:012d}", float(thread), 0.0) for thread in range(threads)]
    os.close(fd)
