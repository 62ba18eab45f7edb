"""Large things of every kind: equal on the other side, in memory of their own, and never inside the pickle."""

from __future__ import annotations

import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skyward.transport import blobs
from skyward.transport.payload import Packer, PieceWriter, _headers, bytearray_of, bytes_of, unpack
from tests.support.journeys import travel

SMALL = 4096  # bytes; more than any pickle below needs besides its buffers
ROWS = 300_000  # more than a megabyte of whatever


class Held:
    """An object of the user's."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


@pytest.mark.parametrize(
    "value",
    [
        random.randbytes(3_000_000),
        random.randbytes(9_000_000),
        bytearray(random.randbytes(3_000_000)),
        bytearray(random.randbytes(9_000_000)),
        "naïve ☃ \ud800 " * 200_000,
        "a" * 2_000_000,
        [random.randbytes(2_000_000), "b" * 2_000_000, bytearray(2_000_000)],
        {"deep": ({"er": [random.randbytes(1 << 20)]},)},
    ],
    ids=["bytes", "more bytes", "bytearray", "larger bytearray", "text", "ascii", "all of them", "nested"],
)
def test_bytes_and_texts_travel_beside_the_pickle(value: Any) -> None:
    journey = travel(value)
    assert journey.value == value
    assert type(journey.value) is type(value)
    assert journey.on_sockets < SMALL
    assert journey.blobs > 0


def test_bytes_are_not_copied_when_they_are_packed() -> None:
    data = random.randbytes(2_000_000)
    _, buffers = Packer().pack({"a": data, "b": bytearray(data)}, "value")
    assert buffers[0].obj is data
    assert len(buffers) == 2


def test_what_comes_in_an_order_goes_in_that_order() -> None:
    parts: list[Any] = []
    for number in range(6):
        parts += [
            np.full(ROWS, number),
            bytes([number]) * 1_500_000,
            np.full(3, number),
            bytearray([number]) * (1 << 20),
        ]
    journey = travel(Held(parts=parts))
    for sent, got in zip(parts, journey.value.parts, strict=True):
        assert type(got) is type(sent)
        assert bytes(got) == bytes(sent)
    assert journey.on_sockets < SMALL


def test_the_same_bytes_twice_are_one_object_there() -> None:
    data = random.randbytes(2_000_000)
    journey = travel([data, {"again": data}])
    first, second = journey.value[0], journey.value[1]["again"]
    assert first is second
    assert journey.blobs == 1


def test_a_bytearray_can_be_changed_and_grown_on_the_other_side() -> None:
    sent = bytearray(2_000_000)
    got = travel(sent).value
    got[0] = 1
    got += b"more"
    assert sent[0] == 0


def test_many_small_arrays_go_together_as_one_large_buffer() -> None:
    """Each of them is too small for a blob; together they would fill a socket."""
    arrays = [np.full(1000 + number, number, dtype="f4") for number in range(1000)]
    journey = travel({"small": arrays, "large": np.arange(ROWS), "none": np.empty(0)})
    assert journey.on_sockets < 40 * len(arrays)
    assert journey.blobs == 2
    assert all(np.array_equal(a, b) for a, b in zip(arrays, journey.value["small"], strict=True))
    assert np.array_equal(journey.value["large"], np.arange(ROWS))
    assert journey.value["none"].shape == (0,)
    for array in journey.value["small"]:
        array += 1
    assert [int(array[0]) for array in journey.value["small"]] == list(range(1, 1001))


def arrays() -> dict[str, Any]:
    cube = np.arange(4.0 * ROWS).reshape(2, ROWS, 2)
    frozen = np.arange(ROWS)
    frozen.flags.writeable = False
    return {
        "C order": cube,
        "Fortran order": np.asfortranarray(cube),
        "transposed": cube.transpose(1, 0, 2),
        "with gaps": cube[:, ::2],
        "backwards": cube[:, ::-1],
        "repeated": np.broadcast_to(np.arange(1000.0), (1000, 1000)),
        "read-only": frozen,
        "other byte order": np.arange(ROWS).astype(">i8"),
        "structured": np.zeros(ROWS, dtype=[("a", "i4"), ("b", "f8", (2,))]),
        "dates": np.arange(ROWS).astype("datetime64[s]"),
        "text": np.full(ROWS, "abc"),
        "truth": np.arange(5 * ROWS) % 3 == 0,
        "complex": np.arange(ROWS) * 1j,
        "void": np.zeros(ROWS, dtype="V8"),
    }


@pytest.mark.parametrize("name", arrays())
def test_an_array_travels_beside_the_pickle(name: str) -> None:
    sent = arrays()[name]
    for value in (sent, Held(array=sent)):  # alone it is pickled by the shortest way
        journey = travel(value)
        got = journey.value if value is sent else journey.value.array
        assert type(got) is np.ndarray
        assert (got.dtype, got.shape) == (sent.dtype, sent.shape)
        assert got.tobytes() == sent.tobytes()
        assert got.flags.writeable == (name != "read-only")
        assert journey.on_sockets < SMALL
        if sent.flags.forc or name == "transposed":
            assert got.strides == sent.strides


def test_an_array_of_objects_travels_inside_the_pickle() -> None:
    sent = np.array([{"a": 1}, None, "text"] * 3, dtype=object)
    assert (travel(sent).value == sent).all()


def test_an_array_that_is_mapped_from_a_file_travels(tmp_path: Path) -> None:
    sent = np.memmap(tmp_path / "data", dtype="f4", mode="w+", shape=(ROWS, 2))
    sent[:] = np.arange(2 * ROWS).reshape(ROWS, 2)
    journey = travel(sent)
    assert np.array_equal(journey.value, sent)
    assert journey.on_sockets < SMALL


def test_what_arrives_can_be_changed_and_nobody_else_sees_it(tmp_path: Path) -> None:
    head, buffers = Packer().pack(np.zeros(ROWS), "value")
    blob = blobs.write(str(tmp_path), buffers[0])
    here, there = (unpack(head, [blobs.read(blob)]) for _ in range(2))
    here += 1
    assert there.sum() == 0
    assert unpack(head, [blobs.read(blob)]).sum() == 0


def test_what_is_small_is_an_ordinary_pickle() -> None:
    head, buffers = Packer().pack(Held(a=b"x" * 100_000, b="y" * 100_000), "value")
    assert buffers == []
    assert pickle.loads(head).a == b"x" * 100_000


def test_a_length_that_needs_eight_bytes_is_understood() -> None:
    lengths = {len(header) for _, header in _headers(5 << 30)}
    assert lengths == {9}
    assert {header[:1] for _, header in _headers(5 << 30)} == {pickle.BINBYTES8, pickle.BINUNICODE8, pickle.BYTEARRAY8}


def test_a_large_part_that_nothing_announces_stays_in_the_stream() -> None:
    """As it would with a pickler that writes otherwise than ours does."""
    out = PieceWriter()
    out.write(b"\x80\x05")
    out.write(bytes(2_000_000))
    assert out.packed() == (b"\x80\x05" + bytes(2_000_000), [])


@pytest.mark.parametrize("size", [0, 1, 100, (8 << 20) - 1, 8 << 20, (8 << 20) + 1, 20_000_003])
def test_copies_in_huge_pages_are_copies(size: int) -> None:
    data = random.randbytes(size)
    assert bytes_of(memoryview(data)) == data
    assert bytearray_of(memoryview(data)) == data
    assert bytes_of(data) is data
