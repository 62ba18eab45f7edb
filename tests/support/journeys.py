"""A value on the way that its pieces take: large ones through files, small ones inside a frame."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from typing import Any

from skyward.transport import blobs
from skyward.transport.payload import Packer, unpack

__all__ = ["Journey", "travel"]


@dataclass(frozen=True)
class Journey:
    """What arrived, and what it cost."""

    value: Any
    in_band: int
    """Bytes of the pickle itself."""
    on_sockets: int
    """Bytes that do not go as blobs."""
    blobs: int
    """How many blobs there were."""


def travel(value: Any, *, keep_classes: bool = True) -> Journey:
    """Packs a value, moves it as a local pool does, and unpacks it."""
    head, buffers = Packer().pack(value, "value")
    arrived: list[Any] = []
    count = on_sockets = 0
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        for piece in (head, *buffers):
            if memoryview(piece).nbytes >= blobs.LARGE:
                arrived.append(blobs.read(blobs.write(directory, piece), unlink=True))
                count += 1
            else:
                frame = bytearray(b"123" + bytes(piece))  # in a frame nothing is aligned
                arrived.append(memoryview(frame)[3:])
                on_sockets += len(frame) - 3
    made = unpack(arrived[0], arrived[1:], keep_classes=keep_classes)
    return Journey(made, len(head), on_sockets, count)
