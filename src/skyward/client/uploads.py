"""Large buffers on other machines: each crosses the client's link once, and then goes from node to node."""

from __future__ import annotations

import logging
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from skyward.node.protocol import Blobs, ClientToAgent, InputEnd, InputItems
from skyward.transport import blobs, exceptions
from skyward.transport.backoff import backoff
from skyward.transport.blobs import stowed
from skyward.transport.codec import Message
from skyward.transport.frames import Malformed, nbytes
from skyward.transport.payload import Packer
from skyward.transport.streams import Producer

if TYPE_CHECKING:
    from skyward.client.call import Call

__all__ = [
    "Parts",
    "Uploads",
    "feed",
]

_PIECE = 1 << 18
_WINDOW = 4 << 20
_PAUSE = 0.5
_PAUSES = 0.001, 0.1  # between two looks at whether the link takes more
_PATIENCE = 30.0
_NAME = re.compile(r"[0-9a-f]{24}")

log = logging.getLogger("skyward.engine")

Post = Callable[[int, Sequence[Message]], None]
Failed = Callable[[int, str, Exception], None]


@dataclass(eq=False)
class _Upload:
    node: int
    name: str
    failing: float = 0.0
    """Since when, if it is."""
    obsolete: bool = False


class Uploads:
    """Which node has which buffer. Called with the engine's lock held; `failed(node, name, error)` without it: calls
    that wait there must end.
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
        self._lanes: dict[int, queue.SimpleQueue[_Upload | None]] = {}
        self._under_way: dict[tuple[int, str], _Upload] = {}  # those that a node counts on
        self._closing = threading.Event()

    def load(self, node: int, files: Mapping[str, tuple[str, int]]) -> None:
        with self._lock:
            for name, (path, size) in files.items():
                self._files[name] = (path, size)
                holders = self._holders.setdefault(name, set())
                if node in holders:
                    continue
                sources = [(other, *place) for other in holders if (place := self._address(other)) is not None]
                holders.add(node)
                if sources:
                    self._post(node, [ClientToAgent.Fetch(name, size, sources)])
                else:
                    self._upload(node, name)

    def need(self, node: int, name: str) -> None:
        with self._lock:
            if name in self._files:
                self._holders.setdefault(name, set()).add(node)
                self._upload(node, name)

    def drop(self, name: str) -> None:
        with self._lock:
            for node in self._holders.pop(name, ()):
                if self._under_way.pop((node, name), None) is not None:
                    self._post(node, [ClientToAgent.Unexpect(name)])
            self._files.pop(name, None)

    def offer(self, node: int, files: Mapping[str, tuple[str, int]]) -> None:
        with self._lock:
            self._files |= files
            for name in files:
                self._holders.setdefault(name, set()).add(node)
                self._upload(node, name)

    def has(self, name: str) -> bool:
        with self._lock:
            return name in self._files

    def forget(self, node: int) -> None:
        with self._lock:
            for name, holders in self._holders.items():
                holders.discard(node)
                self._under_way.pop((node, name), None)

    def close(self) -> None:
        self._closing.set()
        with self._lock:
            for lane in self._lanes.values():
                lane.put(None)

    def _upload(self, node: int, name: str) -> None:
        self._post(node, [ClientToAgent.Expect(name)])  # before the call that needs it, or a peer that asks
        lane = self._lanes.get(node)
        if lane is None:
            lane = queue.SimpleQueue[_Upload | None]()
            threading.Thread(target=self._serve, args=(lane,), name="skyward-upload", daemon=True).start()
            self._lanes[node] = lane
        upload = self._under_way[node, name] = _Upload(node, name)
        lane.put(upload)

    # a thread for each node

    def _serve(self, lane: queue.SimpleQueue[_Upload | None]) -> None:
        while (upload := lane.get()) is not None and not self._closing.is_set():
            try:
                self._send(upload)
                continue
            except Exception as exc:  # no descriptors, no memory, a file that is gone: the next attempt may find better
                error = exc
            upload.failing = upload.failing or time.monotonic()
            try:
                again = self._worth_trying(upload, error, time.monotonic() - upload.failing)
            except Exception as exc:  # a bug of ours; this upload ends, and the others continue
                log.exception("a failed upload could not be handled")
                again, error = False, exc
            if again:
                self._closing.wait(_PAUSE)
                lane.put(upload)  # behind the others, which may fare better
            elif not upload.obsolete:
                self._tell_failure(upload.node, upload.name, error)

    def _worth_trying(self, upload: _Upload, error: Exception, seconds: float) -> bool:
        node, name = upload.node, upload.name
        with self._lock:
            if not self._is_wanted(upload):
                return False
            if isinstance(error, FileNotFoundError):
                again = os.path.exists(self._files[name][0])  # another call may have put it there again meanwhile
            else:
                log.log(logging.DEBUG if seconds else logging.WARNING, "node %d does not get a buffer: %s", node, error)
                again = self._failed is None or seconds < _PATIENCE
            if not again:
                self._holders[name].discard(node)  # the next call that needs it has it sent again
                del self._under_way[node, name]
                self._post(node, [ClientToAgent.Unexpect(name)])
            return again

    def _is_wanted(self, upload: _Upload) -> bool:
        """With the lock held."""
        upload.obsolete = self._under_way.get((upload.node, upload.name)) is not upload
        return not upload.obsolete

    def _tell_failure(self, node: int, name: str, error: Exception) -> None:
        if self._failed is not None:
            try:
                self._failed(node, name, error)
            except Exception:  # a bug of ours; other uploads continue
                log.exception("a failed upload could not be handled")

    def _send(self, upload: _Upload) -> None:
        node, name = upload.node, upload.name
        with self._lock:
            if not self._is_wanted(upload):
                return
            path, size = self._files[name]
        with open(path, "rb", buffering=0) as file:
            offset = 0
            while offset < size:
                pauses = backoff(*_PAUSES)
                while self._backlog(node) > _WINDOW and not self._closing.wait(next(pauses)):
                    pass  # the link may be down
                if self._closing.is_set():
                    return
                data = file.read(_PIECE)
                if not data:
                    raise OSError(f"{path} has {offset} bytes instead of {size}")
                with self._lock:  # what follows `unexpect` would have the node wait again
                    if not self._is_wanted(upload):
                        return
                    self._post(node, [ClientToAgent.Blob(name, offset, size, [data])])
                offset += len(data)
        with self._lock:
            if self._is_wanted(upload):
                del self._under_way[node, name]


class Parts:
    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._incoming = blobs.Incoming(directory)
        self._incomplete: dict[str, str] = {}

    def accept(self, name: str, offset: int, total: int, data: Any) -> None:
        _check_name(name)
        if offset and name in self._incomplete:
            return  # or there would be a file with a hole in it
        try:
            self._incoming.write(name, offset, data, total)
            self._incomplete.pop(name, None)
        except OSError as exc:
            log.warning("a piece of a result cannot be kept: %s", exc)
            self._incomplete[name] = f"it could not be written to {self._directory} ({exc.strerror})"
            try:
                blobs.remove([self._incoming.path(name)])
            except OSError as why:
                log.debug("and what there is of it stays: %s", why)

    def placed(self, named: Blobs) -> tuple[Blobs, str | None]:
        """Where a result's blobs are here; a node names them, but does not choose where we look."""
        found: Blobs = {}
        incomplete: str | None = None
        for index, (name, size) in named.items():
            _check_name(name)
            found[index] = (self._incoming.path(name), size)
            self._incoming.forget(name)
            incomplete = self._incomplete.pop(name, incomplete)
        return found, incomplete


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise Malformed(f"a node spoke of {name[:80]!r}, which is not the name of a result")


