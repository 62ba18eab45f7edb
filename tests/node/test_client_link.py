"""An agent's link to its client: what was said in one turn goes in one frame, or in several where it must."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from skyward.node.client_link import ClientLink
from skyward.node.protocol import AgentToClient, Returned
from skyward.transport import frames
from skyward.transport.codec import Message
from skyward.transport.link import Link, greet


class Said(Message):
    text: Any
    buffers: list[bytes]


class Pair:
    """An agent's link and its client's."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        nothing: Any = lambda *_: None  # noqa: E731
        self.agent = ClientLink(self.selector, {"node": 0}, nothing, nothing, "incarnation", time.monotonic)
        self.client = Link()

    def connect(self, session: str = "s") -> dict[str, Any]:
        near, far = socket.socketpair()
        self.agent.attach(near, {"session": session, "received": self.client.received})
        welcome = greet(far, None, time.monotonic() + 30)
        self.client.attach(far, welcome["received"])
        return welcome

    def heard(self) -> list[tuple[Any, list[bytes]]]:
        return [(messages, list(map(bytes, buffers))) for messages, buffers in self.client.read()[0]]


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.agent.drop()
    made.client.detach()
    made.selector.close()


def test_what_is_too_much_for_one_frame_goes_in_several(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "_MAX_HEADER", 200)
    pair.connect()
    for number in range(5):
        pair.agent.tell(Said("x" * 100, [bytes([number])]))
    pair.agent.flush()
    assert pair.heard() == [([["said", "x" * 100, 1]], [bytes([number])]) for number in range(5)]


@pytest.mark.parametrize("wrong", ["x" * 300, 10**5000, object()], ids=["too-large", "digits", "no-json"])
def test_what_cannot_be_sent_at_all_keeps_nothing_else_from_being_sent(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, wrong: Any
) -> None:
    """It would end the agent, and all that runs on its node with it."""
    monkeypatch.setattr(frames, "_MAX_HEADER", 200)
    pair.connect()
    for part in ("before", wrong, "after"):
        pair.agent.tell(Said(part, []))
    pair.agent.flush()
    assert [messages for messages, _ in pair.heard()] == [[["said", "before", 0]], [["said", "after", 0]]]


def test_an_agent_says_in_its_greeting_how_often_it_could_not_read_the_next_frame(pair: Pair) -> None:
    assert pair.connect()["unread"] == 0
    for expected in (1, 2):
        assert pair.client.sock is not None
        pair.client.sock.sendall(b"\xff" * 64)
        for key, events in pair.selector.select(30):
            key.data(events)
        assert not pair.agent.connected
        pair.client.detach()
        assert pair.connect()["unread"] == expected


def test_a_new_session_hears_nothing_of_the_old_one(pair: Pair) -> None:
    """The client had given the node up: a result of then could be taken for one of the attempt that follows."""
    pair.connect()
    pair.agent.tell(AgentToClient.Items("a", [1], [b"1"]))
    pair.agent.flush()  # on its way
    pair.agent.tell(Returned(id="a", buffers=[b"2"]))  # not sent yet
    pair.client.detach()
    pair.client = Link()
    pair.connect("another")
    pair.agent.tell(AgentToClient.Ready(1))
    pair.agent.flush()
    assert pair.heard() == [([["ready", 1, 0]], [])]
