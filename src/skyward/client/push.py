"""From this computer to nodes: what they lack goes as blobs, so that each byte leaves here once.

    scan --entries--> compare (every node) --> pieces --blobs--> first node --> other nodes --write--> files

A piece has up to 4 MiB: a part of a large file, or many small files. A few pieces are under way at a time.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from skyward.api.transfer import Transfer
from skyward.errors import InvalidArgument, TransferError
from skyward.transport.trees import MOST_ENTRIES, Changed, Entry, Reader, scan

if TYPE_CHECKING:
    from skyward.client.engine import Engine
    from skyward.client.transfers import Answers
    from skyward.transport.blobs import Store

__all__ = ["Begin", "Push"]

_PIECE = 4 << 20
_WINDOW = 6
_BATCH = 1000
_MOST_SEGMENTS = 1000
_TRIES = 5

Begin = Callable[[int], Callable[[int], None]]
"""Is told how many bytes there are to copy, and returns who counts them."""


class _Segment(NamedTuple):
    """A part of a file: which file, where it begins there and in its piece, and how long it is."""

    file: int
    offset: int
    start: int
    length: int


class _Piece(NamedTuple):
    name: str
    size: int
    asked: list[tuple[int, dict[str, Any], Answers]]
    behind: set[int]
    """Nodes that missed an earlier piece, without which they could not add this one to its file."""


class Push:
    """Sends one file or folder to `nodes`, one of each machine."""

    def __init__(self, engine: Engine, store: Store, nodes: Sequence[int], local: bool) -> None:
        self._engine, self._store, self._nodes, self._local = engine, store, nodes, local
        self._under_way: deque[_Piece] = deque()
        self._tell: Callable[[int], None] = lambda size: None

    def run(self, source: str, target: str, begin: Begin) -> Transfer:
        """Does all of it; returns when every node has all files under their names."""
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
        """Where a file goes: the folder on the nodes, and its name there."""
        folder, given = os.path.split(target)
        if given and not self._engine.ask_files(self._nodes[0], {"do": "look", "path": target}).next()[0].get("folder"):
            return folder or ".", given
        return target or ".", name

    def _compared(self, there: str, entries: Sequence[Entry]) -> list[list[int | None]]:
        """How much each node has of every file; None if it has all of it, and for what is no file."""
        asked: list[list[tuple[int, Answers]]] = []
        for node in self._nodes:
            asked.append([])
            for at in range(0, len(entries), _BATCH):
                batch = [list(entry) for entry in entries[at : at + _BATCH]]
                order = {"do": "compare", "root": there, "entries": batch}
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
        """Gives a piece to the nodes that lack something of it."""
        while len(self._under_way) >= _WINDOW or any(piece.behind for piece in self._under_way):
            self._settle()
        name, blob = self._store.put(data) if data else ("", ("", 0))
        piece = _Piece(name, len(data), [], set())
        self._under_way.append(piece)
        for node, known in zip(self._nodes, have, strict=True):
            wanted = [
                [list(entries[part.file]), part.offset, part.start, part.length]
                for part in segments
                if (at := known[part.file]) is not None
                and (part.offset + part.length > at or part.offset + part.length == entries[part.file].size)
            ]
            if wanted:
                place = [blob[0] if self._local else name, blob[1]]
                order = {"do": "write", "root": there, "blob": place if name else None, "segments": wanted}
                if name:
                    self._engine.load_blob(node, name, blob)
                piece.asked.append((node, order, self._engine.ask_files(node, order)))

    def _settle(self) -> None:
        """Waits until the oldest piece is written everywhere; then nobody keeps it."""
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
            self._engine.drop_blob([node for node, _, _ in piece.asked], piece.name)
        self._tell(piece.size)

    def _written(self, piece: _Piece, node: int, answers: Answers) -> bool:
        """Whether a node has written a piece; if not, it has to be asked again."""
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
        """Makes links, and gives folders their modes, the deepest first."""
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
        raise TransferError(answers.node, "", "what the node says of its files cannot be understood")
    return cast("list[int | None]", have)


def _pieces(
    reader: Reader, names: Sequence[str], entries: Sequence[Entry], starts: Mapping[int, int], changed: list[str]
) -> Iterator[tuple[bytes, list[_Segment]]]:
    """The files from where they are to be sent, in pieces. A file that changes is left out before its last part."""
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
