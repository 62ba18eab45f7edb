"""Questions to agents about files, and their answers as they come: what `push` and `pull` are made of."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from skyward.errors import NodeLost, PoolClosed, SkywardError, TransferError
from skyward.node.protocol import ClientToAgent
from skyward.node.receiver import Malformed, Message

if TYPE_CHECKING:
    from skyward.client.connections import Connections
    from skyward.client.core import Core
    from skyward.client.settings import PoolSettings
    from skyward.client.uploads import Uploads
    from skyward.transport.blobs import Blob

__all__ = ["Answers", "NodeFileAccess", "Transfers"]

_MOST_ANSWERS = 2000

Post = Callable[[int, list[Message], Sequence[Any]], None]


class Answers:
    """The answers of a node to one question."""

    def __init__(self, node: int) -> None:
        self.node = node
        self.count = 0
        self._came: queue.SimpleQueue[tuple[dict[str, Any], list[Any]] | SkywardError] = queue.SimpleQueue()

    def put(self, came: tuple[dict[str, Any], list[Any]] | SkywardError) -> None:
        """An answer, or the reason why there is none."""
        self._came.put(came)

    def next(self) -> tuple[dict[str, Any], list[Any]]:
        """Waits for the next answer; raises TransferError if the node says that it cannot, NodeLost if it is lost."""
        came = self._came.get()
        if isinstance(came, SkywardError):
            raise came
        error = came[0].get("error")
        if error is not None:
            raise TransferError(self.node, error["path"], error["text"], error["errno"])
        return came


class Transfers:
    """Part of an engine, which holds its lock; `post` sends messages to a node."""

    def __init__(self, post: Post) -> None:
        self._post = post
        self._numbers = itertools.count(1)
        self._open: dict[int, Answers] = {}

    def ask(self, node: int, order: dict[str, Any]) -> Answers:
        """Has a node do something with its files."""
        number, answers = next(self._numbers), Answers(node)
        self._open[number] = answers
        self._post(node, [ClientToAgent.files(number, order)], [])
        return answers

    def lost(self, node: int, reason: str) -> None:
        """A node is lost or was restarted: what it was asked is not answered any more."""
        for number, answers in list(self._open.items()):
            if answers.node == node:
                del self._open[number]
                error = NodeLost(node, reason=reason, attempts=0)
                error.add_note("Call it again when the node is back: it goes on where it stopped.")
                answers.put(error)

    def close(self) -> None:
        """The pool is closed."""
        while self._open:
            _, answers = self._open.popitem()
            answers.put(PoolClosed("the pool was closed while files were copied."))

    def _from_agent_files(
        self, number: int, now: float, request: int, answer: dict[str, Any], buffers: list[Any]
    ) -> None:
        answers = self._open.get(request)
        if answers is None or answers.node != number:
            return  # it was given up meanwhile
        answers.count += 1
        if answers.count > _MOST_ANSWERS:
            raise Malformed("more answers than there can be")
        if "entries" not in answer or "root" in answer:  # else there are more
            del self._open[request]
        answers.put((answer, buffers))


class NodeFileAccess:
    """What an engine lets others do with files; called without its lock."""

    if TYPE_CHECKING:
        _lock: threading.RLock
        _plan: PoolSettings
        _core: Core
        _connections: Connections
        _uploads: Uploads
        _transfers: Transfers

        def _check_open(self) -> None: ...

    def file_nodes(self) -> dict[int, str]:
        """The nodes that have joined, with why one is lost; empty for those that are there."""
        with self._lock:
            self._check_open()
            return {node.number: node.gone for node in self._core.nodes.present}

    def ask_files(self, node: int, order: dict[str, Any]) -> Answers:
        """Has a node do something with files (`node/files.py`)."""
        with self._lock:
            self._check_open()
            if gone := self._core.nodes.all[node].gone:
                raise NodeLost(node, reason=gone, attempts=0)
            return self._transfers.ask(node, order)

    def load_blob(self, node: int, name: str, blob: Blob) -> None:
        """Has a node get a blob: from here, or from another node that has it."""
        if not self._plan.local:  # local nodes read the file themselves
            with self._lock:
                self._uploads.load(node, {name: blob})

    def send_blob(self, node: int, name: str) -> None:
        """Sends a node a blob that it did not get from another one."""
        with self._lock:
            self._uploads.need(node, name)

    def drop_blob(self, nodes: Sequence[int], name: str) -> None:
        """Has nodes let go of a blob that nobody will ask for again."""
        if not self._plan.local:
            with self._lock:
                self._uploads.drop(name)
                for node in nodes:
                    if self._connections.connected(node):
                        self._connections.post(node, [ClientToAgent.files(0, {"do": "drop", "blobs": [name]})])
