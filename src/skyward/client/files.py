"""Copies files between this computer and nodes: `pool.push` and `pool.pull`."""

from __future__ import annotations

import errno
import itertools
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from skyward.api.spec import Transfer
from skyward.client.gather import GroupCounter
from skyward.errors import InvalidArgument, PoolClosed, SkywardError, TransferError
from skyward.node.protocol import AgentToClient, ClientToAgent, FileAnswer, FileEntries, FileOrder, FileRead, FileWrite
from skyward.transport.codec import Message, handles
from skyward.transport.frames import Malformed
from skyward.transport.trees import MOST_ENTRIES, Changed, Entry, Reader, Writer, checked_entries, scan

if TYPE_CHECKING:
    from skyward.client.engine import Engine
    from skyward.events import Event
    from skyward.transport.blobs import Store

__all__ = ["Answers", "Begin", "Pull", "Push", "Transfers", "counting", "node_lost", "path_of"]


# From this computer to nodes: what they lack goes as blobs, so that each byte leaves here once.
#
#     scan --entries--> compare (every node) --> pieces --blobs--> first node --> other nodes --write--> files
#
# A piece has up to 4 MiB: a part of a large file, or many small files. A few pieces are under way at a time.


_PIECE = 4 << 20
_WINDOW = 6
_BATCH = 1000
_MOST_SEGMENTS = 1000
_TRIES = 5

Begin = Callable[[int], Callable[[int], None]]

_SHOWN = 4_000_000
_MEGABYTE = 1_000_000


