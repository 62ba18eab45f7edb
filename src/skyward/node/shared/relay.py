"""Passes questions of a node's runners on to the server on node 0, and answers back.

They go over a link between the two agents, or through the client where nodes cannot reach each other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from skyward.node.protocol import AgentToClient, AgentToRunner
from skyward.node.receiver import Message
from skyward.node.shared.protocol import AgentToHead, AskerToServer, ServerToAsker

__all__ = ["Relay", "runner_of"]


class Relay:
    """Part of an agent, on its loop. `send` sends to a runner, `tell` to the client, `post` over the link to node 0.

    `direct` says whether there is an address for that link.
    """

    def __init__(
        self,
        send: Callable[[str, Message, list[Any]], None],
        tell: Callable[[Message, list[Any]], None],
        post: Callable[[Message, list[Any]], None],
        direct: Callable[[], bool],
    ) -> None:
        self._send, self._tell, self._post, self._direct = send, tell, post, direct
        self._open: dict[str, set[int]] = {}  # of each asker, the questions that have no answer yet
        self._ways: dict[str, bool] = {}  # of each asker, whether it uses the link; it keeps to that

    def up(self, asker: str, message: Message, buffers: list[Any]) -> None:
        """A runner of this node says something to the server."""
        unanswered = self._open.setdefault(asker, set())
        if message[0] == "ask":
            unanswered.add(message[1])
        if asker not in self._ways:
            self._ways[asker] = self._direct()
        if self._ways[asker]:
            self._post(AgentToHead.share(asker, message, len(buffers)), buffers)
        else:
            self._tell(AgentToClient.share(asker, message, len(buffers)), buffers)

    def down(self, asker: str, message: Message, buffers: list[Any]) -> None:
        """The server answers a runner of this node."""
        unanswered = self._open.get(asker)
        if unanswered is not None:
            unanswered.discard(message[1])
            self._send(runner_of(asker), AgentToRunner.share(message, len(buffers)), buffers)

    def ended(self, asker: str, why: str) -> None:
        """A runner of this node has ended."""
        if asker in self._open:
            self.up(asker, AskerToServer.gone(why), [])
            del self._open[asker], self._ways[asker]

    def lost(self, why: str, *, direct: bool | None = None) -> None:
        """No answers come any more to what was asked: of all askers, or of those that use the link, or do not."""
        for asker, unanswered in self._open.items():
            if direct is not None and self._ways[asker] is not direct:
                continue
            ids, self._open[asker] = unanswered, set()
            for id in sorted(ids):
                answer = ServerToAsker.answer(id, "", "lost", why, 0)
                self._send(runner_of(asker), AgentToRunner.share(answer, 0), [])
        self._ways.update((asker, self._direct()) for asker in self._open)


def runner_of(asker: str) -> str:
    """The runner that an asker's name means."""
    return asker.rpartition("/")[2]
