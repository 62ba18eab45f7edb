"""Where users' functions run: done-callbacks and listeners, on threads of their own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from pathlib import Path
from typing import Any

import pytest

from skyward.client import futures
from skyward.client.futures import Listeners, UserCode, UserFuture, Worker, wait_for_all, when_done
from skyward.events import Event, Notice
from tests.support.waiting import until


@pytest.fixture
def user() -> Iterator[UserCode]:
    with UserCode() as made:
        yield made


def ours() -> list[str]:
    """Our threads; one that has ended is still listed for a moment."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(("skyward-callb", "skyward-ev"))]


def in_thread(act: Callable[[], Any]) -> None:
    """Does something in another thread, as the I/O thread would."""
    with ThreadPoolExecutor(1, "io") as threads:
        threads.submit(act).result(10)


def test_functions_run_in_order_and_one_at_a_time() -> None:
    worker = Worker("skyward-callbacks", patience=30)
    seen: list[int] = []
    running = threading.Lock()

    def act(i: int) -> None:
        assert running.acquire(blocking=False)
        seen.append(i)
        running.release()

    for i in range(2_000):
        worker.submit(act, i)
    worker.close(30)
    assert seen == list(range(2_000))
    until(lambda: not ours(), 10)


def test_no_thread_exists_before_there_is_something_to_run(user: UserCode) -> None:
    user.listeners.emit(Notice("pool", "nobody listens"))
    UserFuture[int](user).set_result(1)
    assert ours() == []


def test_a_future_is_made_of_what_futures_are_made_of(user: UserCode) -> None:
    """It makes that itself, without their condition; and those who wait for several at once need it."""
    future = UserFuture[int](user)
    assert vars(Future()).keys() <= vars(future).keys()
    with ThreadPoolExecutor(2) as threads:
        asked = [threads.submit(wait, [future], 30), threads.submit(list, as_completed([future], 30))]
        until(lambda: len(vars(future)["_waiters"]) == 2)
        future.set_result(1)
        assert [one.result(30) for one in asked] == [({future}, set()), [future]]
    with pytest.raises(TimeoutError):
        UserFuture[int](user).result(0)


def test_a_function_that_does_not_return_holds_up_no_other(gate: threading.Event) -> None:
    worker = Worker("skyward-callbacks", patience=0.01)
    rest = threading.Semaphore(0)
    for _ in range(3):
        worker.submit(gate.wait)
        worker.submit(rest.release)
    for _ in range(3):
        assert rest.acquire(timeout=10)
    assert len(ours()) <= 5
    gate.set()
    worker.close(10)
    until(lambda: not ours(), 10)