def counting(pool: str, name: str, emit: Callable[[Event], None] | None) -> Begin:
    def begin(size: int) -> Callable[[int], None]:
        if emit is None or size < _SHOWN:
            return lambda more: None
        counter, done = GroupCounter(pool, f"{name} (MB)", size // _MEGABYTE, emit), 0

        def add(more: int) -> None:
            nonlocal done
            before, done = done // _MEGABYTE, done + more
            counter.add(done // _MEGABYTE - before)

        return add

    return begin


class _Segment(NamedTuple):
    file: int
    offset: int
    start: int
    length: int


class _Piece(NamedTuple):
    name: str
    size: int
    asked: list[tuple[int, FileWrite, Answers]]
    behind: set[int]


class Push:
    def __init__(self, engine: Engine, store: Store, nodes: Sequence[int], local: bool) -> None:
        self._engine, self._store, self._nodes, self._local = engine, store, nodes, local
        self._under_way: deque[_Piece] = deque()
        self._tell: Callable[[int], None] = lambda size: None

    def run(self, source: str, target: str, begin: Begin) -> Transfer:
        left_out: list[str] = []
        here, entries = _scanned(source, left_out)
        names = [entry.path for entry in entries]
        there = target or "."
        if entries[0].kind == "f":
            there, name = self._place(target, names[0])
            entries = [entries[0]._replace(path=name)]
        have = self._compared(there, entries)
        files = [i for i, entry in enumerate(entries) if entry.kind == "f"]
        starts = {i: min(at for known in have if (at := known[i]) is not None) for i in files if _lacking(have, i)}
        size = sum(entries[i].size - at for i, at in starts.items())
        self._tell, changed = begin(size), list[str]()
        try:
            with closing(Reader(here)) as reader:
                for data, segments in _pieces(reader, names, entries, starts, changed):
                    self._send(there, data, segments, entries, have)
            while self._under_way:
                self._settle()
        finally:
            self._store.discard([piece.name for piece in self._under_way if piece.name])
        self._finish(there, [entry for entry in entries if entry.kind != "f"])
        if changed:
            raise TransferError(None, changed[0], _changed(changed))
        return Transfer(len(starts), size, len(files) - len(starts), tuple(left_out))

    def _place(self, target: str, name: str) -> tuple[str, str]:
        folder, given = os.path.split(target)
        if given and not self._engine.ask_files(self._nodes[0], {"do": "look", "path": target}).next()[0].get("folder"):
            return folder or ".", given
        return target or ".", name

    def _compared(self, there: str, entries: Sequence[Entry]) -> list[list[int | None]]:
        asked: list[list[tuple[int, Answers]]] = []
        for node in self._nodes:
            asked.append([])
            for at in range(0, len(entries), _BATCH):
                batch = [list(entry) for entry in entries[at : at + _BATCH]]
                order: FileEntries = {"do": "compare", "root": there, "entries": batch}
                asked[-1].append((len(batch), self._engine.ask_files(node, order)))
        return [[at for count, answers in batches for at in _have(answers, count)] for batches in asked]

    def _send(
        self,
        there: str,
        data: bytes,
        segments: Sequence[_Segment],
        entries: Sequence[Entry],
        have: Sequence[Sequence[int | None]],
    ) -> None:
        while len(self._under_way) >= _WINDOW or any(piece.behind for piece in self._under_way):
            self._settle()
        name, blob = self._store.put(data) if data else ("", ("", 0))
        piece = _Piece(name, len(data), [], set())
        self._under_way.append(piece)
        for node, known in zip(self._nodes, have, strict=True):
            wanted = [
                (list[Any](entries[part.file]), part.offset, part.start, part.length)
                for part in segments
                if (at := known[part.file]) is not None
                and (part.offset + part.length > at or part.offset + part.length == entries[part.file].size)
            ]
            if wanted:
                place = (blob[0] if self._local else name, blob[1]) if name else None
                order: FileWrite = {"do": "write", "root": there, "blob": place, "segments": wanted}
                if name:
                    self._engine.load_blob(node, name, blob)
                piece.asked.append((node, order, self._engine.ask_files(node, order)))

    def _settle(self) -> None:
        piece = self._under_way[0]
        for node, order, answers in piece.asked:
            for attempt in range(_TRIES):
                if self._written(piece, node, answers):
                    break
                if attempt == _TRIES - 1:
                    path = order["segments"][0][0][0]
                    raise TransferError(node, path, "the node cannot keep what was sent: its /dev/shm may be full")
                answers = self._engine.ask_files(node, order)
        self._under_way.popleft()
        if piece.name:
            self._store.discard([piece.name])
            if all(later.name != piece.name for later in self._under_way):  # a file of zeros has many equal pieces
                self._engine.drop_blob([node for node, _, _ in piece.asked], piece.name)
        self._tell(piece.size)

    def _written(self, piece: _Piece, node: int, answers: Answers) -> bool:
        try:
            missing = answers.next()[0].get("missing")
        except TransferError:
            if node not in piece.behind:
                raise
            piece.behind.discard(node)
            return False
        if missing:
            for later in self._under_way:
                if later is not piece:
                    later.behind.add(node)
            self._engine.send_blob(node, piece.name)
        return not missing

    def _finish(self, there: str, entries: Sequence[Entry]) -> None:
        ordered = [list(entry) for entry in sorted(entries, key=lambda entry: (entry.kind, entry.path), reverse=True)]
        asked = [
            self._engine.ask_files(node, {"do": "finish", "root": there, "entries": ordered[at : at + _BATCH]})
            for node in self._nodes
            for at in range(0, len(ordered), _BATCH)
        ]
        for answers in asked:
            answers.next()


def _scanned(source: str, left_out: list[str]) -> tuple[str, list[Entry]]:
    try:
        here, found = scan(source, left_out)
        entries: list[Entry] = []
        for entry in found:
            entries.append(entry)
            if len(entries) > MOST_ENTRIES:
                raise InvalidArgument(
                    f"{source} holds more than {MOST_ENTRIES:,} files. Push its folders one by one, or as an archive."
                )
        return here, entries
    except OSError as exc:
        raise TransferError(None, str(exc.filename or source), exc.strerror or str(exc), exc.errno or 0) from exc


def _lacking(have: Sequence[Sequence[int | None]], file: int) -> bool:
    return any(known[file] is not None for known in have)


def _have(answers: Answers, count: int) -> list[int | None]:
    have: Any = answers.next()[0].get("have")
    if not isinstance(have, list) or len(cast("list[Any]", have)) != count:
        raise TransferError(answers.node, "", "the node sent an invalid list of files")
    return cast("list[int | None]", have)


def _pieces(
    reader: Reader, names: Sequence[str], entries: Sequence[Entry], starts: Mapping[int, int], changed: list[str]
) -> Iterator[tuple[bytes, list[_Segment]]]:
    """What is left of the files. A file that changes is left out before its last part."""
    data, segments = bytearray(), list[_Segment]()
    for file, start in starts.items():
        offset, size = start, entries[file].size
        while True:
            room = min(_PIECE - len(data), size - offset)
            try:
                part, now, mtime = reader.read(names[file], offset, room)
            except Changed:
                part, now, mtime = b"", -1, 0
            except OSError as exc:
                raise TransferError(None, names[file], exc.strerror or str(exc), exc.errno or 0) from exc
            if len(part) < room or (now, mtime) != (size, entries[file].mtime):
                changed.append(names[file])
                break
            segments.append(_Segment(file, offset, len(data), room))
            data += part
            offset += room
            if len(data) >= _PIECE or len(segments) >= _MOST_SEGMENTS:
                yield bytes(data), segments
                data, segments = bytearray(), []
            if offset >= size:
                break
    if segments:
        yield bytes(data), segments


def _changed(paths: Sequence[str]) -> str:
    more = f", and {len(paths) - 1} more files," if len(paths) > 1 else ""
    return f"it{more} changed while it was read, so it is not on the nodes under its name. Push it again"


# From a node to this computer: the node lists its files, and is asked for the pieces that are missing here.
#
# What a node says is checked: nothing is written outside the folder that the user names, nor more than was listed.


_PULL_PIECE = 1 << 20
_MOST_FILES = 200
_MODES = 0o755  # nobody else may write to what a node has sent
_PULL_WINDOW = 8
_NONSENSE = "the node sent an invalid list of files"


class _Wanted(NamedTuple):
    entry: Entry
    name: str
    offset: int
    length: int


class Pull:
    def __init__(self, engine: Engine, node: int, warn: Callable[[str], None]) -> None:
        self._engine, self._node, self._warn = engine, node, warn
        self._changed: list[str] = []
        self._under_way: deque[tuple[list[_Wanted], Answers]] = deque()

    def run(self, source: str, target: str, begin: Begin) -> Transfer:
        there, is_folder, entries, left_out = self._scanned(source)
        names = [entry.path for entry in entries]
        here = target
        if not is_folder:
            into = not os.path.basename(target) or os.path.isdir(target)
            here, name = (target, names[0]) if into else os.path.split(target)
            entries = [entries[0]._replace(path=name)]
        try:
            with closing(Writer(here or ".")) as writer:
                return self._fetch(writer, here or ".", there, entries, names, begin, left_out)
        except TransferError:
            raise
        except OSError as exc:
            text = exc.strerror or str(exc)
            raise TransferError(None, os.path.join(here, str(exc.filename or "")), text, exc.errno or 0) from exc

    def _scanned(self, source: str) -> tuple[str, bool, list[Entry], list[str]]:
        answers = self._engine.ask_files(self._node, {"do": "scan", "path": source})
        entries: list[Entry] = []
        while True:
            answer = answers.next()[0]
            try:
                found = checked_entries(answer.get("entries") or [])
                entries += [entry._replace(mode=entry.mode & _MODES) for entry in found]
            except Malformed as exc:
                raise TransferError(self._node, source, f"{_NONSENSE}: {exc}") from exc
            if len(entries) > MOST_ENTRIES:
                text = f"it holds more than {MOST_ENTRIES:,} files. Pull its folders one by one, or an archive"
                raise TransferError(self._node, source, text)
            if "root" in answer:
                break
        folder, root = answer.get("folder"), answer["root"]
        left_out = [str(name)[:1000] for name in cast("list[Any]", answer.get("left_out") or [])][:100]
        alone = len(entries) == 1 and entries[0].kind == "f"
        if not isinstance(root, str) or len({entry.path for entry in entries}) < len(entries) or not (folder or alone):
            raise TransferError(self._node, source, _NONSENSE)
        return root, bool(folder), entries, left_out

    def _fetch(
        self,
        writer: Writer,
        here: str,
        there: str,
        entries: Sequence[Entry],
        names: Sequence[str],
        begin: Begin,
        left_out: Sequence[str],
    ) -> Transfer:
        for entry in entries:
            if entry.kind == "d":
                writer.make_folder(entry.path)
        files = [(entry, name) for entry, name in zip(entries, names, strict=True) if entry.kind == "f"]
        wanted = [(entry, name, at) for entry, name in files if (at := writer.has(entry)) is not None]
        size = sum(entry.size - at for entry, _, at in wanted)
        room = os.statvfs(here)
        if size > room.f_bavail * room.f_frsize:
            text = f"there is no room for {size:,} bytes: {room.f_bavail * room.f_frsize:,} are free"
            raise TransferError(None, here, text, 28)
        tell = begin(size)
        for parts in _batches(wanted):
            self._ask(there, parts)
            while len(self._under_way) >= _PULL_WINDOW:
                self._settle(writer, tell)
        while self._under_way:
            self._settle(writer, tell)
        writer.finish(entries)
        self._tell_changed()
        return Transfer(len(wanted), size, len(files) - len(wanted), tuple(left_out))

    def _ask(self, there: str, parts: list[_Wanted]) -> None:
        pieces = [(part.name, part.offset, part.length) for part in parts]
        order: FileRead = {"do": "read", "root": there, "pieces": pieces}
        self._under_way.append((parts, self._engine.ask_files(self._node, order)))

    def _settle(self, writer: Writer, tell: Callable[[int], None]) -> None:
        parts, answers = self._under_way.popleft()
        answer, buffers = answers.next()
        told: Any = answer.get("pieces")
        data = memoryview(buffers[0] if buffers else b"")
        if not isinstance(told, list) or len(cast("list[Any]", told)) != len(parts):
            raise TransferError(self._node, parts[0].name, _NONSENSE)
        start = 0
        for part, about in zip(parts, cast("list[Any]", told), strict=True):
            if not _is_about(about):
                raise TransferError(self._node, part.name, _NONSENSE)
            length, size, mtime = cast("list[int]", about)
            if length < 0:
                raise TransferError(self._node, part.name, os.strerror(min(size, 4095) if size > 0 else 0), size)
            if length > part.length or start + length > data.nbytes:
                raise TransferError(self._node, part.name, _NONSENSE)
            if length < part.length:
                text = "it became shorter while it was being read. Pull it again when nothing is writing to it"
                raise TransferError(self._node, part.name, text)
            if (size, mtime) != (part.entry.size, part.entry.mtime) and part.name not in self._changed:
                self._changed.append(part.name)
            writer.write(part.entry, part.offset, data[start : start + length])
            start += length
        tell(start)

    def _tell_changed(self) -> None:
        if self._changed:
            more = f" and {len(self._changed) - 1} more files" if len(self._changed) > 1 else ""
            self._warn(
                f"node {self._node}: {self._changed[0]}{more} changed while it was read: what is here may be partly "
                "old and partly new. Pull again when nothing is writing to it."
            )


def _batches(wanted: Sequence[tuple[Entry, str, int]]) -> list[list[_Wanted]]:
    batches: list[list[_Wanted]] = []
    room = 0
    for entry, name, at in wanted:
        while True:
            if room <= 0 or len(batches[-1]) >= _MOST_FILES:
                batches.append([])
                room = _PULL_PIECE
            length = min(room, entry.size - at)
            batches[-1].append(_Wanted(entry, name, at, length))
            at, room = at + length, room - max(length, 1)
            if at >= entry.size:
                break
    return batches


def _is_about(about: Any) -> bool:
    return (
        isinstance(about, list)
        and len(cast("list[Any]", about)) == 3
        and all(isinstance(part, int) for part in cast("list[Any]", about))
    )


_MOST_ANSWERS = 2000

Post = Callable[[int, Sequence[Message]], None]


class Answers:
    def __init__(self, node: int, path: str = "") -> None:
        self.node, self.path = node, path
        self.count = 0
        self._came: queue.SimpleQueue[tuple[FileAnswer, Sequence[Any]] | SkywardError] = queue.SimpleQueue()

    def put(self, came: tuple[FileAnswer, Sequence[Any]] | SkywardError) -> None:
        self._came.put(came)

    def next(self) -> tuple[FileAnswer, Sequence[Any]]:
        came = self._came.get()
        if isinstance(came, SkywardError):
            raise came
        error = came[0].get("error")
        if error is not None:
            raise TransferError(self.node, error["path"], error["text"], error["errno"])
        return came


class Transfers:
    def __init__(self, post: Post) -> None:
        self._post = post
        self._numbers = itertools.count(1)
        self._open: dict[int, Answers] = {}
        self._closed = False
        self.pushing = threading.Lock()  # two at once could write the same file

    def ask(self, node: int, order: FileOrder) -> Answers:
        number, answers = next(self._numbers), Answers(node, path_of(order))
        self._open[number] = answers
        if self._closed:  # looked at after it is open: `close` may be called at any moment, without the engine's lock
            self.close()
        else:
            self._post(node, [ClientToAgent.Files(number, order)])
        return answers

    def lost(self, node: int, reason: str) -> None:
        for number, answers in list(self._open.items()):
            if answers.node == node:
                del self._open[number]
                answers.put(node_lost(node, answers.path, reason))

    def close(self) -> None:
        self._closed = True
        for number in list(self._open):
            if (answers := self._open.pop(number, None)) is not None:
                answers.put(PoolClosed("the pool was closed while files were copied."))

    @handles(AgentToClient.Files)
    def answered(self, message: AgentToClient.Files, number: int, now: float) -> None:
        request, answer = message.request, message.answer
        answers = self._open.get(request)
        if answers is None or answers.node != number:
            return  # it was given up meanwhile
        answers.count += 1
        if answers.count > _MOST_ANSWERS:
            raise Malformed("more answers than there can be")
        if "entries" not in answer or "root" in answer:  # else there are more
            del self._open[request]
        answers.put((answer, message.buffers))


def path_of(order: FileOrder) -> str:
    return order.get("path") or order.get("root") or ""


def node_lost(node: int, path: str, reason: str) -> TransferError:
    text = f"the node is lost ({reason}). What was copied stays; call it again when the node is back"
    return TransferError(node, path, text, errno.EHOSTDOWN)
