"""Pieces of a file that reach a node late, or not at first: the file is whole on the node all the same."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from skyward.client.files import Answers, Push, Transfers
from skyward.errors import TransferError
from skyward.node.blob_cache import BlobCache
from skyward.node.files import NodeFiles
from skyward.node.protocol import FileOrder
from skyward.transport.blobs import Blob, Store


class FarEnd:
    """A node with files of its own, in the place of an engine. Blobs whose number is in `lost` are lost at first."""

    def __init__(self, folder: Path, lost: set[int]) -> None:
        self.files = folder / "files"
        self.files.mkdir()
        (folder / "blobs").mkdir(0o700)
        self._cache = BlobCache(str(folder / "blobs"), None)
        self._cache.shared = False
        self._node = NodeFiles(self._cache, self._look, self._answered)
        self._node.cwd = str(self.files)
        self._transfers = Transfers(lambda node, messages: self._ordered(messages))
        self._lost, self._paths, self.sent = lost, list[tuple[str, str]](), list[str]()

    def ask_files(self, node: int, order: FileOrder) -> Answers:
        return self._transfers.ask(node, order)

    def load_blob(self, node: int, name: str, blob: Blob) -> None:
        self._paths.append((name, blob[0]))
        if len(self._paths) - 1 not in self._lost:
            self.send_blob(node, name)

    def send_blob(self, node: int, name: str) -> None:
        data = Path(dict(self._paths)[name]).read_bytes()
        self.sent.append(name)
        self._cache.accept(name, 0, len(data), data)

    def drop_blob(self, nodes: list[int], name: str) -> None:
        self._cache.discard([name])

    def _ordered(self, messages: list[Any]) -> None:
        for message in messages:
            self._node.ordered(message)

    def _look(self) -> None:
        self._node.poll()

    def _answered(self, message: Any) -> None:
        self._transfers.answered(message, 0, 0.0)


@pytest.fixture
def store() -> Iterator[Store]:
    made = Store()
    yield made
    made.close()


def push(far: Any, store: Store, source: Path) -> None:
    Push(far, store, [0], local=False).run(str(source), "big", lambda size: lambda more: None)


@pytest.mark.parametrize("lost", [{0}, {2}, {1, 3, 8}])
def test_pieces_behind_one_that_did_not_come_are_written_after_it(store: Store, tmp_path: Path, lost: set[int]) -> None:
    far, source = FarEnd(tmp_path, lost), tmp_path / "source"
    source.write_bytes(os.urandom(40 << 20))
    push(far, store, source)
    assert (far.files / "big").read_bytes() == source.read_bytes()
    assert len(far.sent) == 10  # each once


def test_a_file_that_somebody_removes_meanwhile_is_said(store: Store, tmp_path: Path) -> None:
    far, source = FarEnd(tmp_path, set()), tmp_path / "source"
    source.write_bytes(os.urandom(40 << 20))
    load = far.load_blob

    def remove(node: int, name: str, blob: Blob) -> None:
        if len(far.sent) == 8:
            for path in far.files.iterdir():
                path.unlink()
        load(node, name, blob)

    far.load_blob = remove  # type: ignore[method-assign]
    with pytest.raises(TransferError, match="what was written of it before is gone"):
        push(far, store, source)


def test_a_push_to_one_pool_does_not_wait_for_a_push_to_another() -> None:
    one, other = Transfers(lambda *_: None), Transfers(lambda *_: None)
    with one.pushing:
        assert other.pushing.acquire(blocking=False)
        assert not one.pushing.acquire(blocking=False)


def test_equal_pieces_are_let_go_of_when_the_last_of_them_is_written(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have one name; a node that lacks it after the first one could not be sent it again."""
    far, source, dropped = FarEnd(tmp_path, set()), tmp_path / "source", list[str]()
    monkeypatch.setattr(far, "drop_blob", lambda nodes, name: dropped.append(name))
    source.write_bytes(bytes(40 << 20))
    push(far, store, source)
    assert (far.files / "big").read_bytes() == source.read_bytes()
    assert len(dropped) == 1
