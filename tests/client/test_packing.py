"""What becomes of the files of large arguments when their calls cannot be packed, or not be sent."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any, cast

import pytest

import skyward as sky
from skyward.api.context import PoolContext
from skyward.client.engine import Engine
from skyward.client.packing import Keeper, Packing
from skyward.errors import NodeLost, NotSerializable, PoolClosed
from skyward.pool.sending import Sender
from skyward.transport.blobs import LARGE, Store
from skyward.transport.payload import Packer
from tests.support.waiting import until


@sky.compute
def length(*values: Any) -> int:
    return len(values)


@pytest.fixture
def store() -> Iterator[Store]:
    """Its limit is so small that what no call needs is removed at once."""
    made = Store(limit=1)
    yield made
    made.close()


def files(store: Store) -> list[str]:
    return [name for name in os.listdir(store.directory) if name != "lock"]


class NoNodes:
    """An engine that cannot send anything."""

    ranks = range(2)

    def __init__(self, error: Exception) -> None:
        self._error = error

    def send(self, calls: Any) -> None:
        raise self._error

    def send_to(self, calls: Any, world: int) -> bool:
        raise self._error


class Nobody:
    """The nodes of a pool that has none."""

    def forget(self, *_: Any) -> None:
        pass


def test_arguments_of_a_group_that_cannot_be_packed_are_released(store: Store) -> None:
    packing = Packing(Packer(), store, shared=True)
    large = [length(bytes([n]) * LARGE) for n in range(3)]
    with pytest.raises(NotSerializable):
        packing.calls([large[0], length(large[1]), length([large[2]], threading.Lock())], 0)
    with pytest.raises(NotSerializable):
        packing.calls([length(b"x" * LARGE, length(threading.Lock()))], 0)
    until(lambda: not files(store))


def test_objects_that_were_put_stay_when_a_call_of_them_cannot_be_packed(store: Store) -> None:
    packing = Packing(Packer(), store, shared=True)
    ref = packing.refs(cast("Keeper", Nobody())).put(b"x" * LARGE)
    with pytest.raises(NotSerializable):
        packing.calls([length(ref), length(threading.Lock())], 0)
    assert len(files(store)) == len(ref.blobs)
    assert ref.get() == b"x" * LARGE


def test_arguments_of_calls_that_cannot_be_sent_are_released(store: Store) -> None:
    packing = Packing(Packer(), store, shared=True)
    call = length(b"x" * LARGE, length(b"y" * LARGE))
    for error in (PoolClosed("closed"), NodeLost(0)):
        sender = Sender(cast("PoolContext", None), cast("Engine", NoNodes(error)), packing, 0, None)
        with pytest.raises(type(error)):
            sender.send([call], None)
        with pytest.raises(type(error)):
            sender.broadcast(call, None)
        until(lambda: not files(store))
