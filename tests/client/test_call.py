"""Futures of calls: how they are settled, read and cancelled."""

from __future__ import annotations

import errno
import gc
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skyward.client.call import CallFuture
from skyward.errors import ResultNotSerializable
from skyward.node.protocol import Returned
from skyward.transport import blobs
from tests.support.forked import run_forked


class _Rebuilt:
    """Runs a function when it is unpickled."""

    def __init__(self, act: Callable[..., Any], *args: Any) -> None:
        self._act, self._args = act, args

    def __reduce__(self) -> Any:
        return self._act, self._args


def raises(kind: type[BaseException]) -> Any:
    raise kind("while it was rebuilt")


_asked = 0


def interrupted_once() -> str:
    global _asked
    _asked += 1
    if _asked == 1:
        raise KeyboardInterrupt
    return "rebuilt"


def settled(value: Any) -> CallFuture[Any]:
    future = CallFuture[Any]("train")
    future.settle(Returned(id="c", buffers=[pickle.dumps(value, 5)]))
    return future


@pytest.mark.parametrize("kind", [ValueError, MemoryError, OSError, SystemExit, GeneratorExit, BaseException])
def test_a_result_that_cannot_be_rebuilt_is_an_error_whatever_is_raised(kind: type[BaseException]) -> None:
    future = settled(_Rebuilt(raises, kind))
    for _ in range(2):
        with pytest.raises(ResultNotSerializable, match=f"train .* cannot be rebuilt here: {kind.__name__}"):
            future.result(0)
    assert isinstance(future.exception(0), ResultNotSerializable)


def test_a_result_may_be_asked_for_again_after_ctrl_c() -> None:
    future = settled(_Rebuilt(interrupted_once))
    with pytest.raises(KeyboardInterrupt):
        future.result(0)
    assert future.result(0) == "rebuilt"
    assert future.exception(0) is None


@pytest.mark.parametrize(
    "error", [OSError(errno.EMFILE, "Too many open files"), OSError(errno.ENOMEM, "no"), MemoryError(), ValueError()]
)
def test_a_result_whose_file_cannot_be_read_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def read(*_: Any, **__: Any) -> Any:
        raise error

    path = tmp_path / "blob"
    path.write_bytes(b"x" * 10)
    monkeypatch.setattr(blobs, "read", read)
    future = CallFuture[Any]("train")
    future.settle(Returned(id="c", blobs={"1": (str(path), 10)}, buffers=[b"", b""]))
    with pytest.raises(ResultNotSerializable, match="cannot be read here") as caught:
        future.result(0)
    assert caught.value.__cause__ is error
    assert not path.exists()


def test_a_file_that_is_shorter_than_its_node_said_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "blob"
    path.write_bytes(b"x" * 10)
    future = CallFuture[Any]("train")
    future.settle(Returned(id="c", blobs={"1": (str(path), 5_000_000)}, buffers=[b"", b""]))
    assert isinstance(future.exception(0), ResultNotSerializable)


def test_a_verdict_without_anything_in_it_settles_the_future_too() -> None:
    future = CallFuture[Any]("train")
    future.settle(Returned(id="c", buffers=[]))
    assert isinstance(future.exception(0), ResultNotSerializable)


def test_files_of_a_result_that_nobody_wants_are_removed(tmp_path: Path) -> None:
    def blob(name: str) -> tuple[Returned, Path]:
        path = tmp_path / name
        path.write_bytes(b"x")
        return Returned(id="c", blobs={"0": (str(path), 1)}, buffers=[b""]), path

    result, path = blob("cancelled")
    future = CallFuture[Any]("train")
    future.cancel()
    future.settle(result)
    assert not path.exists()

    result, path = blob("twice")
    future = settled(1)
    future.settle(result)
    assert not path.exists()
    assert future.result(0) == 1

    result, path = blob("never asked for")
    future = CallFuture[Any]("train")
    future.settle(result)
    assert path.exists()
    del future
    gc.collect()
    assert not path.exists()


def test_a_forked_child_may_read_a_result_and_let_go_of_it_without_removing_its_parents(tmp_path: Path) -> None:
    """As workers of multiprocessing do that unwind a frame, or collect garbage."""
    path = tmp_path / "blob"
    path.write_bytes(pickle.dumps("large", 5))
    held = [CallFuture[Any]("train")]
    held[0].settle(Returned(id="c", blobs={"0": (str(path), path.stat().st_size)}, buffers=[b""]))

    def let_go() -> None:
        del held[:]
        gc.collect()

    assert run_forked(let_go) == 0
    assert run_forked(lambda: held[0].result(0)) == 0
    assert path.exists()
    assert held[0].result(0) == "large"
    assert not path.exists()
