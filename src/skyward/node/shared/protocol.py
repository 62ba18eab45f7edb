"""The messages about shared collections: between a process that uses them and the server on node 0.

A runner of a local pool has a connection of its own to the server. All others send these messages inside `share`
messages of links that exist (`node/protocol.py`), or over the link of their agent to that of node 0.
"""

from __future__ import annotations

from typing import Any

from skyward.node.receiver import Direction, Message

__all__ = ["LARGEST", "AgentToHead", "AskerToServer", "HeadToAgent", "ServerToAsker"]

LARGEST = 16 << 20
"""How many bytes one question may bring."""


class AskerToServer(Direction):
    sender = "asker"

    @staticmethod
    def open(label: str, rank: int | None) -> Message:
        """The first message of a process: how errors call it, and which rank it is (none: the client)."""
        return ["open", label, rank, 0]

    @staticmethod
    def ask(
        id: int,
        epoch: str,
        kind: str,
        name: str,
        operation: str,
        arguments: list[Any],
        timeout: float | None,
        buffers: int,
    ) -> Message:
        """Do this with the collection of this name; there is one answer. `epoch` is that of the last answer, if any.
        The operations, with their arguments, are methods in `node/shared/containers.py` and `node/shared/waits.py`.
        Buffers: values, pickled."""
        return ["ask", id, epoch, kind, name, operation, arguments, timeout, buffers]

    @staticmethod
    def withdraw(id: int) -> Message:
        """Do not wait any longer; what was answered already stays answered."""
        return ["withdraw", id, 0]

    @staticmethod
    def gone(why: str) -> Message:
        """The process has ended; its agent says so."""
        return ["gone", why, 0]


class ServerToAsker(Direction):
    sender = "server"

    @staticmethod
    def answer(id: int, epoch: str, code: str, result: Any, buffers: int) -> Message:
        """The answer to `ask`. `code` is empty, or says what went wrong; then the result is a text, or a list that
        begins with one. Buffers: values, pickled."""
        return ["answer", id, epoch, code, result, buffers]


class AgentToHead(Direction):
    sender = "agent"

    @staticmethod
    def share(asker: str, message: Message, buffers: int) -> Message:
        """A message of a runner of the sending node, for the server."""
        return ["share", asker, message, buffers]


class HeadToAgent(Direction):
    sender = "head"

    @staticmethod
    def share(asker: str, message: Message, buffers: int) -> Message:
        """A message of the server, for a runner of the receiving node."""
        return ["share", asker, message, buffers]
