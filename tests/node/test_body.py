"""What a body's process sends, and what it says when what it gives, or takes, finds no file."""

from __future__ import annotations

import errno
import math
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from skyward.errors import FilesLost, NodeDiskFull, ResultNotSerializable
from skyward.node.body import Bodies, RunnerCall, Stopped
from skyward.node.protocol import Raised
from skyward.transport import blobs, frames, tensors
from skyward.transport.blobs import LARGE
from skyward.transport.codec import Message


@pytest.fixture
def bodies(tmp_path: Path) -> Bodies:
    settings = {"paths": [], "blobs": str(tmp_path), "max_result": math.inf, "node": 3}
    return Bodies(settings, lambda message, buffers: None)


def call(**more: Any) -> RunnerCall:
    return RunnerCall("1", {"name": "train", "fn": "", "split": 1, "attempt": 0, **more}, [b"", b""])


@pytest.mark.parametrize("more", [{}, {"keep": "ab" * 10}])
def test_a_result_for_which_there_is_no_room_names_the_node(
    bodies: Bodies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    def full(*_: Any) -> blobs.Blob:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(blobs, "write", full)
    with pytest.raises(NodeDiskFull, match=r"node 3 has no room for the result of train .*return or keep"):
        bodies.packed_result(call(**more), b"x" * LARGE)
    assert list(tmp_path.iterdir()) == []


class OnGpu:
    """As a tensor on a GPU: what is packed of it is copied into a file that is made for it."""

    def __reduce__(self) -> Any:
        assert tensors.local.room is not None
        return bytes, (bytes(tensors.local.room(LARGE)),)


@pytest.mark.parametrize("more", [{}, {"keep": "ab" * 10}])
@pytest.mark.parametrize(
    ("error", "expected", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), NodeDiskFull, "node 3 has no room for the result of train"),
        (FileNotFoundError(errno.ENOENT, "No such file"), FilesLost, "the result of train on node 3"),
    ],
)
def test_a_result_on_a_gpu_that_finds_no_file_is_named_too(
    bodies: Bodies,
    monkeypatch: pytest.MonkeyPatch,
    more: dict[str, Any],
    error: OSError,
    expected: type[Exception],
    words: str,
) -> None:
    def fail(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(blobs, "draft", fail)
    with pytest.raises(expected, match=words):
        bodies.packed_result(call(**more), OnGpu())


def test_a_call_that_is_stopped_after_its_result_was_written_leaves_no_files(
    bodies: Bodies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        assert list(tmp_path.iterdir())
        raise Stopped

    monkeypatch.setattr("skyward.transport.refs.keep", stop)
    with pytest.raises(Stopped):
        bodies.packed_result(call(keep="ab" * 10), b"x" * LARGE)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("more", [{}, {"keep": "ab" * 10}])
def test_a_result_in_more_large_pieces_than_a_message_can_name_is_refused(
    bodies: Bodies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    monkeypatch.setattr(frames, "FROM_NODE", 1000)
    with pytest.raises(ResultNotSerializable, match="it has 20 large arrays or buffers"):
        bodies.packed_result(call(**more), [bytearray(LARGE) for _ in range(20)])
    assert list(tmp_path.iterdir()) == []


def test_a_result_whose_directory_is_gone_is_named(bodies: Bodies, tmp_path: Path) -> None:
    tmp_path.rmdir()
    with pytest.raises(FilesLost, match="the result of train on node 3"):
        bodies.packed_result(call(), b"x" * LARGE)
    tmp_path.mkdir()


def test_an_argument_whose_file_is_gone_is_named(bodies: Bodies, tmp_path: Path) -> None:
    verdict = bodies.run(call(blobs={"1": [str(tmp_path / "gone"), 10]}))(id="c", seconds=0.0)
    assert isinstance(verdict, Raised)
    assert "FilesLost" in verdict.error["type"]


def test_a_stream_of_items_with_very_many_small_buffers_fits_into_frames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames, "_MAX_BUFFERS", 600)
    sent: list[int] = []

    def send(message: Message) -> None:
        raw, buffers = message.encoded()
        frames.encode([raw], buffers)
        sent.extend(raw[2])

    def items() -> Iterator[list[pickle.PickleBuffer]]:
        for _ in range(5):
            yield [pickle.PickleBuffer(bytes(2048)) for _ in range(300)]

    Bodies({"paths": [], "blobs": str(tmp_path)}, send)._stream(call(), items())  # type: ignore[arg-type]
    assert sent == [2] * 5, "a head and one buffer for each"
