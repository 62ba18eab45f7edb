"""The large pieces of what a body returns or yields, or takes from an iterator, as blobs: written once, or not at all.

an argument that comes back unchanged    its blob gets a second name; nothing is written
a tensor on a GPU                        is copied from there into the blob itself
anything else                            is written
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterable, Sequence
from typing import Any

from skyward.transport import blobs, tensors
from skyward.transport.frames import nbytes

__all__ = ["Spill", "fetched", "size_of", "stowed"]

_SAMPLE = 4096
_STOWED = b"\x02"  # a head begins otherwise


class Spill:
    """Blobs of one result in `directory`; `arguments` are the blobs that came with the call.

    What is packed in its `with` block, in the same thread, may use `room`; what of that is not stored is removed.
    """

    def __init__(self, directory: str, arguments: Iterable[tuple[str, int]] = ()) -> None:
        self._directory, self._arguments = directory, arguments
        self._drafts: dict[int, tuple[mmap.mmap, blobs.Blob]] = {}

    def __enter__(self) -> Spill:
        tensors.local.room = self.room
        return self

    def __exit__(self, *exc: object) -> None:
        tensors.local.room = None
        if self._drafts:
            blobs.remove(path for _, (path, _) in self._drafts.values())

    def room(self, size: int) -> memoryview:
        """Memory to fill. What is stored of it is a blob already."""
        if size < blobs.LARGE:
            return memoryview(bytearray(size))
        mapped, blob = blobs.draft(self._directory, size)
        self._drafts[id(mapped)] = mapped, blob
        return memoryview(mapped)

    def store(self, pieces: list[Any]) -> dict[str, blobs.Blob]:
        """Moves large pieces into blobs, in place, and says which."""
        moved: dict[str, blobs.Blob] = {}
        try:
            for index, piece in enumerate(pieces):
                if nbytes(piece) >= blobs.LARGE:
                    moved[str(index)] = self._blob(piece)
                    pieces[index] = b""
        except BaseException:
            blobs.remove(path for path, _ in moved.values())
            raise
        return moved

    def _blob(self, piece: Any) -> blobs.Blob:
        view = memoryview(piece)
        draft = self._drafts.pop(id(view.obj), None)
        if draft is not None:
            return draft[1]
        return self._linked(view) or blobs.write(self._directory, view)

    def _linked(self, view: memoryview) -> blobs.Blob | None:
        """A second name of the argument that has the same content, if there is one."""
        for path, size in self._arguments:
            try:
                if size == view.nbytes and _is_content_of(path, view):
                    name = os.path.join(os.path.dirname(path), os.urandom(12).hex())
                    os.link(path, name)
                    return name, view.nbytes
            except OSError:
                continue  # it is gone, or the file system has no links: it is written
        return None


def stowed(pieces: list[Any], directory: str) -> list[Any]:
    """The pieces of an item for a process of this computer: large ones as blobs, which an extra first piece names."""
    moved = Spill(directory).store(pieces)
    return [_STOWED + json.dumps(moved).encode(), *pieces] if moved else pieces


def fetched(pieces: list[Any]) -> list[Any]:
    """The pieces of an item again; its blobs are mapped and removed."""
    moved = _stowed_in(pieces) if len(pieces) > 1 else {}
    if not moved:
        return pieces
    pieces = pieces[1:]
    for index, blob in moved.items():
        pieces[int(index)] = blobs.read(blob, unlink=True)
    return pieces


def size_of(pieces: list[Any]) -> int:
    """How many bytes an item has, wherever they are."""
    if len(pieces) == 1:  # as most are, and small
        return nbytes(pieces[0])
    return sum(map(nbytes, pieces)) + sum(int(size) for _, size in _stowed_in(pieces).values())


def _stowed_in(pieces: list[Any]) -> dict[str, Sequence[Any]]:
    return json.loads(bytes(pieces[0][1:])) if pieces[0][:1] == _STOWED else {}


def _is_content_of(path: str, view: memoryview) -> bool:
    """Whether a blob of the same size has this content; arguments are named by theirs."""
    with open(path, "rb", buffering=0) as file:
        for at in (0, view.nbytes // 2, view.nbytes - _SAMPLE):  # most of what was changed, is changed there
            if os.pread(file.fileno(), _SAMPLE, at) != view[at : at + _SAMPLE].tobytes():
                return False
    return blobs.digest(view) == os.path.basename(path)
