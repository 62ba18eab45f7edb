"""Objects that users put into a pool: packed once, kept as blobs until nobody has a Ref any more."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from skyward.api.ref import Ref
from skyward.transport import blobs
from skyward.transport.frames import nbytes
from skyward.transport.payload import Packer, unpack
from skyward.transport.refs import collected
from skyward.transport.threads import run_in_thread

__all__ = ["Refs"]

T = TypeVar("T")


class Refs:
    """Makes the Refs of one pool; `forget` tells its nodes that an object is not needed any more."""

    def __init__(self, packer: Packer, store: blobs.Store, forget: Callable[[Sequence[str]], None]) -> None:
        self._packer, self._store, self._forget = packer, store, forget

    def put(self, value: T) -> Ref[T]:
        """Packs an object; it travels with the first call that uses it, to each machine once."""
        with collected(self._store) as inner:
            head, buffers = self._packer.pack(value, "the object")
        pieces = [head, *buffers]
        kept = [self._store.put(piece) for piece in pieces]
        drop = partial(_drop_later, self._store, self._forget)
        size = sum(map(nbytes, pieces))
        return Ref(os.urandom(12).hex(), value, size, kept, list(inner.values()), self._store, _read, drop)


def _read(kept: Sequence[tuple[str, blobs.Blob]]) -> Any:
    head, *buffers = (blobs.read(blob) for _, blob in kept)
    return unpack(head, buffers, keep_classes=True)


def _drop_later(store: blobs.Store, forget: Callable[[Sequence[str]], None], key: str, names: Sequence[str]) -> None:
    """In a thread: whoever lets go of a Ref may hold any lock."""

    def drop() -> None:
        store.release(names)
        forget([key])

    run_in_thread(drop)
