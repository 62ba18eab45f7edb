"""Large buffers between the client and nodes on other machines: each argument crosses the client's link once.

The first node that needs a buffer gets it from here, piece by piece; the next ones get it from those that have it. What
a node cannot get from its peers it asks for, and gets from here after all.
"""

from __future__ import annotations

import logging
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from skyward.node.protocol import ClientToAgent
from skyward.node.receiver import Malformed
from skyward.transport import blobs

__all__ = ["Parts", "Uploads"]

_PIECE = 1 << 18
_WINDOW = 4 << 20
_PAUSE = 0.5
_PATIENCE = 30.0
_NAME = re.compile(r"[0-9a-f]{24}")

log = logging.getLogger("skyward.engine")

Post = Callable[[int, list[Any], list[Any]], None]
Failed = Callable[[int, str, Exception], None]


class Uploads:
    """Which node has which buffer. Called with the engine's lock held; `failed` is called without it.

    `failed(node, name, error)` says that a node does not get a buffer: calls that wait there for it must end.
    """

    def __init__(
        self,
        post: Post,
        backlog: Callable[[int], int],
        address: Callable[[int], tuple[str, int] | None],
        failed: Failed | None = None,
    ) -> None:
        self._post, self._backlog, self._address, self._failed = post, backlog, address, failed
        self._lock = threading.Lock()  # of what follows: lanes look at it too
        self._holders: dict[str, set[int]] = {}
        self._files: dict[str, tuple[str, int]] = {}
        self._lanes: dict[int, queue.SimpleQueue[str | None]] = {}
        self._closing = threading.Event()

    def load(self, node: int, files: Mapping[str, tuple[str, int]]) -> None:
        """Has a node get what it does not have yet."""
        with self._lock:
            for name, (path, size) in files.items():
                self._files[name] = (path, size)
                holders = self._holders.setdefault(name, set())
                if node in holders:
                    continue
                sources = [(other, *place) for other in holders if (place := self._address(other)) is not None]
                holders.add(node)
                if sources:
                    self._post(node, [ClientToAgent.fetch(name, size, sources)], [])
                else:
                    self._upload(node, name)

    def need(self, node: int, name: str) -> None:
        """A node could not get a buffer from its peers, or has let it go."""
        with self._lock:
            if name in self._files:
                self._holders.setdefault(name, set()).add(node)
                self._upload(node, name)

    def drop(self, name: str) -> None:
        """Nobody will ask for a buffer again."""
        with self._lock:
            self._holders.pop(name, None)
            self._files.pop(name, None)

    def offer(self, node: int, files: Mapping[str, tuple[str, int]]) -> None:
        """Sends buffers to a node that cannot get them from its peers."""
        with self._lock:
            self._files |= files
            for name in files:
                self._holders.setdefault(name, set()).add(node)
                self._upload(node, name)

    def has(self, name: str) -> bool:
        """Whether a buffer lies here."""
        with self._lock:
            return name in self._files

    def forget(self, node: int) -> None:
        """A node has lost what it had."""
        with self._lock:
            for holders in self._holders.values():
                holders.discard(node)

    def close(self) -> None:
        """Ends all uploads."""
        self._closing.set()
        with self._lock:
            for lane in self._lanes.values():
                lane.put(None)

    def _upload(self, node: int, name: str) -> None:
        self._post(node, [ClientToAgent.expect(name)], [])  # before the call that needs it, or a peer that asks
        lane = self._lanes.get(node)
        if lane is None:
            lane = queue.SimpleQueue[str | None]()
            threading.Thread(target=self._serve, args=(node, lane), name="skyward-upload", daemon=True).start()
            self._lanes[node] = lane
        lane.put(name)

    # a thread for each node

    def _serve(self, node: int, lane: queue.SimpleQueue[str | None]) -> None:
        failing: dict[str, float] = {}  # since when
        while (name := lane.get()) is not None and not self._closing.is_set():
            try:
                self._send(node, name)
                failing.pop(name, None)
                continue
            except Exception as exc:  # no descriptors, no memory, a file that is gone: the next attempt may find better
                error = exc
            since = failing.setdefault(name, time.monotonic())
            if self._worth_trying(node, name, error, time.monotonic() - since):
                self._closing.wait(_PAUSE)
                lane.put(name)  # behind the others, which may fare better
            else:
                del failing[name]
                self._tell_failure(node, name, error)

    def _worth_trying(self, node: int, name: str, error: Exception, seconds: float) -> bool:
        """Whether an upload that failed is tried again; if not, the node no longer counts on it."""
        with self._lock:
            if isinstance(error, FileNotFoundError):
                again = os.path.exists(self._files[name][0])  # another call may have put it there again meanwhile
            else:
                log.log(logging.DEBUG if seconds else logging.WARNING, "node %d does not get a buffer: %s", node, error)
                again = self._failed is None or seconds < _PATIENCE
            if node not in self._holders.get(name, ()):
                return False  # the node is lost
            if not again:
                self._holders[name].discard(node)  # the next call that needs it has it sent again
                self._post(node, [ClientToAgent.unexpect(name)], [])
            return again

    def _tell_failure(self, node: int, name: str, error: Exception) -> None:
        if self._failed is not None:
            try:
                self._failed(node, name, error)
            except Exception:  # a bug of ours; other uploads go on
                log.exception("a failed upload could not be handled")

    def _send(self, node: int, name: str) -> None:
        path, size = self._files[name]
        with open(path, "rb", buffering=0) as file:
            offset = 0
            while offset < size and node in self._holders.get(name, ()):
                while self._backlog(node) > _WINDOW and not self._closing.is_set():
                    time.sleep(0.001)
                if self._closing.is_set():
                    return
                data = file.read(_PIECE)
                if not data:
                    raise OSError(f"{path} has {offset} bytes instead of {size}")
                self._post(node, [ClientToAgent.blob(name, offset, size, 1)], [data])
                offset += len(data)


class Parts:
    """Results that arrive in pieces, put together as files in the client's own directory."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._incomplete: dict[str, str] = {}

    def accept(self, name: str, offset: int, data: Any) -> None:
        """Writes one piece; a result of which one could not be written has no file, and `place` says why."""
        path = self._path(name)
        if offset and name in self._incomplete:
            return  # or there would be a file with a hole in it
        try:
            blobs.write_piece(path, offset, data)
            self._incomplete.pop(name, None)
        except OSError as exc:
            log.warning("a piece of a result cannot be kept: %s", exc)
            self._incomplete[name] = f"it could not be written to {self._directory} ({exc.strerror})"
            try:
                blobs.remove([path])
            except OSError as why:
                log.debug("and what there is of it stays: %s", why)

    def place(self, about: dict[str, Any]) -> None:
        """Says where the blobs of a result lie here; a node names them, but does not choose where we look."""
        for index, (name, size) in about.get("blobs", {}).items():
            about["blobs"][index] = (self._path(str(name)), size)
            if str(name) in self._incomplete:
                about["incomplete"] = self._incomplete.pop(str(name))

    def _path(self, name: str) -> str:
        if not _NAME.fullmatch(name):
            raise Malformed(f"a node spoke of {name[:80]!r}, which is no name of a result")
        return os.path.join(self._directory, name)
