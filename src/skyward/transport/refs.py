"""Objects that stay in a pool, on their way into calls: named in the pickle, and unpickled once in each process.

client   pack a call ── meets a Ref ──► its key in the pickle, its blobs among those of the call
                     ── meets another call ──► the key of the result that it will have
runner   install the call's refs ──► objects by key, made once ──► unpickling the call finds them
"""

from __future__ import annotations

import os
import threading
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from skyward.api.ref import Ref
from skyward.transport.payload import unpack
from skyward.transport.pickle_errors import StaysHere

__all__ = ["KEY_BYTES", "FoundCalls", "collected", "fetched", "forget", "install", "keep", "reduce", "reduce_call"]

KEY_BYTES = 10  # of a result that is kept; `blobs.KEY` counts its characters

_packing = threading.local()
_objects: dict[str, Any] = {}
_making: dict[str, threading.Lock] = {}
_lock = threading.Lock()


class collected:
    __slots__ = ("_before", "_owner")  # and no generator: one is opened for every call

    def __init__(self, owner: object) -> None:
        self._owner = owner

    def __enter__(self) -> dict[str, Ref[Any]]:
        self._before = getattr(_packing, "refs", None)
        found: dict[str, Ref[Any]] = {}
        _packing.refs = self._owner, found
        return found

    def __exit__(self, *exc: object) -> None:
        _packing.refs = self._before


def reduce(ref: Ref[Any]) -> Any:
    now: tuple[object, dict[str, Ref[Any]]] | None = getattr(_packing, "refs", None)
    if now is None or ref.owner is not now[0]:
        raise StaysHere(
            "a Ref belongs to the pool that the object was put into, or made in; put it into this one, too."
        )
    try:
        ref.check()
    except ValueError as exc:
        raise StaysHere(str(exc)) from None
    for inner in (*ref.inner, ref):
        now[1].setdefault(inner.key, inner)
    return fetched, (ref.key,)


class FoundCalls:
    def __init__(self) -> None:
        self.all: list[tuple[Any, str]] = []
        self._keys: dict[int, str] = {}

    @contextmanager
    def among(self) -> Generator[list[str]]:
        before = getattr(_packing, "calls", None)
        met: dict[str, None] = {}
        _packing.calls = self, met
        keys: list[str] = []
        try:
            yield keys
            keys += met
        finally:
            _packing.calls = before

    def key(self, call: object) -> str:
        """The same object has the same key, so it runs once."""
        if id(call) not in self._keys:
            self._keys[id(call)] = os.urandom(KEY_BYTES).hex()
            self.all.append((call, self._keys[id(call)]))
        return self._keys[id(call)]


def reduce_call(call: object) -> Any:
    now: tuple[FoundCalls, dict[str, None]] | None = getattr(_packing, "calls", None)
    if now is None:
        return NotImplemented
    key = now[0].key(call)
    now[1][key] = None
    return fetched, (key,)


def install(named: Mapping[str, Sequence[int]], buffers: Sequence[Any]) -> None:
    for key, (start, count) in named.items():
        if key in _objects:
            continue
        with _lock:
            making = _making.setdefault(key, threading.Lock())
        with making:
            if key not in _objects:
                _objects[key] = unpack(buffers[start], buffers[start + 1 : start + count])
        with _lock:
            _making.pop(key, None)


def keep(key: str, value: object) -> None:
    _objects[key] = value


def fetched(key: str) -> Any:
    return _objects[key]


def forget(keys: Iterable[str]) -> None:
    for key in keys:
        _objects.pop(key, None)
