"""How a process asks the server of shared collections: who it says it is, and how long it waits."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from skyward.errors import PoolClosed, SharedLost, SharedTimeout, SharedTooLarge
from skyward.node.shared import channel as channel_module
from skyward.node.shared.channel import Channel
from skyward.transport.frames import TooLarge


class Server:
    """Answers at once, with what it is told to answer."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.code, self.epoch = "", "first"
        nothing: Any = None
        self.channel = Channel(self._hear, nothing, nothing, opening=lambda: ["open", "rank 1", 1, 0])

    def _hear(self, message: list[Any], _: list[Any]) -> None:
        self.heard.append(message[0])
        if message[0] == "ask":
            self.channel.receive(["answer", message[1], self.epoch, self.code, None, 0], [])


def test_a_process_says_who_it_is_before_its_first_question_only() -> None:
    server = Server()
    for _ in range(3):
        server.channel.ask("event", "e", "set", [])
    assert server.heard == ["open", "ask", "ask", "ask"]


def test_a_server_that_was_restarted_is_told_again_who_asks() -> None:
    """Without its rank, a process could not meet the others of its group any more."""
    server = Server()
    server.channel.ask("event", "e", "set", [])
    server.code, server.epoch = "lost", "second"
    with pytest.raises(SharedLost):
        server.channel.ask("event", "e", "set", [])
    server.code = ""
    server.channel.ask("event", "e", "set", [])
    server.channel.ask("event", "e", "set", [])
    assert server.heard == ["open", "ask", "ask", "open", "ask", "ask"]


class Silent:
    """A server that hears everything and answers when it is told to."""

    def __init__(self) -> None:
        self.heard: list[tuple[list[Any], list[bytes]]] = []
        nothing: Any = None
        self.channel = Channel(lambda message, values: self.heard.append((message, values)), nothing, nothing)

    def kinds(self) -> list[Any]:
        return [message[5] if message[0] == "ask" else message[0] for message, _ in self.heard]


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Silent:
    monkeypatch.setattr(channel_module, "LATE", 0.02)
    return Silent()


def test_a_time_out_holds_for_a_server_that_does_not_answer(silent: Silent) -> None:
    with pytest.raises(SharedTimeout, match=r"has not answered within 0.01 s"):
        silent.channel.ask("queue", "q", "get", [None], timeout=0.01)
    assert silent.kinds() == ["get", "withdraw"]


@pytest.mark.parametrize(
    ("kind", "operation", "answer", "values", "expected"),
    [
        ("queue", "get", None, [b"item"], ("unget", [], [b"item"])),
        ("lock", "acquire", 7, [], ("release", [7], [])),
    ],
)
def test_what_comes_for_somebody_who_has_given_up_goes_back(
    silent: Silent, kind: str, operation: str, answer: Any, values: list[bytes], expected: tuple[str, list[Any], Any]
) -> None:
    with pytest.raises(SharedTimeout):
        silent.channel.ask(kind, "x", operation, [], timeout=0)
    silent.channel.receive(["answer", silent.heard[0][0][1], "e", "", answer, len(values)], values)
    message, brought = silent.heard[-1]
    assert (message[5], message[6], brought) == expected


def test_giving_up_is_a_time_out_even_if_the_server_is_gone_by_then(silent: Silent) -> None:

    def post(message: list[Any], values: list[Any]) -> None:
        if message[0] == "withdraw":
            raise SharedLost("gone")

    nothing: Any = None
    with pytest.raises(SharedTimeout):
        Channel(post, nothing, nothing).ask("event", "e", "wait", [], timeout=0)


def test_a_channel_that_is_closed_while_somebody_begins_to_ask_answers() -> None:
    """The question is asked between the moment that it is known and the moment that it is sent."""
    nothing: Any = None
    made = Channel(lambda message, values: made.close("closed"), nothing, nothing)
    with pytest.raises(PoolClosed):
        made.ask("event", "e", "wait", [])
    with pytest.raises(PoolClosed):
        made.ask("event", "e", "wait", [])


def test_nobody_waits_for_ever_when_asking_meets_closing() -> None:
    for _ in range(30):
        silent = Silent()
        ended: list[str] = []

        def ask(silent: Silent = silent, ended: list[str] = ended) -> None:
            with pytest.raises(PoolClosed):
                silent.channel.ask("event", "e", "wait", [])
            ended.append("")

        threads = [threading.Thread(target=ask, daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        silent.channel.close("closed")
        for thread in threads:
            thread.join(30)
        assert len(ended) == 4


def test_what_the_other_side_would_refuse_is_the_askers_error() -> None:
    def refuse(message: list[Any], values: list[Any]) -> None:
        raise TooLarge("a message of 40,000,000 bytes")

    nothing: Any = None
    with pytest.raises(SharedTooLarge, match="40,000,000"):
        Channel(refuse, nothing, nothing).ask("dict", "d", "get", ["k"])
    silent = Silent()
    for values in ([bytes(17 << 20)], [b"x"] * (1 << 20)):
        with pytest.raises(SharedTooLarge, match="16,777,216 bytes at a time"):
            silent.channel.ask("dict", "d", "update", [], values)
    assert silent.heard == []
