"""The engine with what its connections see, without nodes: who is listened to, and what a bug of ours does."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from skyward import events
from skyward.api.ranks import Ranks
from skyward.client import engine as engine_module
from skyward.client.call import Call, CallFuture
from skyward.client.connections import Heard
from skyward.client.engine import Engine
from skyward.client.settings import PoolSettings
from skyward.errors import NodeLost, SkywardError
from tests.support.waiting import until

# pyright: reportPrivateUsage=false


class Pool:
    """An engine for one node that nobody can reach, and the events that it emits."""

    def __init__(self, directory: Path) -> None:
        self.emitted: list[events.Event] = []
        self.free: list[bool] = []
        self.plan = PoolSettings(
            pool="p",
            nodes=1,
            slots=1,
            reach=self._reach,
            setup=lambda node, abouts, ports: ({}, []),
            emit=self._emit,
            listening=lambda: True,
            release=lambda digests: None,
            gang=False,
            ranks=lambda abouts: Ranks([1]),
            local=True,
            lease=0.0,
            directory=str(directory),
            address=lambda node: None,
            revive=None,
            substitutes=None,
        )
        self.engine = Engine(self.plan)

    def _reach(self, number: int) -> socket.socket:
        raise ConnectionError("nobody is there")

    def _emit(self, event: events.Event) -> None:
        with ThreadPoolExecutor(1) as other:
            self.free.append(other.submit(self._lock_is_free).result())
        assert threading.current_thread() is self.engine.thread
        self.emitted.append(event)

    def _lock_is_free(self) -> bool:
        free = self.engine._lock.acquire(timeout=10)
        self.engine._lock.release()
        return free

    def heard(self, message: list[Any], buffers: tuple[Any, ...] = ()) -> Heard:
        return Heard(0, self.engine._connections.peers[0].link, message, list(buffers))


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    made = Pool(tmp_path)
    yield made
    made.engine.abandon()


def test_an_agent_that_cannot_be_reached_is_an_error_of_opening(pool: Pool) -> None:
    with pytest.raises(NodeLost, match="nobody is there"):
        pool.engine.open(0.0)


def test_a_broadcast_that_waits_for_a_node_says_so_and_for_how_long(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "_UNTOLD", 0.0)
    monkeypatch.setattr(engine_module, "_PATIENCE", 1.0)
    pool.engine.thread.start()
    with pool.engine._lock, pytest.raises(NodeLost, match="node 0 is lost"):
        pool.engine._await_up([0])
    until(lambda: any("waits for node 0, for up to 1 s" in str(event) for event in pool.emitted))


def test_events_are_emitted_by_the_io_thread_without_the_lock(pool: Pool) -> None:
    pool.engine.thread.start()
    with pool.engine._lock:
        pool.engine.tell(0, "far")
    until(lambda: pool.emitted)
    assert pool.free == [True]


def test_a_message_that_cannot_be_handled_ends_its_call_and_the_next_is_handled(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, seen = pool.engine, list[str]()

    def hear(message: list[Any], *rest: Any) -> None:
        seen.append(message[1])
        if message[1] == "a":
            raise KeyError("a bug")

    monkeypatch.setattr(engine._receiver, "hear", hear)
    told: list[Any] = []
    monkeypatch.setattr(engine._core, "mishandled", lambda *args: told.append(args[:3]) or [])
    engine.handle([pool.heard(["done", "a", {}, 0]), pool.heard(["done", "b", {}, 0])])
    assert seen == ["a", "b"]
    assert [(number, message, type(error)) for number, message, error in told] == [(0, ["done", "a", {}, 0], KeyError)]


def test_what_was_read_from_a_node_before_it_was_given_up_is_not_listened_to(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(pool.engine._receiver, "hear", lambda *args: seen.append(args))
    old = pool.heard(["sample", 0.0, 0, 0, [], 0])
    pool.engine._connections.renounce(0)
    pool.engine.handle([old])
    assert seen == []
    pool.engine.handle([pool.heard(["sample", 0.0, 0, 0, [], 0])])
    assert len(seen) == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_calls_fail_when_the_io_thread_does(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, failed = pool.engine, threading.Event()

    def poll(timeout: float) -> None:
        failed.wait()
        raise RuntimeError("a bug")

    monkeypatch.setattr(engine._connections, "poll", poll)
    call = Call.__new__(Call)
    monkeypatch.setattr(engine._core, "collapse", lambda error, now: [("fail", call, SkywardError(str(error)))])
    call.stream, call.future = None, CallFuture("f")
    engine.thread.start()
    failed.set()
    with pytest.raises(SkywardError, match="a bug"):
        call.future.result(10)
