"""Frames on a stream: however the bytes are cut, the same frames come out."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyward.transport import frames as frames_module
from skyward.transport.frames import FROM_NODE, FrameReader, FrameWriter, Malformed, TooLarge, encode, nbytes

HEADERS = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
FRAMES = st.lists(st.tuples(HEADERS, st.lists(st.binary(max_size=40), max_size=4)), max_size=5)


def flat(frames: list[tuple[Any, list[bytes]]]) -> bytes:
    return b"".join(bytes(piece) for header, buffers in frames for piece in encode(header, buffers))


def source(data: bytes, cuts: Callable[[int], int]) -> Callable[[memoryview], int]:
    """A socket that gives at most `cuts(n)` bytes the n-th time, and then its end."""
    at = turn = 0

    def recv_into(view: memoryview) -> int:
        nonlocal at, turn
        size = min(len(view), max(1, cuts(turn)), len(data) - at)
        view[:size] = data[at : at + size]
        at, turn = at + size, turn + 1
        return size

    return recv_into


def read_all(
    recv_into: Callable[[memoryview], int], reader: FrameReader | None = None
) -> list[tuple[Any, list[bytes]]]:
    reader, found, alive = reader or FrameReader(), [], True
    while alive:
        frames, alive = reader.read(recv_into)
        found += [(header, list(map(bytes, buffers))) for header, buffers in frames]
    return found


@settings(max_examples=60)
@given(frames=FRAMES, sizes=st.lists(st.integers(1, 30), min_size=1, max_size=10))
def test_frames_survive_any_cut(frames: list[tuple[Any, list[bytes]]], sizes: list[int]) -> None:
    assert read_all(source(flat(frames), lambda turn: sizes[turn % len(sizes)])) == frames


@pytest.mark.parametrize("size", [0, 1, (1 << 16) - 1, 1 << 16, (1 << 18) + 1, (1 << 19) + 3, 5 << 20])
@pytest.mark.parametrize("cut", [1 << 13, 1 << 18, 1 << 30])
def test_buffers_of_every_size_arrive_between_small_frames(size: int, cut: int) -> None:
    big = bytes(i % 251 for i in range(1000)) * (size // 1000 + 1)
    frames: list[tuple[Any, list[bytes]]] = [(1, [b"a"]), ("big", [b"x", big[:size], b"y"]), (2, []), (3, [b""])]
    assert read_all(source(flat(frames), lambda _: cut)) == frames


def test_a_large_header_arrives() -> None:
    header = {"text": "é" * 400_000}
    assert read_all(source(flat([(header, [b"z"])]), lambda _: 70_001)) == [(header, [b"z"])]


def test_headers_keep_every_text() -> None:
    """Lone surrogates too: Python's names of files may hold them."""
    header = ["\udc80", "\x00", "日本", "\\u", {"k": [1.5, None, True]}]
    assert read_all(source(flat([(header, [])]), lambda _: 3)) == [(header, [])]


def test_many_buffers_arrive() -> None:
    buffers = [bytes([i % 256]) * (i % 7) for i in range(40_000)]
    assert read_all(source(flat([(0, buffers)]), lambda _: 1 << 15)) == [(0, buffers)]


def test_large_buffers_are_neither_copied_nor_joined() -> None:
    big = bytearray(1 << 20)
    pieces = encode(["x"], [big, b""])
    assert any(piece is big for piece in pieces)
    assert len(encode(["x"], [b"a", b"b"])) == 1
    assert sum(map(nbytes, pieces)) == len(flat([(["x"], [big, b""])]))  # type: ignore[list-item]


def test_received_buffers_may_be_changed() -> None:
    """Arrays are rebuilt on top of them."""
    frames, _ = FrameReader().read(source(flat([(0, [b"abc"])]), lambda _: 100))
    view = frames[0][1][0]
    view[0] = ord("X")
    assert bytes(view) == b"Xbc"


def test_another_protocol_is_refused() -> None:
    with pytest.raises(ValueError, match="another protocol"):
        FrameReader().read(source(b"\xff" * 64, lambda _: 64))


