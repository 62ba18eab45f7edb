"""From a node to this computer: the node lists its files, and is asked for the pieces that are missing here.

What a node says is checked: nothing is written outside the folder that the user names, nor more than was listed.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from skyward.api.transfer import Transfer
from skyward.errors import TransferError
from skyward.node.receiver import Malformed
from skyward.transport.trees import MOST_ENTRIES, Entry, Writer, checked_entries

if TYPE_CHECKING:
    from skyward.client.engine import Engine
    from skyward.client.push import Begin
    from skyward.client.transfers import Answers

__all__ = ["Pull"]

_PIECE = 1 << 20
_MOST_FILES = 200
_MODES = 0o755  # nobody else may write to what a node has sent
_WINDOW = 8
_NONSENSE = "what the node says of its files cannot be understood"


class _Wanted(NamedTuple):
    """A part of a file: the entry here, the file's name there, where the part begins, and how long it is."""

    entry: Entry
    name: str
    offset: int
    length: int


class Pull:
    """Fetches one file or folder from a node; `warn` tells the user what is not as expected."""

    def __init__(self, engine: Engine, node: int, warn: Callable[[str], None]) -> None:
        self._engine, self._node, self._warn = engine, node, warn
        self._changed: list[str] = []
        self._under_way: deque[tuple[list[_Wanted], Answers]] = deque()

    def run(self, source: str, target: str, begin: Begin) -> Transfer:
        """Does all of it; returns when all files are here under their names."""
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
        except OSError as exc:
            text = exc.strerror or str(exc)
            raise TransferError(None, os.path.join(here, str(exc.filename or "")), text, exc.errno or 0) from exc

    def _scanned(self, source: str) -> tuple[str, bool, list[Entry], list[str]]:
        """What there is to fetch, as the node lists it: each path once, and none of them outside the folder."""
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
            while len(self._under_way) >= _WINDOW:
                self._settle(writer, tell)
        while self._under_way:
            self._settle(writer, tell)
        for entry in entries:
            if entry.kind == "l":
                writer.link(entry)
        for entry in sorted(entries, reverse=True):
            if entry.kind == "d":
                writer.finish_folder(entry.path, entry.mode)
        self._tell_changed()
        return Transfer(len(wanted), size, len(files) - len(wanted), tuple(left_out))

    def _ask(self, there: str, parts: list[_Wanted]) -> None:
        pieces = [[part.name, part.offset, part.length] for part in parts]
        order = {"do": "read", "root": there, "pieces": pieces}
        self._under_way.append((parts, self._engine.ask_files(self._node, order)))

    def _settle(self, writer: Writer, tell: Callable[[int], None]) -> None:
        """Writes what was asked for first."""
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
                text = "it became shorter while it was read. Pull it again when nobody writes to it"
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
                "old and partly new. Pull again when nobody writes to it."
            )


def _batches(wanted: Sequence[tuple[Entry, str, int]]) -> list[list[_Wanted]]:
    """What is asked for at once: a part of a large file, or many small files."""
    batches: list[list[_Wanted]] = []
    room = 0
    for entry, name, at in wanted:
        while True:
            if room <= 0 or len(batches[-1]) >= _MOST_FILES:
                batches.append([])
                room = _PIECE
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
