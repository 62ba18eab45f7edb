"""A pickle and its buffers as few pieces: what is large stands alone and is not copied, what is small is joined.

    pickler ──frame──► write ──┐ small parts are joined            ┌► head: layout, then the small parts
            ──100 MB─► write ──┤ large ones become buffers         ├► buffers: the large ones, each as it is,
            ──buffer─► buffer ─┘ small buffers become one together └►          before them one of all small ones

A pickler hands large bytes, bytearrays and texts to its file as they are, outside its frames. They are replaced by the
opcode that takes the next buffer, so what is left is an ordinary pickle, and the layout says which buffers to turn into
bytes, bytearrays and texts first. A head without a layout has buffers that are used as they are.
Whoever moves pieces about knows a head and buffers, and nothing of this.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Sequence
from typing import Any

from skyward.transport.blobs import LARGE
from skyward.transport.copies import bytearray_of, bytes_of

__all__ = ["Packed", "PieceWriter", "split"]

Packed = tuple[bytes, list[memoryview]]

_MARK = 0x01  # a pickle begins with 0x80
_START = struct.Struct("!BI?")  # the mark, the number of buffers of the pickle, whether small ones were joined
_ALIGNED = 64  # what torch and XLA expect of memory that they use without a copy
_BUFFER, _BYTES, _BYTEARRAY, _TEXT = range(4)
_OPCODES = {  # what stands before a large part: the opcode and its length
    _BYTES: (struct.Struct("<cI"), pickle.BINBYTES, struct.Struct("<cQ"), pickle.BINBYTES8),
    _TEXT: (struct.Struct("<cI"), pickle.BINUNICODE, struct.Struct("<cQ"), pickle.BINUNICODE8),
    _BYTEARRAY: (struct.Struct("<cQ"), pickle.BYTEARRAY8, struct.Struct("<cQ"), pickle.BYTEARRAY8),
}


class PieceWriter:
    """The file that a pickler writes to."""

    def __init__(self) -> None:
        self._stream: list[bytes] = []
        self._buffers: list[memoryview] = []
        self._kinds = bytearray()

    def write(self, data: Any) -> None:
        """Takes a frame, or what is too large for one."""
        part = data if type(data) is bytes else memoryview(data).cast("B")
        if len(part) >= LARGE and self._stream:
            before = self._stream[-1]
            for kind, header in _headers(len(part)):
                if before.endswith(header):
                    self._stream[-1] = before[: -len(header)] + pickle.NEXT_BUFFER
                    self._buffers.append(memoryview(part))
                    self._kinds.append(kind)
                    return
        self._stream.append(bytes(part))

    def buffer(self, buffer: pickle.PickleBuffer) -> bool:
        """Takes a buffer that is out of band; True if it cannot be, as it is not contiguous."""
        try:
            self._buffers.append(buffer.raw())
        except BufferError:
            return True
        self._kinds.append(_BUFFER)
        return False

    def packed(self) -> Packed:
        """Head and buffers of what was written."""
        small = [buffer for buffer in self._buffers if buffer.nbytes < LARGE]
        join = len(small) > 1 and sum(buffer.nbytes for buffer in small) >= LARGE
        if not join and not any(self._kinds):
            return b"".join(self._stream), self._buffers
        sizes = struct.pack(f"!{len(self._buffers)}Q", *(buffer.nbytes for buffer in self._buffers))
        head = b"".join((_START.pack(_MARK, len(self._kinds), join), self._kinds, sizes, *self._stream))
        if not join:
            return head, self._buffers
        return head, [_joined(small), *(buffer for buffer in self._buffers if buffer.nbytes >= LARGE)]


def split(head: bytes | memoryview, buffers: Sequence[Any]) -> tuple[bytes | memoryview, Sequence[Any]]:
    """The pickle in a head, and its buffers: what `PieceWriter` has put together."""
    if not len(head) or head[0] != _MARK:
        return head, buffers
    view = memoryview(head)
    _, count, join = _START.unpack_from(view)
    kinds = view[_START.size : _START.size + count]
    sizes = struct.unpack_from(f"!{count}Q", view, _START.size + count)
    apart = _apart(sizes, memoryview(buffers[0]), buffers[1:]) if join else buffers
    return view[_START.size + 9 * count :], [_made(kind, buffer) for kind, buffer in zip(kinds, apart, strict=True)]


def _headers(size: int) -> list[tuple[int, bytes]]:
    wide = size > 0xFFFFFFFF
    return [
        (kind, long.pack(long_code, size) if wide else short.pack(short_code, size))
        for kind, (short, short_code, long, long_code) in _OPCODES.items()
    ]


def _made(kind: int, buffer: Any) -> Any:
    if kind == _BYTES:
        return bytes_of(buffer)
    if kind == _BYTEARRAY:
        return bytearray_of(buffer)
    return str(buffer, "utf-8", "surrogatepass") if kind == _TEXT else buffer


def _joined(small: Sequence[memoryview]) -> memoryview:
    whole = memoryview(bytearray(sum(_room(buffer.nbytes) for buffer in small)))
    at = 0
    for buffer in small:
        whole[at : at + buffer.nbytes] = buffer
        at += _room(buffer.nbytes)
    return whole


def _apart(sizes: Sequence[int], joined: memoryview, alone: Sequence[Any]) -> list[Any]:
    others, at = iter(alone), 0
    buffers: list[Any] = []
    for size in sizes:
        if size >= LARGE:
            buffers.append(next(others))
        else:
            buffers.append(joined[at : at + size])
            at += _room(size)
    return buffers


def _room(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
