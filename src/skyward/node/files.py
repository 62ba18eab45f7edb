"""A node's files for `pool.push` and `pool.pull`, in a thread of the agent: a hanging disk must not block its loop."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from typing import Any

from skyward.node.blob_cache import BlobCache
from skyward.node.protocol import (
    AgentToClient,
    ClientToAgent,
    FileAnswer,
    FileDrop,
    FileEntries,
    FileError,
    FileOrder,
    FilePath,
    FileRead,
    FileWrite,
)
from skyward.transport.codec import Message, handles
from skyward.transport.frames import Buffer, Malformed

__all__ = ["NodeFiles"]

log = logging.getLogger("skyward.engine")

_PAGE = 1000
_PAGE_CHARACTERS = 256 << 10  # in names: a frame's header has a limit
_LARGEST_READ = 8 << 20
_PATIENCE = 60.0

Answer = tuple[FileAnswer, list[Buffer]]


class NodeFiles:
    def __init__(self, cache: BlobCache, wake: Callable[[], None], tell: Callable[[Message], None]) -> None:
        self._cache, self._wake, self._tell = cache, wake, tell
        self.cwd = os.sep
        self._orders: queue.SimpleQueue[tuple[int, FileOrder]] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[int, Answer]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def poll(self) -> None:
        while not self._answers.empty():
            request, (answer, buffers) = self._answers.get()
            self._tell(AgentToClient.Files(request, answer, buffers))

    @handles(ClientToAgent.Files)
    def ordered(self, message: ClientToAgent.Files) -> None:
        self._orders.put((message.request, message.order))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="skyward-files", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            request, order = self._orders.get()
            try:
                for answer in self._do(order):
                    self._answer(request, answer)
            except OSError as exc:
                error: FileError = {
                    "errno": exc.errno or 0,
                    "text": exc.strerror or str(exc),
                    "path": _text(exc.filename),
                }
                self._answer(request, ({"error": error}, []))
            except Exception as exc:  # an order that is none: the client hears of it
                log.debug("an order about files cannot be carried out", exc_info=True)
                self._answer(request, ({"error": {"errno": 0, "text": repr(exc)[:500], "path": ""}}, []))

    def _answer(self, request: int, answer: Answer) -> None:
        self._answers.put((request, answer))
        self._wake()

    def _do(self, order: FileOrder) -> Iterable[Answer]:
        match order["do"]:
            case "scan":
                return self._scan(order)
            case "look":
                return self._look(order)
            case "compare":
                return self._compare(order)
            case "write":
                return self._write(order)
            case "finish":
                return self._finish(order)
            case "read":
                return self._read(order)
            case "drop":
                return self._drop(order)

    def _at(self, path: str) -> str:
        return os.path.join(self.cwd, os.path.expanduser(path))

    def _look(self, order: FilePath) -> Iterable[Answer]:
        return [({"folder": os.path.isdir(self._at(order["path"]))}, [])]

    def _drop(self, order: FileDrop) -> Iterable[Answer]:
        self._cache.discard(order["blobs"])
        return [({}, [])]

    def _scan(self, order: FilePath) -> Iterator[Answer]:
        from skyward.transport.trees import scan

        path = self._at(order["path"])
        left_out: list[str] = []
        root, entries = scan(path, left_out)
        page: list[Any] = []
        length = 0
        for entry in entries:
            page.append(list(entry))
            length += len(entry.path) + len(entry.target)
            if len(page) == _PAGE or length > _PAGE_CHARACTERS:
                yield {"entries": page}, []
                page, length = [], 0
        yield {"entries": page, "root": root, "folder": root == os.path.realpath(path), "left_out": left_out[:100]}, []

    def _compare(self, order: FileEntries) -> Iterable[Answer]:
        from skyward.transport.trees import Writer, checked_entries

        found: list[int | None] = []
        with closing(Writer(self._at(order["root"]))) as writer:
            for entry in checked_entries(order["entries"]):
                if entry.kind == "d":
                    writer.make_folder(entry.path)
                found.append(writer.has(entry) if entry.kind == "f" else None)
                if entry.kind == "f" and entry.size > _LARGEST_READ and found[-1] is not None:
                    writer.forget_parts(entry)
        return [({"have": found}, [])]

    def _write(self, order: FileWrite) -> Iterable[Answer]:
        from skyward.transport.trees import Writer, checked_entries

        blob, segments = order["blob"], order["segments"]
        path = self._blob(blob) if blob is not None else os.devnull
        if path is None:
            return [({"missing": True}, [])]
        entries = checked_entries([segment[0] for segment in segments])
        try:
            with open(path, "rb", buffering=0) as file, closing(Writer(self._at(order["root"]))) as writer:
                for entry, (_, offset, start, length) in zip(entries, segments, strict=True):
                    writer.write(entry, offset, os.pread(file.fileno(), length, start) if length else b"")
        finally:
            if blob is not None and not self._cache.shared:
                self._cache.drop([blob[0]])
        return [({}, [])]

    def _blob(self, blob: tuple[str, int]) -> str | None:
        name, _ = blob
        if self._cache.shared:
            return name
        self._cache.take({"": blob})
        path = self._cache.awaited(name, _PATIENCE)
        if path is None:
            self._cache.drop([name])
        return path

    def _finish(self, order: FileEntries) -> Iterable[Answer]:
        from skyward.transport.trees import Writer, checked_entries

        with closing(Writer(self._at(order["root"]))) as writer:
            writer.finish(checked_entries(order["entries"]))
        return [({}, [])]

    def _read(self, order: FileRead) -> Iterable[Answer]:
        from skyward.transport.trees import Reader

        pieces = order["pieces"]
        told: list[list[int]] = []
        parts: list[bytes] = []
        if sum(length for _, _, length in pieces) > _LARGEST_READ:
            raise Malformed("more than is read at once")
        with closing(Reader(self._at(order["root"]))) as reader:
            for path, offset, length in pieces:
                try:
                    data, size, mtime = reader.read(path, offset, length)
                except OSError as exc:
                    told.append([-1, exc.errno or 0, 0])
                    continue
                told.append([len(data), size, mtime])
                parts.append(data)
        return [({"pieces": told}, [b"".join(parts)])]


def _text(path: Any) -> str:
    return os.fsdecode(path) if isinstance(path, str | bytes) else ""
