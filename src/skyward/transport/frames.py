"""Messages on a stream socket: a JSON header and raw buffers, many messages to a frame.

    frame  =  header length (u32) | number of buffers (u32) | their lengths (u64 each) | header | buffers

Sizes are limited on both sides, and memory is taken only as bytes arrive.
"""

from __future__ import annotations

import functools
import json
import struct
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

__all__ = [
    "FROM_NODE",
    "PREFIX",
    "Buffer",
    "Frame",
    "FrameReader",
    "FrameWriter",
    "Malformed",
    "TooLarge",
    "encode",
    "loads",
    "nbytes",
]

Buffer = bytes | bytearray | memoryview
Frame = tuple[Any, list[memoryview]]

PREFIX = struct.Struct("!II")
_CHUNK = 1 << 18
_SMALL = 1 << 16
_MAX_HEADER = 32 << 20  # as objects, JSON takes up to twenty times as much
FROM_NODE = 4 << 20
"""The longest header from a node: it is parsed while no thread of the user's program runs."""
_MAX_BUFFERS = 1 << 20
_MAX_FRAME = 16 << 30
_MAX_BYTES = _MAX_FRAME - (64 << 20)  # in buffers: their lengths and the header are part of the frame
_STEP = 16 << 20  # how much is believed at first of the size that a frame names
_decoder: Any = json.JSONDecoder()
_scan: Callable[[str, int], tuple[Any, int]] = _decoder.scan_once  # what json.loads comes down to


class Malformed(ValueError):
    """Not a frame or message of ours; only that peer's connection is broken."""


class TooLarge(ValueError):
    """More than a frame may hold."""


def loads(data: Buffer) -> Any:
    try:
        text = str(data, "utf-8", "surrogatepass")
        value, end = _scan(text, 0)
    except (StopIteration, ValueError, RecursionError) as exc:  # also of numbers with thousands of digits
        raise Malformed(f"the header of a frame is not JSON of ours ({type(exc).__name__})") from None
    if end != len(text):
        raise Malformed("the header of a frame is not JSON")
    return value


def _make_encoder() -> Callable[[Any, int], Iterable[str]]:
    made: Any = json.encoder
    if made.c_make_encoder is None:
        plain = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False)
        return lambda value, _: plain.iterencode(value)
    return made.c_make_encoder(None, _refuse, made.encode_basestring, None, ":", ",", False, False, True)


def _refuse(value: object) -> None:
    raise TypeError(f"{type(value).__name__} cannot be part of a message")


_encoder = _make_encoder()


_EMPTY = bytearray()  # never changed


@functools.lru_cache(256)
def _prefix(buffers: int) -> struct.Struct:
    return struct.Struct(f"!II{buffers}Q")


def nbytes(buffer: Buffer) -> int:
    return buffer.nbytes if isinstance(buffer, memoryview) else len(buffer)


def encode(header: Any, buffers: Sequence[Buffer] = (), most_header: int | None = None) -> list[Buffer]:
    """Pieces ready to be sent. Raises TooLarge for what no reader takes, or a reader with the limit `most_header`."""
    text = "".join(_encoder(header, 0)).encode("utf-8", "surrogatepass")
    lengths = [b.nbytes if isinstance(b, memoryview) else len(b) for b in buffers]
    count, size = len(lengths), sum(lengths)
    longest = _MAX_HEADER if most_header is None else min(most_header, _MAX_HEADER)
    if len(text) > longest or count > _MAX_BUFFERS or size > _MAX_BYTES:
        raise TooLarge(
            f"a message of {len(text):,} bytes, {count:,} buffers and {size:,} bytes in these; messages have up to "
            f"{longest:,}, {_MAX_BUFFERS:,} and {_MAX_BYTES:,}."
        )
    head = _prefix(count).pack(len(text), count, *lengths)
    if size <= _SMALL:
        return [b"".join((head, text, *buffers))]
    return [head + text, *(b for b in buffers if nbytes(b))]


class FrameWriter:
    def __init__(self) -> None:
        self._pieces: deque[memoryview] = deque()
        self.pending = 0

    def add(self, pieces: Iterable[Buffer]) -> None:
        for piece in pieces:
            view = memoryview(piece).cast("B") if not isinstance(piece, memoryview) else piece
            self._pieces.append(view)
            self.pending += view.nbytes

    def write(self, send: Callable[[memoryview], int]) -> bool:
        """Sends as much as possible at once; True when nothing is left. `send` raises BlockingIOError when full."""
        pieces = self._pieces
        while pieces:
            piece = pieces[0]
            try:
                sent = send(piece[:_CHUNK] if piece.nbytes > _CHUNK else piece)
            except BlockingIOError:
                return False
            self.pending -= sent
            if sent == piece.nbytes:
                pieces.popleft()
            else:
                pieces[0] = piece[sent:]
        return True

    def clear(self) -> None:
        self._pieces.clear()
        self.pending = 0


class FrameReader:
    def __init__(self, most_header: int | None = None) -> None:
        self._most_header = _MAX_HEADER if most_header is None else most_header
        self._data = _EMPTY  # bytes of frames that are not complete yet
        self._chunk = memoryview(bytearray(_CHUNK))
        self._big: bytearray | None = None  # a frame too large for chunks, filled in place
        self._size = self._filled = 0  # of that frame
        self.last = 0

    def read(self, recv_into: Callable[[memoryview], int]) -> tuple[list[Frame], bool]:
        if self._big is not None:
            if self._filled == len(self._big):
                self._big += bytes(min(self._filled, self._size - self._filled))
            got = self.last = recv_into(memoryview(self._big)[self._filled :])
            if not got:
                return [], False
            self._filled += got
            if self._filled < self._size:
                return [], True
            whole, self._big = self._big, None
            return self._parse(whole), True
        got = self.last = recv_into(self._chunk)
        if not got:
            return [], False
        data = self._data
        if data:
            data += self._chunk[:got]
        else:
            data = bytearray(self._chunk[:got])
        return self._parse(data), True

    def _parse(self, data: bytearray) -> list[Frame]:
        frames: list[Frame] = []
        view = memoryview(data)
        start, end = 0, len(data)
        while end - start >= PREFIX.size:
            head, count = PREFIX.unpack_from(view, start)
            if head > self._most_header or count > _MAX_BUFFERS:
                raise Malformed("this is not one of our frames: the peer speaks another protocol.")
            at = start + PREFIX.size + 8 * count
            if end < at:
                break
            lengths = _prefix(count).unpack_from(view, start)[2:]
            size = at + head + sum(lengths) - start
            if end - start < size:
                if size > _MAX_FRAME:
                    raise Malformed(f"a frame of {size:,} bytes, more than any of ours has.")
                if size > 2 * _CHUNK:
                    self._big = bytearray(min(size, max(_STEP, end - start)))
                    self._big[: end - start] = view[start:end]
                    self._size, self._filled = size, end - start
                    start = end
                break
            header = loads(view[at : at + head])
            at += head
            buffers: list[memoryview] = []
            for length in lengths:
                buffers.append(view[at : at + length])
                at += length
            frames.append((header, buffers))
            start += size
        self._data = (data[start:] if start else data) if start < end else _EMPTY
        return frames