def test_however_many_functions_do_not_return_others_run_and_a_warning_says_so(
    gate: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    worker, ran = Worker("skyward-callbacks", patience=0.001), threading.Event()
    for _ in range(70):
        worker.submit(gate.wait)
    worker.submit(ran.set)
    assert ran.wait(60)
    assert [record.getMessage()[:47] for record in caplog.records] == [
        "skyward-callbacks: 63 done-callbacks have not r"
    ]
    gate.set()
    worker.close(30)
    until(lambda: not ours(), 30)


def test_what_was_left_runs_when_a_stuck_function_returns_and_no_thread_could_be_started(
    gate: threading.Event, monkeypatch: pytest.MonkeyPatch, quiet: None
) -> None:
    worker, ran = Worker("skyward-callbacks", patience=0.001), threading.Event()
    begun, first = threading.Semaphore(0), threading.Event()
    worker.submit(lambda: (begun.release(), first.wait(60)))
    worker.submit(lambda: (begun.release(), gate.wait(60)))
    assert begun.acquire(timeout=10)
    assert begun.acquire(timeout=10)

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    worker.submit(ran.set)
    first.set()
    assert ran.wait(10)
    monkeypatch.undo()
    gate.set()
    worker.close(10)


def test_functions_that_were_all_there_before_one_of_them_got_stuck_run_too(gate: threading.Event) -> None:
    """Nobody submits anything any more: a thread must be there already that notices."""
    worker, ran, begin = Worker("skyward-callbacks", patience=0.01), threading.Event(), threading.Event()
    worker.submit(begin.wait)
    worker.submit(gate.wait)
    worker.submit(ran.set)
    begin.set()
    assert ran.wait(10)
    gate.set()
    worker.close(10)


def test_a_function_that_raises_stops_nothing(quiet: None) -> None:
    worker, ran = Worker("skyward-callbacks"), threading.Event()

    def bad(error: BaseException) -> None:
        raise error

    for error in (ValueError(), SystemExit(1), KeyboardInterrupt()):
        worker.submit(bad, error)
    worker.submit(ran.set)
    assert ran.wait(10)
    worker.close(10)


def test_closing_does_not_wait_for_a_function_that_is_stuck(gate: threading.Event, quiet: None) -> None:
    worker = Worker("skyward-callbacks")
    worker.submit(gate.wait)
    began = time.monotonic()
    worker.close(0.05)
    assert time.monotonic() - began < 45


def test_a_closed_worker_still_runs_what_comes_late_and_keeps_no_thread() -> None:
    worker, ran = Worker("skyward-callbacks"), threading.Event()
    worker.close(1)
    worker.submit(ran.set)
    assert ran.wait(10)
    worker.close(10)
    until(lambda: not ours(), 10)


def test_a_worker_may_be_closed_by_one_of_its_functions() -> None:
    worker, closed = Worker("skyward-callbacks"), threading.Event()
    worker.submit(lambda: (worker.close(10), closed.set()))
    assert closed.wait(5)
    worker.close(10)
    until(lambda: not ours(), 10)


def test_callbacks_do_not_run_in_the_thread_that_settles_the_future(user: UserCode) -> None:
    future, names, called = UserFuture[int](user), list[str](), threading.Event()
    future.add_done_callback(lambda _: names.append(threading.current_thread().name))
    future.add_done_callback(lambda _: called.set())
    in_thread(lambda: future.set_result(1))
    assert called.wait(10)
    assert names == ["skyward-callbacks"]


def test_nor_do_they_when_the_same_thread_added_and_settled(user: UserCode) -> None:
    future, names, called = UserFuture[int](user), list[str](), threading.Event()
    future.add_done_callback(lambda _: (names.append(threading.current_thread().name), called.set()))
    future.cancel()
    assert called.wait(10)
    assert names == ["skyward-callbacks"]


def test_a_callback_that_is_added_late_runs_at_once_in_the_thread_that_adds_it(user: UserCode) -> None:
    future, threads = UserFuture[int](user), list[threading.Thread]()
    future.set_result(1)
    future.add_done_callback(lambda _: threads.append(threading.current_thread()))
    assert threads == [threading.current_thread()]


def test_our_own_callbacks_run_where_the_future_is_settled(user: UserCode) -> None:
    future, threads = UserFuture[int](user), list[threading.Thread]()
    when_done(future, lambda _: threads.append(threading.current_thread()))
    future.set_result(1)
    assert threads == [threading.current_thread()]
    until(lambda: not ours(), 10)


def test_of_many_threads_that_cancel_one_tells_the_engine() -> None:
    for _ in range(100):
        future, told, start = UserFuture[int](), list[int](), threading.Barrier(4)
        future.on_cancel = lambda told=told: told.append(1)

        def cancel(future: UserFuture[int] = future, start: threading.Barrier = start) -> bool:
            start.wait(10)
            return future.cancel()

        with ThreadPoolExecutor(4) as threads:
            assert [done.result(10) for done in [threads.submit(cancel) for _ in range(4)]] == [True] * 4
        assert told == [1]


def test_a_program_that_asks_again_and_again_leaves_nothing_in_a_future() -> None:
    future = UserFuture[int]()
    for _ in range(100):
        with pytest.raises(TimeoutError):
            future.result(0)
    assert not future.sleepers
    with ThreadPoolExecutor(4) as threads:
        waiting = [threads.submit(future.result) for _ in range(4)]
        until(lambda: len(future.sleepers) == 4)
        future.set_result(7)
        assert [each.result(60) for each in waiting] == [7] * 4
    assert not future.sleepers


def test_a_future_that_is_done_cannot_be_cancelled() -> None:
    future = UserFuture[int]()
    future.on_cancel = lambda: pytest.fail("there is nothing to stop")
    future.set_result(1)
    assert not future.cancel()


def test_listeners_hear_events_in_order_on_one_thread(user: UserCode) -> None:
    heard: list[tuple[str, str]] = []

    def listener(event: Event) -> None:
        assert isinstance(event, Notice)
        heard.append((event.text, threading.current_thread().name))

    user.listeners.add(listener)
    for i in range(500):
        user.listeners.emit(Notice("pool", str(i)))
    user.listeners.flush()
    assert heard == [(str(i), "skyward-events") for i in range(500)]


def test_a_listener_that_raises_keeps_no_event_from_the_others(user: UserCode, quiet: None) -> None:
    heard: list[Event] = []

    def bad(_: Event) -> None:
        raise SystemExit(1)

    user.listeners.add(bad)
    user.listeners.add(heard.append)
    events = [Notice("pool", str(i)) for i in range(3)]
    for event in events:
        user.listeners.emit(event)
    user.listeners.flush()
    assert heard == events


def test_a_listener_hears_what_is_emitted_while_it_listens(user: UserCode, gate: threading.Event) -> None:
    heard: list[Event] = []
    first, second, third = (Notice("pool", text) for text in "abc")
    user.listeners.add(lambda _: gate.wait() and None)
    user.listeners.emit(first)
    remove = user.listeners.add(heard.append)
    user.listeners.emit(second)
    gate.set()
    user.listeners.flush()
    assert heard == [second]
    remove()
    remove()
    user.listeners.emit(third)
    user.listeners.flush()
    assert heard == [second]


def test_a_result_comes_after_the_events_before_it(user: UserCode) -> None:
    for _ in range(20):
        future, heard = UserFuture[int](user), list[str]()
        remove = user.listeners.add(lambda _, heard=heard: time.sleep(0.002) or heard.append("event"))
        user.listeners.emit(Notice("pool", "before"))
        threading.Thread(target=future.set_result, args=(1,)).start()
        assert future.result(10) == 1
        assert heard == ["event"]
        remove()


def test_a_stuck_listener_delays_the_first_result_for_a_moment_and_no_other(
    user: UserCode, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skyward.client.futures._STUCK", 0.2)
    user.listeners.add(lambda _: gate.wait() and None)
    began = time.monotonic()
    for _ in range(100):
        user.listeners.emit(Notice("pool", "x"))
        future = UserFuture[int](user)
        future.set_result(1)
        assert future.result() == 1
    assert time.monotonic() - began < 15  # 20 if each of them waited
    gate.set()


def test_a_listener_may_ask_for_a_result(user: UserCode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyward.client.futures._STUCK", 60.0)  # it would wait so long for itself
    results: list[int] = []

    def listener(_: Event) -> None:
        future = UserFuture[int](user)
        in_thread(lambda: future.set_result(len(results)))
        results.append(future.result(60))

    user.listeners.add(listener)
    began = time.monotonic()
    user.listeners.emit(Notice("pool", "a"))
    user.listeners.emit(Notice("pool", "b"))
    user.listeners.flush()
    assert results == [0, 1]
    assert time.monotonic() - began < 45


def test_events_that_nobody_takes_are_left_out_and_counted_and_nobody_waits(
    gate: threading.Event, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The thread that reads the links emits most of them: it must not wait for a slow listener."""
    monkeypatch.setattr(futures, "_MOST_EVENTS", 10)
    monkeypatch.setattr(Worker, "wait", lambda *_: pytest.fail("it waits for the listener"))
    listeners, heard = Listeners(), list[str]()
    listeners.add(lambda _: gate.wait() and None)
    listeners.add(lambda event: heard.append(event.text) if isinstance(event, Notice) else None)
    for number in range(30):
        listeners.emit(Notice("pool", str(number)))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    gate.set()
    until(lambda: len(heard) == 10)
    listeners.emit(Notice("pool", "after"))
    until(lambda: len(heard) == 12)
    assert heard[:10] == [str(number) for number in range(10)]
    assert heard[10:] == ["20 events are omitted here: a listener was 10 events behind.", "after"]
    listeners.close(10)


def test_how_many_events_were_left_out_is_said_at_the_end_too(
    gate: threading.Event, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(futures, "_MOST_EVENTS", 10)
    listeners = Listeners()
    listeners.add(lambda _: gate.wait() and None)
    for number in range(13):
        listeners.emit(Notice("pool", str(number)))
    gate.set()
    listeners.close(10)
    assert "the last 3 events were left out" in caplog.text


def test_whoever_waits_for_several_futures_wakes_once() -> None:
    parts = [UserFuture[int]() for _ in range(5)]
    parts[4].set_result(4)
    thread = threading.Thread(target=wait_for_all, args=(parts,))
    thread.start()

    def slept() -> int:
        """How often it has gone to sleep."""
        text = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
        return int(text.partition("\nvoluntary_ctxt_switches:")[2].split()[0]) if "(sleeping)" in text else 0

    counts: list[int] = [0]

    def is_asleep() -> bool:
        counts.append(slept())
        time.sleep(0.05)
        return counts[-1] > 0 and counts[-1] == slept()

    until(is_asleep)
    for part in parts[:3]:
        part.cancel()
    assert slept() == counts[-1]
    parts[3].set_result(3)
    thread.join(60)
    assert not thread.is_alive()
    assert not any(part.sleepers for part in parts)


def test_waiting_for_futures_that_have_ended_or_for_none_returns_at_once() -> None:
    wait_for_all([])
    ended = UserFuture[int]()
    ended.set_result(1)
    wait_for_all([ended, ended])