@pytest.mark.parametrize(
    ("part", "end"),
    [(b"[],", b"0]"), (b"{},", b"0]"), (b"1e9,", b"0]"), (b"%x", b'"":0}')],
    ids=["lists", "objects", "numbers", "fields"],
)
def test_whatever_is_in_the_longest_header_of_a_node_it_is_read_in_a_moment(part: bytes, end: bytes) -> None:
    """SEC-7: meanwhile no other thread of the user's program runs. Here it takes a tenth of what is allowed."""
    if part == b"%x":
        header = b"{" + b"".join(b'"%x":0,' % number for number in range(FROM_NODE // 9))
    else:
        header = b"[" + part * (FROM_NODE // len(part) - 2)
    header = header[: FROM_NODE - len(end)].rpartition(b",")[0] + b"," + end
    sent = len(header).to_bytes(4, "big") + bytes(4) + header
    reader, began = FrameReader(FROM_NODE), time.thread_time()
    assert len(read_all(source(sent, lambda _: 1 << 18), reader)) == 1
    assert time.thread_time() - began < 5


def test_a_header_that_is_longer_than_its_reader_takes_is_refused_at_its_first_bytes() -> None:
    """SEC-7"""
    prefix = (FROM_NODE + 1).to_bytes(4, "big") + bytes(4)
    with pytest.raises(Malformed):
        FrameReader(FROM_NODE).read(source(prefix, lambda _: 8))
    with pytest.raises(TooLarge, match="4,194,304"):
        encode("x" * FROM_NODE, (), FROM_NODE)
    assert encode("x" * FROM_NODE)


@settings(max_examples=100)
@given(header=st.text(max_size=60), buffers=st.lists(st.binary(max_size=30), max_size=6))
def test_what_is_sent_is_read_and_what_would_be_refused_is_not_sent(header: str, buffers: list[bytes]) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(frames_module, "_MAX_HEADER", 40)
        patched.setattr(frames_module, "_MAX_BUFFERS", 4)
        patched.setattr(frames_module, "_MAX_BYTES", 70)
        patched.setattr(frames_module, "_MAX_FRAME", 70 + 40 + 4 * 8 + 8)
        try:
            sent = flat([(header, buffers)])
        except TooLarge:
            assert len(buffers) > 4 or sum(map(len, buffers)) > 70 or len(json.dumps(header)) > 40
        else:
            assert read_all(source(sent, lambda _: 7)) == [(header, buffers)]


def test_a_connection_that_ends_within_a_frame_gives_no_frame() -> None:
    whole = flat([(1, [b"x" * 100])])
    for length in (0, 3, 8, 20, len(whole) - 1):
        assert read_all(source(whole[:length], lambda _: 7)) == []
    big = flat([(1, [b"x" * (1 << 20)])])
    assert read_all(source(big[:-1], lambda _: 1 << 18)) == []


@settings(max_examples=40)
@given(frames=FRAMES, sizes=st.lists(st.integers(0, 30), min_size=1, max_size=10).filter(any))
def test_a_writer_goes_on_where_the_socket_was_full(frames: list[tuple[Any, list[bytes]]], sizes: list[int]) -> None:
    writer, out, turn = FrameWriter(), bytearray(), 0

    def send(view: memoryview) -> int:
        nonlocal turn
        size, turn = sizes[turn % len(sizes)], turn + 1
        if not size:
            raise BlockingIOError
        out.extend(view[:size])
        return min(size, view.nbytes)

    for header, buffers in frames:
        writer.add(encode(header, buffers))
    expected = flat(frames)
    assert writer.pending == len(expected)
    while not writer.write(send):
        assert writer.pending == len(expected) - len(out)
    assert bytes(out) == expected
    assert writer.pending == 0


def test_a_cleared_writer_has_forgotten_everything() -> None:
    writer = FrameWriter()
    writer.add(encode([1], [b"x" * 100_000]))
    writer.clear()
    assert writer.pending == 0
    assert writer.write(lambda _: pytest.fail("there is nothing to send"))


def test_the_header_is_plain_json() -> None:
    """Nothing of the pool's own traffic needs unpickling."""
    whole = flat([({"a": [1, 2]}, [])])
    assert json.loads(whole[8:]) == {"a": [1, 2]}
