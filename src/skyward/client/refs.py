"""Objects that stay in a pool: those that users put there, packed once, and results that have never left their node."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from skyward.api.brief import brief
from skyward.api.ref import Ref
from skyward.client.call import CallFuture
from skyward.client.kept import KeptResult
from skyward.errors import PoolClosed
from skyward.transport import blobs
from skyward.transport.frames import nbytes
from skyward.transport.payload import Packer, unpack
from skyward.transport.refs import collected
from skyward.transport.threads import run_in_thread

__all__ = ["Keeper", "Refs"]

T = TypeVar("T")


class Keeper(Protocol):
    """What knows the nodes that keep objects."""

    def forget(self, keys: Sequence[str]) -> None:
        """Has nodes let go of objects that were put."""
        ...

    def get_kept(self, result: KeptResult, future: CallFuture[Any]) -> None:
        """Has a result brought here."""
        ...

    def release_kept(self, result: KeptResult) -> None:
        """Says that the user has let go of a result."""
        ...


class Refs:
    """Makes the Refs of one pool."""

    def __init__(self, packer: Packer, store: blobs.Store, keeper: Keeper) -> None:
        self._packer, self._store, self._keeper = packer, store, keeper

    def put(self, value: T) -> Ref[T]:
        """Packs an object; it travels with the first call that uses it, to each machine once."""
        with collected(self._store) as inner:
            head, buffers = self._packer.pack(value, "the object")
        pieces = [head, *buffers]
        kept = [self._store.put(piece) for piece in pieces]
        key, size = os.urandom(12).hex(), sum(map(nbytes, pieces))
        drop = partial(_drop_later, partial(_drop, self._store, self._keeper, key, [name for name, _ in kept]))
        words = f"a {type(value).__name__}: {brief(value, 40)}"
        return Ref(key, words, self._store, partial(_read, self._store, kept), drop, size, kept, list(inner.values()))

    def kept(self, result: KeptResult, words: str) -> Ref[Any]:
        """The Ref to a result that stays on its node."""
        result.uses += 1
        drop = partial(_drop_later, partial(self._keeper.release_kept, result))
        get = partial(_brought, self._store, self._keeper, result)
        return Ref(result.key, words, self._store, get, drop, kept=result)


def _read(store: blobs.Store, kept: Sequence[tuple[str, blobs.Blob]]) -> Any:
    _check_open(store)
    head, *buffers = (blobs.read(blob) for _, blob in kept)
    return unpack(head, buffers, keep_classes=True)


def _brought(store: blobs.Store, keeper: Keeper, result: KeptResult) -> Any:
    _check_open(store)
    future: CallFuture[Any] = CallFuture(result.name)
    keeper.get_kept(result, future)
    return future.result()


def _check_open(store: blobs.Store) -> None:
    if not os.path.isdir(store.directory):
        raise PoolClosed("the pool is closed, and what it kept is gone with it. Call get() while the pool is open.")


def _drop(store: blobs.Store, keeper: Keeper, key: str, names: Sequence[str]) -> None:
    store.release(names)
    keeper.forget([key])


def _drop_later(drop: Callable[[], None]) -> None:
    """In a thread: whoever lets go of a Ref may hold any lock."""
    run_in_thread(drop)
