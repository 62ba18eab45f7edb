"""What an agent sends its runners: many messages in one frame."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from skyward.node import runners
from skyward.node.protocol import Recall
from skyward.node.runners import Pipe, RunnerProcess
from skyward.node.status_page import StatusPage, page_size
from skyward.transport.frames import FrameReader, TooLarge


@pytest.fixture
def connected() -> Iterator[tuple[RunnerProcess, socket.socket]]:
    ours, theirs = socket.socketpair()
    (out, out_end), (err, err_end) = os.pipe(), os.pipe()
    status = os.memfd_create("status")
    os.ftruncate(status, page_size(1))
    process = RunnerProcess("r", ours, Pipe("stdout", out), Pipe("stderr", err), StatusPage(status, 1), 1)
    theirs.setblocking(False)
    yield process, theirs
    process.close()
    theirs.close()
    for end in (out_end, err_end, status):
        os.close(end)


def heard(theirs: socket.socket) -> list[list[Any]]:
    """The messages of each frame that has come, without what says how many buffers they have."""
    frames, _ = FrameReader().read(theirs.recv_into)
    return [[message[:-1] for message in messages] for messages, _ in frames]


def test_what_is_sent_in_one_turn_comes_in_one_frame(connected: tuple[RunnerProcess, socket.socket]) -> None:
    process, theirs = connected
    for number in range(10):
        assert not process.add(Recall(str(number)))
    assert process.flush()
    assert heard(theirs) == [[["recall", str(number)] for number in range(10)]]


def test_a_frame_has_no_more_messages_than_a_runner_should_wait_for(
    connected: tuple[RunnerProcess, socket.socket],
) -> None:
    process, _ = connected
    assert [process.add(Recall("c")) for _ in range(runners._TOGETHER)].index(True) == runners._TOGETHER - 1


def test_messages_that_are_together_too_much_for_a_frame_come_in_several(
    connected: tuple[RunnerProcess, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = runners.encode

    def limited(messages: list[Any], buffers: Any) -> Any:
        if len(messages) > 2 or any(message[1] == "4" for message in messages):
            raise TooLarge("a message of many bytes")
        return encode(messages, buffers)

    monkeypatch.setattr(runners, "encode", limited)
    process, theirs = connected
    for number in range(5):
        process.add(Recall(str(number)))
    assert process.flush()
    assert [each[1] for frame in heard(theirs) for each in frame] == ["0", "1", "2", "3"], "in order, but for one"
