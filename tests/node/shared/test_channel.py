"""How a process asks the server of shared collections, as far as it says who it is."""

from __future__ import annotations

from typing import Any

import pytest

from skyward.errors import SharedLost
from skyward.node.shared.channel import Channel


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
            self.channel.hear(["answer", message[1], self.epoch, self.code, None, 0], [])


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
