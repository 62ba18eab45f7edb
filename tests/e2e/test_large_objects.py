"""Other calls go on while a large object is hashed, written or removed; each of these takes seconds for some GB."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import wait
from typing import Any

import pytest

import skyward as sky
from skyward.transport import blobs

LARGE = b"x" * (2 << 20)


@sky.compute
def nothing() -> None:
    pass


class Held:
    """Has a function wait until it is released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> None:
        self.began, self.go_on, act = threading.Event(), threading.Event(), getattr(module, name)

        def held(*args: Any, **kwargs: Any) -> Any:
            self.began.set()
            assert self.go_on.wait(300)
            return act(*args, **kwargs)

        monkeypatch.setattr(module, name, held)


@pytest.mark.parametrize("name", ["digest", "write"])
def test_calls_go_on_while_an_object_is_put(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    with sky.ComputePool(nodes=2, console=False) as pool:
        held, refs = Held(monkeypatch, blobs, name), list[Any]()
        putting = threading.Thread(target=lambda: refs.append(pool.put(LARGE)))
        putting.start()
        try:
            assert held.began.wait(60)
            _call_often(pool)
            assert not refs
        finally:
            held.go_on.set()
        putting.join(60)
        assert refs[0].get() == LARGE


def test_calls_go_on_while_objects_that_nobody_has_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    with sky.ComputePool(nodes=2, console=False) as pool:
        ref = pool.put(LARGE)
        held = Held(monkeypatch, os, "unlink")
        try:
            del ref
            assert held.began.wait(60)
            _call_often(pool)
        finally:
            held.go_on.set()


def test_calls_go_on_while_results_that_nobody_wants_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    size = 80 << 20

    @sky.compute
    def large() -> bytes:
        return bytes(size)

    with sky.ComputePool(nodes=2, console=False) as pool:
        future = large() > pool
        wait([future])
        held = Held(monkeypatch, os, "unlink")
        try:
            del future
            assert held.began.wait(60)
            _call_often(pool)
        finally:
            held.go_on.set()


def _call_often(pool: sky.ComputePool) -> None:
    done = threading.Event()

    def call() -> None:
        for _ in range(20):
            nothing() >> pool
        nothing() @ pool
        done.set()

    act: Callable[[], None] = call
    threading.Thread(target=act, daemon=True).start()
    assert done.wait(60), "calls wait for it"