# Arguments that are iterators: their items are read in a thread, and sent as the body takes them.


def feed(
    call: Call, key: str, source: Iterable[Any], post: Callable[[list[Message]], None], directory: str | None = None
) -> Producer:
    """Reads `source` in its own thread and posts items as there is credit. For a process of this computer, large parts
    are left in `directory`.
    """

    def send(batch: list[list[Any]]) -> None:
        pieces = [piece for item in batch for piece in item]
        post([InputItems(call.id, key, [len(item) for item in batch], pieces)])

    def packed(packer: Packer, item: Any) -> tuple[list[bytes], int]:
        head, buffers = packer.pack(item, f"an item of argument {key} of {call.name}")
        pieces: list[Any] = [head, *buffers]
        size = sum(map(nbytes, pieces))
        if directory is not None:
            pieces = stowed(pieces, directory)
        return list(map(bytes, pieces)), size

    def run() -> None:
        packer = Packer()
        error: BaseException | None = None
        wanted = True
        try:
            for item in source:
                small = packer.pack_small(item)
                pieces, size = ([small], len(small)) if small is not None else packed(packer, item)
                if not producer.put(pieces, size):
                    wanted = False
                    break
        except BaseException as exc:  # raised in the body, where the iterator is used
            error = exc
        try:
            producer.finish()  # what came before the error goes first
        except BaseException as exc:  # an item could not be sent: the body must not take what arrived for the whole
            error = error or exc
        if error is None and not wanted:
            return
        described, data = cast("tuple[Any, bytes]", ({}, b"") if error is None else exceptions.capture(error))
        post([InputEnd(call.id, key, described, [data])])

    producer = Producer(send)
    threading.Thread(target=run, name="skyward-feed", daemon=True).start()
    return producer
