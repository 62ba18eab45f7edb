"""The engine with what its connections see, without nodes: who is listened to, and what a bug of ours does."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from skyward import events
from skyward.api.compute import PendingCompute
from skyward.client import engine as engine_module
from skyward.client.actions import Fail
from skyward.client.call import Call
from skyward.client.connections import Heard
from skyward.client.engine import Engine
from skyward.client.settings import PoolSettings
from skyward.errors import BootstrapError, InvalidArgument, NodeLost, SkywardError
from skyward.transport import frames
from tests.support.fake_nodes import FakePool
from tests.support.plans import StillMachines
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
            emit=self._emit,
            listening=lambda: True,
            release=lambda digests: None,
            gang=False,
            local=True,
            lease=0.0,
            directory=str(directory),
        )
        self.engine = Engine(self.plan, StillMachines())

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
    with pytest.raises(BootstrapError, match="on node 0 at 'connecting': cannot connect to it: nobody is there"):
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


def test_what_another_thread_has_done_later_wakes_the_io_thread(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting, done, poll = threading.Event(), threading.Event(), pool.engine._connections.poll

    def poll_for_long(timeout: float) -> Any:
        waiting.set()
        return poll(300.0)

    monkeypatch.setattr(pool.engine._connections, "poll", poll_for_long)
    pool.engine.thread.start()
    assert waiting.wait(60)
    pool.engine._defer(done.set)
    assert done.wait(60)


class Arguments(list[Any]):
    """What a call was made of; unlike a list, it can be watched."""


def test_a_future_that_the_user_keeps_does_not_keep_its_call(tmp_path: Path) -> None:
    with FakePool(tmp_path) as pool:
        call = pool.made(b"x")
        call.pieces = Arguments(call.pieces)
        kept, future = weakref.ref(call.pieces), call.future
        pool.engine.send_to([(0, call)])
        assert future.result(60) == 0
        del call
        until(lambda: gc.collect() >= 0 and kept() is None)


def test_a_message_that_cannot_be_handled_ends_its_call_and_the_next_is_handled(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, seen = pool.engine, list[str]()

    def hear(message: list[Any], *rest: Any) -> None:
        seen.append(message[1])
        if message[1] == "a":
            raise KeyError("a bug")

    monkeypatch.setattr(engine._receiver, "receive", hear)
    told: list[Any] = []
    monkeypatch.setattr(engine._core, "mishandled", lambda *args: told.append(args[:3]) or [])
    engine.handle([pool.heard(["done", "a", {}, 0]), pool.heard(["done", "b", {}, 0])])
    assert seen == ["a", "b"]
    assert [(number, message, type(error)) for number, message, error in told] == [(0, ["done", "a", {}, 0], KeyError)]


def test_what_was_read_from_a_node_before_it_was_given_up_is_not_listened_to(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(pool.engine._receiver, "receive", lambda *args: seen.append(args))
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
    call = Call(PendingCompute[Any](abs), {"name": "f"}, [b""], {}, {}, 0)
    monkeypatch.setattr(engine._core, "collapse", lambda error, now: [Fail(call, SkywardError(str(error)))])
    engine.thread.start()
    failed.set()
    with pytest.raises(SkywardError, match="a bug"):
        call.future.result(10)


def test_a_call_that_is_too_large_for_a_frame_fails_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sent at once by the user's thread, or later, with others, by the I/O thread."""
    monkeypatch.setattr(frames, "_MAX_BUFFERS", 4)
    with FakePool(tmp_path, 1) as pool:
        node = pool.nodes[0]
        node.answers = False
        at_once, running = pool.made(*[b"x"] * 4), [pool.made() for _ in range(4)]
        pool.engine.send([at_once])
        with pytest.raises(InvalidArgument, match=r"f was not sent.* 5 buffers .*Send less per call"):
            at_once.future.result(30)
        pool.engine.send(running)
        late = [pool.made(*[b"x"] * count) for count in (1, 4, 1)]
        pool.engine.send(late)
        ids = [node.calls.get(timeout=30) for _ in running]
        node.answers = True
        for id in ids:
            node.done(id, 0)
        assert [call.future.result(30) for call in (*running, late[0], late[2])] == [0] * 6
        with pytest.raises(InvalidArgument, match="f was not sent"):
            late[1].future.result(30)
        assert pool.engine.finish() == (True, 0)
        assert pool.alive()


def test_a_broadcast_that_is_too_large_for_a_frame_fails_on_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames, "_MAX_BUFFERS", 4)
    with FakePool(tmp_path) as pool:
        ranks = [pool.made(*[b"x"] * 4) for _ in range(2)]
        pool.engine.send_to(list(enumerate(ranks)))
        for rank in ranks:
            with pytest.raises(InvalidArgument, match="f was not sent"):
                rank.future.result(30)
        assert pool.engine.finish() == (True, 0)
        assert pool.works(0)
