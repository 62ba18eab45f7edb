"""What agents of other nodes say to that of node 0 about shared collections: each for its own processes."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from skyward.node.protocol import ClientToAgent, RunnerShare
from skyward.node.shared.agent_side import Shared
from skyward.node.timers import Timers
from skyward.transport.link import Link, greet


class Head:
    """Node 0's side, and the link of node 1's agent to it."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        clock = time.monotonic
        nothing: Any = lambda *_: None  # noqa: E731
        self.shared = Shared(0, "token", self.selector, clock, Timers(clock), nothing, nothing, nothing)
        near, self.far = socket.socketpair()
        self.shared.admit(near, {"share": 1, "session": "s", "received": 0})
        greet(self.far, None, time.monotonic() + 30)
        self.link = Link()
        self.link.attach(self.far, 0)

    def hear(self, message: list[Any]) -> None:
        self.link.post([message])
        for key, events in self.selector.select(30):
            key.data(events)
        self.shared.pending()


@pytest.fixture
def head() -> Iterator[Head]:
    made = Head()
    yield made
    for key in list(made.selector.get_map().values()):
        made.selector.unregister(key.fileobj)
        key.fileobj.close()  # type: ignore[union-attr]
    made.far.close()


@pytest.mark.parametrize(("asker", "known"), [("1/a/b", True), ("2/a/b", False), ("client", False), ("11/a/b", False)])
def test_a_node_speaks_for_its_own_processes_only(head: Head, asker: str, known: bool) -> None:
    """SEC-4: with its own certificate it cannot take the locks of others, or stand at barriers for them."""
    head.hear(["share", asker, ["withdraw", 1, 0], 0])
    assert (head.shared._made is not None) is known


def test_a_node_that_hears_that_node_0_is_gone_tells_those_who_wait_and_asks_the_client_from_then_on() -> None:
    clock, sent, told = time.monotonic, list[Any](), list[Any]()

    def dial(host: str, port: int) -> socket.socket:
        raise ConnectionRefusedError

    nothing: Any = lambda *_: None  # noqa: E731
    with selectors.DefaultSelector() as selector:
        shared = Shared(1, "token", selector, clock, Timers(clock), lambda *each: sent.append(each), dial, nothing)
        shared.tell = told.append
        shared.head = ("node-0", 1)
        runner: Any = type("Runner", (), {"name": "r"})()
        shared._asked_by_runner(RunnerShare(["ask", 1, "", "event", "e", "wait", [], None, 0], []), runner)
        assert (sent, told) == ([], [])
        shared._head(ClientToAgent.Head(None))
        shared._lost(ClientToAgent.Lost(0, None, "it was taken away"))
        [(name, share)] = sent
        assert (name, share.message[:2], share.message[3]) == ("r", ["answer", 1], "lost")
        shared._asked_by_runner(RunnerShare(["ask", 2, "", "event", "e", "wait", [], None, 0], []), runner)
        assert [message.message[1] for message in told] == [2]
