"""Large buffers between the client and nodes on other machines: each argument crosses the client's link once.

The first node that needs a buffer gets it from here, piece by piece; the next ones get it from those that have it. What
a node cannot get from its peers it asks for, and gets from here after all.
"""

from __future__ import annotations

import os
import queue
import re
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from skyward import blobs

__all__ = ["Cargo", "Parts"]

_PIECE = 1 << 18
_WINDOW = 4 << 20
_NAME = re.compile(r"[0-9a-f]{24}")

Post = Callable[[int, list[Any], list[Any]], None]


class Cargo:
    """Which node has which buffer. Called with the engine's lock held."""

    def __init__(
        self, post: Post, backlog: Callable[[int], int], address: Callable[[int], tuple[str, int] | None]
    ) -> None:
        self._post, self._backlog, self._address = post, backlog, address
        self._holders: dict[str, set[int]] = {}
        self._files: dict[str, tuple[str, int]] = {}
        self._lanes: dict[int, queue.SimpleQueue[str | None]] = {}
        self.closing = False

    def load(self, node: int, files: Mapping[str, tuple[str, int]]) -> None:
        """Has a node get what it does not have yet."""
        for name, (path, size) in files.items():
            self._files[name] = (path, size)
            holders = self._holders.setdefault(name, set())
            if node in holders:
                continue
            sources = [address for other in holders if (address := self._address(other)) is not None]
            holders.add(node)
            if sources:
                self._post(node, [["fetch", name, size, sources, 0]], [])
            else:
                self._upload(node, name)

    def need(self, node: int, name: str) -> None:
        """A node could not get a buffer from its peers, or has let it go."""
        if name in self._files:
            self._holders.setdefault(name, set()).add(node)
            self._upload(node, name)

    def forget(self, node: int) -> None:
        """A node has lost what it had."""
        for holders in self._holders.values():
            holders.discard(node)

    def close(self) -> None:
        """Ends all uploads."""
        self.closing = True
        for lane in self._lanes.values():
            lane.put(None)

    def _upload(self, node: int, name: str) -> None:
        self._post(node, [["expect", name, 0]], [])  # before the call that needs it, or a peer that asks
        lane = self._lanes.get(node)
        if lane is None:
            lane = self._lanes[node] = queue.SimpleQueue()
            threading.Thread(target=self._serve, args=(node, lane), name="skyward-upload", daemon=True).start()
        lane.put(name)

    def _serve(self, node: int, lane: queue.SimpleQueue[str | None]) -> None:
        while (name := lane.get()) is not None:
            path, size = self._files[name]
            try:
                self._send(node, name, path, size)
            except FileNotFoundError:
                continue  # the calls that wanted it have ended meanwhile

    def _send(self, node: int, name: str, path: str, size: int) -> None:
        with open(path, "rb", buffering=0) as file:
            offset = 0
            while offset < size and not self.closing:
                while self._backlog(node) > _WINDOW and not self.closing:
                    time.sleep(0.001)
                data = file.read(_PIECE)
                self._post(node, [["blob", name, offset, size, 1]], [data])
                offset += len(data)


class Parts:
    """Results that arrive in pieces, put together as files in the client's own directory."""

    def __init__(self, directory: str) -> None:
        self._directory = directory

    def accept(self, name: str, offset: int, data: Any) -> None:
        """Writes one piece."""
        blobs.write_piece(self._path(name), offset, data)

    def place(self, about: dict[str, Any]) -> None:
        """Says where the blobs of a result lie here; a node names them, but does not choose where we look."""
        for index, (name, size) in about.get("blobs", {}).items():
            about["blobs"][index] = (self._path(str(name)), size)

    def _path(self, name: str) -> str:
        if not _NAME.fullmatch(name):
            raise ValueError(f"a node spoke of {name[:80]!r}, which is no name of a result")
        return os.path.join(self._directory, name)
