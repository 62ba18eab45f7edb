"""What nodes say about shared collections by way of the client: each for its own processes."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from skyward.client.arrivals import ClientShared
from skyward.errors import SharedLost
from skyward.node.protocol import Share
from tests.support.fake_nodes import FakePool
from tests.support.waiting import until


def test_what_a_node_says_for_its_own_processes_is_passed_on() -> None:
    posted: list[Any] = []
    shared = ClientShared(lambda *each: posted.append(each), 3, lambda: "")
    shared.asked(Share("1/token/runner", ["open", "rank 1", 1, 0], []), 1, 0.0)
    shared.asked(Share("2/token/runner", ["answer", 1, "", "", None, 0], []), 0, 0.0)
    assert [to for to, _ in posted] == [0, 2]


@pytest.mark.parametrize("asker", ["client", "2/token/runner", "0/token/runner", "11/token/runner", ""])
def test_a_node_cannot_ask_for_the_client_or_for_another_node(asker: str) -> None:
    """SEC-4: it would take their locks, or stand at barriers for them."""
    posted: list[Any] = []
    shared = ClientShared(lambda *each: posted.append(each), 3, lambda: "")
    with pytest.raises(ValueError, match="not one of its processes"):
        shared.asked(Share(asker, ["open", "the client", None, 0], []), 1, 0.0)
    assert posted == []


def test_while_node_0_is_gone_every_question_is_told_so_at_once() -> None:
    posted: list[Any] = []
    gone = ["its agent died too often"]
    shared = ClientShared(lambda *each: posted.append(each), 3, lambda: gone[0])
    shared.lost(0, None, gone[0])
    assert [(to, [message.encoded()[0][0] for message in messages]) for to, messages in posted] == [
        (1, ["head", "lost"]),
        (2, ["head", "lost"]),
    ]
    posted.clear()
    for _ in range(2):
        with pytest.raises(SharedLost, match="its agent died too often"):
            shared.channel().ask("event", "e", "wait", [])
    assert posted == []
    question = ["ask", 5, "", "counter", "c", "add", [1], None, 0]
    shared.asked(Share("2/token/runner", question, []), 2, 0.0)
    [(to, [share])] = posted
    assert (to, share.asker, share.message[:2], share.message[3]) == (2, "2/token/runner", ["answer", 5], "lost")
    posted.clear()
    gone[0] = ""
    shared.asked(Share("2/token/runner", question, []), 2, 0.0)
    assert [to for to, _ in posted] == [0]


def test_who_waits_when_node_0_is_lost_is_told_so() -> None:
    gone = [""]

    def post(number: int, messages: list[Any]) -> None:
        if number == 0:  # the question is on its way
            gone[0] = "it was taken away"
            shared.lost(0, None, gone[0])

    shared = ClientShared(post, 2, lambda: gone[0])
    with pytest.raises(SharedLost, match="it was taken away"):
        shared.channel().ask("event", "e", "wait", [])


def test_when_the_pool_gives_node_0_up_who_waits_and_who_asks_later_are_told_so(tmp_path: Path) -> None:
    with FakePool(tmp_path) as pool:
        told: list[str] = []
        channel = pool.engine.shared.channel()

        def wait() -> None:
            with pytest.raises(SharedLost) as caught:
                channel.ask("event", "e", "wait", [])
            told.append(str(caught.value))

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        until(lambda: channel._waits)  # pyright: ignore[reportPrivateUsage]
        until(lambda: told or pool.nodes[0].write(b"\xff" * 64))  # nonsense, over each connection again
        thread.join(30)
        assert "node 0, which keeps the shared collections of the pool, is lost" in told[0]
        with pytest.raises(SharedLost):
            channel.ask("counter", "c", "add", [1])
        assert pool.works(1)
