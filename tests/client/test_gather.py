"""Groups, streams of results and maps, over a plain pool of threads."""

from __future__ import annotations

import asyncio
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, as_completed, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skyward.api.compute import PendingCompute
from skyward.client import gather as gather_module
from skyward.client.call import CallFuture
from skyward.client.futures import UserCode
from skyward.client.gather import combined, error_of, gathered, mapped, streamed
from skyward.client.outcomes import note_items, partial_of
from skyward.errors import NodeLost, ResultNotSerializable, TaskCrashed, TaskTimeout
from skyward.node.protocol import Returned
from tests.support.waiting import until


class Threads:
    """Sends calls to threads, and counts them."""

    def __init__(self, slots: int = 4) -> None:
        self._threads = ThreadPoolExecutor(slots)
        self.batches: list[int] = []
        self.calls: list[PendingCompute[Any]] = []
        self.futures: list[Future[Any]] = []
        self.most = 0

    def __call__(self, calls: Sequence[PendingCompute[Any]]) -> list[Future[Any]]:
        self.batches.append(len(calls))
        self.calls += calls
        made = [self._threads.submit(call.fn, *call.args, **call.kwargs) for call in calls]
        self.futures += made
        self.most = max(self.most, sum(not future.done() for future in self.futures))
        return made

    def close(self) -> None:
        self._threads.shutdown()


@pytest.fixture
def send() -> Iterator[Threads]:
    made = Threads()
    yield made
    made.close()


def done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    if isinstance(value, BaseException):
        future.set_exception(value)
    else:
        future.set_result(value)
    return future


def later(act: Callable[[], Any]) -> Any:
    threads = ThreadPoolExecutor(1)
    future = threads.submit(act)
    threads.shutdown(wait=False)
    return future


def test_results_are_gathered_in_order() -> None:
    futures: list[Future[Any]] = [Future() for _ in range(3)]
    result = later(lambda: gathered(futures))
    for index in (2, 0, 1):
        futures[index].set_result(index)
    assert result.result(60) == (0, 1, 2)
    assert gathered([]) == ()


def test_the_first_failure_in_time_is_raised_and_the_rest_cancelled() -> None:
    first, second, third = Future[int](), Future[int](), Future[int]()
    result = later(lambda: gathered([first, second, third]))
    third.set_exception(ValueError("third"))
    with pytest.raises(ValueError, match="third"):
        result.result(60)
    assert first.cancelled()
    assert second.cancelled()


def test_a_cancelled_call_cancels_its_group() -> None:
    first, second = Future[int](), Future[int]()
    first.cancel()
    first.set_running_or_notify_cancel()  # what an executor does; only then wait() counts it as done
    with pytest.raises(CancelledError):
        gathered([first, second])
    assert second.cancelled()


def test_a_stream_in_order_waits_for_the_next_one() -> None:
    futures: list[Future[int]] = [Future(), Future()]
    futures[1].set_result(1)
    stream = streamed(futures, True)
    waiting = later(lambda: next(stream))
    with pytest.raises(TimeoutError):
        waiting.result(0.1)
    futures[0].set_result(0)
    assert waiting.result(60) == 0
    assert list(stream) == [1]


def test_a_stream_without_order_gives_what_is_there() -> None:
    futures: list[Future[int]] = [Future() for _ in range(3)]
    stream = streamed(futures, False)
    for index in (2, 0, 1):
        futures[index].set_result(index)
        assert next(stream) == index
    assert list(stream) == []


@pytest.mark.parametrize("ordered", [True, False], ids=["in-order", "as-they-come"])
def test_several_threads_share_a_stream_of_results(ordered: bool) -> None:
    """Of two that ask for the last result at once, one gets it and the other ends."""
    futures: list[Future[int]] = [Future() for _ in range(3)]
    stream = streamed(futures, ordered)
    readers = [later(lambda: list(stream)) for _ in range(6)]
    until(lambda: stream._left == 0)  # type: ignore[attr-defined]
    for number, future in enumerate(futures):
        future.set_result(number)
    assert sorted(item for reader in readers for item in reader.result(60)) == [0, 1, 2]


def test_leaving_a_stream_cancels_what_is_left() -> None:
    for ordered in (True, False):
        futures: list[Future[int]] = [done(0), Future(), Future()]
        stream = streamed(futures, ordered)
        assert next(stream) == 0
        stream.close()  # type: ignore[attr-defined] - it is a generator
        assert futures[1].cancelled()
        assert futures[2].cancelled()


def test_a_failure_ends_a_stream_and_cancels_what_is_left() -> None:
    futures: list[Future[int]] = [done(0), done(ValueError("x")), Future()]
    stream = streamed(futures, True)
    assert next(stream) == 0
    with pytest.raises(ValueError):
        next(stream)
    assert futures[2].cancelled()


def test_a_combined_future_is_a_tuple_of_all() -> None:
    parts: list[Future[int]] = [Future() for _ in range(3)]
    whole = combined(parts)
    assert isinstance(whole, Future)
    for index in (1, 2, 0):
        assert not whole.done()
        parts[index].set_result(index)
    assert whole.result(0) == (0, 1, 2)
    assert combined([]).result(0) == ()


def test_a_combined_future_fails_with_the_first_failure() -> None:
    parts: list[Future[int]] = [Future() for _ in range(3)]
    whole = combined(parts)
    parts[2].set_exception(ValueError("x"))
    assert isinstance(whole.exception(0), ValueError)
    until(lambda: parts[0].cancelled() and parts[1].cancelled())


def test_cancelling_a_combined_future_cancels_its_parts() -> None:
    parts: list[Future[int]] = [done(1), Future(), Future()]
    whole = combined(parts)
    assert whole.cancel()
    assert whole.cancelled()
    assert [part.cancelled() for part in parts] == [False, True, True]
    finished = combined([done(1)])
    assert not finished.cancel()


def test_a_part_that_is_cancelled_cancels_or_fails_the_whole() -> None:
    parts: list[Future[int]] = [Future(), Future()]
    whole = combined(parts)
    parts[0].cancel()
    assert whole.done()
    with pytest.raises(CancelledError):
        whole.result(0)
    until(parts[1].cancelled)


def test_many_parts_that_end_at_once_make_one_result(send: Threads) -> None:
    for _ in range(30):
        parts = send([PendingCompute(int, (i,)) for i in range(8)])
        assert combined(parts).result(60) == tuple(range(8))


def test_the_error_of_a_cancelled_future_is_that_it_was_cancelled() -> None:
    cancelled: Future[int] = Future()
    cancelled.cancel()
    assert isinstance(error_of(cancelled), CancelledError)
    assert error_of(done(1)) is None
    assert isinstance(error_of(done(KeyError())), KeyError)


@pytest.mark.parametrize("count", [0, 1, 2, 7, 100, 20_000])
def test_a_map_keeps_the_order(send: Threads, count: int) -> None:
    assert mapped(send, PendingCompute(lambda x: x * x), list(range(count)), 4) == [i * i for i in range(count)]


def test_quick_items_travel_in_chunks_and_never_all_at_once(send: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    # time that other programs take does not make an item slow here
    monkeypatch.setattr("skyward.node.items.time", SimpleNamespace(perf_counter=time.thread_time))
    mapped(send, PendingCompute(abs), list(range(20_000)), 4)
    assert len(send.calls) < 400
    assert send.most <= 8
    assert sum(len(call.args[0]) for call in send.calls) == 20_000
    assert max(len(call.args[0]) for call in send.calls) <= 20_000 // 4


def test_slow_items_travel_one_by_one(send: Threads) -> None:
    pause = threading.Event()
    assert mapped(send, PendingCompute(lambda x: pause.wait(0.06) or x), list(range(12)), 4) == list(range(12))
    assert len(send.calls) == 12


def test_a_time_limit_holds_for_each_item(send: Threads) -> None:
    each: PendingCompute[int] = PendingCompute(abs, timeout=3.0, retries=7)
    assert mapped(send, each, list(range(50)), 4) == list(range(50))
    assert {(call.timeout, call.retries, call.name) for call in send.calls} == {(3.0, 7, "abs")}
    assert len(send.calls) == 50


def test_an_async_function_is_run_for_each_item(send: Threads) -> None:
    async def double(x: int) -> int:
        return 2 * x

    assert mapped(send, PendingCompute(double), list(range(20)), 2) == [2 * i for i in range(20)]


def test_a_failing_item_is_raised_and_the_rest_not_sent(send: Threads) -> None:
    failed = threading.Event()

    def invert(x: int) -> float:
        return 1 / x if x < 2 else failed.wait(60)

    with pytest.raises(ZeroDivisionError):
        mapped(send, PendingCompute(invert), [1] * 2 + [0] + [2] * 10_000, 2)
    failed.set()
    assert sum(len(call.args[0]) for call in send.calls) < 10_000


def test_what_cannot_be_sent_cancels_what_was() -> None:
    sent: list[Future[Any]] = []

    def send(calls: Sequence[PendingCompute[Any]]) -> list[Future[Any]]:
        if sent:
            raise RuntimeError("the pool is closed")
        sent.extend(Future() for _ in calls)
        sent[0].set_result((0.01, None, [0]))
        return list(sent)

    with pytest.raises(RuntimeError, match="closed"):
        mapped(send, PendingCompute(abs), list(range(10)), 2)
    assert all(future.cancelled() for future in sent[1:])


def test_wait_and_as_completed_hear_of_a_group_that_was_cancelled() -> None:
    for cancelled_before in (True, False):
        whole = combined([CallFuture[int]("f"), CallFuture[int]("g")])
        if cancelled_before:
            whole.cancel()
        waiting = later(lambda whole=whole: wait([whole]))
        completed = later(lambda whole=whole: next(as_completed([whole])))
        whole.cancel()
        assert waiting.result(10).done == {whole}
        assert completed.result(10) is whole


def test_wait_hears_of_the_parts_of_a_group_that_was_cancelled() -> None:
    parts = [CallFuture[int]("f"), CallFuture[int]("g")]
    waiting = later(lambda: wait(parts))
    combined(parts).cancel()
    assert waiting.result(10).done == set(parts)


def test_a_group_may_be_cancelled_by_many_threads_while_its_parts_fail() -> None:
    for _ in range(50):
        parts = [CallFuture[int](str(i)) for i in range(4)]
        told: list[int] = []
        for part in parts:
            part.on_cancel = lambda told=told: told.append(1)
        whole, start = combined(parts), threading.Barrier(4)
        acts = [whole.cancel, whole.cancel, lambda parts=parts: gathered(parts), lambda p=parts: p[0].fail(KeyError())]

        def act(do: Callable[[], Any], start: threading.Barrier = start) -> None:
            start.wait(10)
            try:
                do()
            except (KeyError, CancelledError):
                pass

        with ThreadPoolExecutor(4) as threads:
            for ended in [threads.submit(act, do) for do in acts]:
                ended.result(10)
        assert whole.done()
        assert all(part.done() for part in parts)
        assert len(told) == sum(part.cancelled() for part in parts)


def test_a_result_that_cannot_be_read_fails_its_group(tmp_path: Path) -> None:
    future, other = CallFuture[int]("train"), CallFuture[int]("other")
    whole = combined([future, other])
    gathering = later(lambda: gathered([future, other]))
    for each in (future, other):
        each.settle(Returned(id="c", blobs={"0": (str(tmp_path / "gone"), 10)}, buffers=[b""]))
    assert whole.done()
    with pytest.raises(ResultNotSerializable, match="train has arrived but cannot be read here: FileNotFoundError"):
        whole.result(0)
    assert isinstance(whole.exception(0), ResultNotSerializable)
    with pytest.raises(ResultNotSerializable):
        gathering.result(10)


def test_a_group_reads_results_where_they_are_asked_for() -> None:
    """Unpickling runs code of the user's: never in the thread that settles futures."""
    future = CallFuture[str]("f")
    whole = combined([future])
    later(lambda: future.settle(Returned(id="c", buffers=[pickle.dumps(_NameOfThread(), 5)]))).result(10)
    assert whole.result(0) == (threading.current_thread().name,)


class _NameOfThread:
    def __reduce__(self) -> Any:
        return _name_of_thread, ()


def _name_of_thread() -> str:
    return threading.current_thread().name


def test_callbacks_of_a_group_run_where_those_of_its_calls_do() -> None:
    with UserCode() as user:
        future = CallFuture[int]("f", user)
        names, called = list[str](), threading.Event()
        combined([future]).add_done_callback(lambda _: (names.append(threading.current_thread().name), called.set()))
        future.fulfil(1)
        assert called.wait(10)
        assert names == ["skyward-callbacks"]


def test_results_that_are_dropped_cancel_what_is_left_without_taking_a_lock() -> None:
    lock, stopped = threading.Lock(), threading.Event()

    def stop() -> None:
        with lock:
            stopped.set()

    for ordered in (True, False):
        stopped.clear()
        future = CallFuture[int]("f")
        future.on_cancel = stop
        results = streamed([future], ordered)
        with lock:  # as when the garbage collector runs inside our code
            del results
        assert stopped.wait(10)


@pytest.mark.parametrize("ordered", [True, False], ids=["in-order", "as-they-come"])
def test_results_that_a_task_no_longer_reads_cancel_what_is_left(ordered: bool) -> None:
    first, left = CallFuture[int]("f"), CallFuture[int]("g")

    async def read_one() -> int | None:
        asyncio.get_running_loop().call_soon(first.fulfil, 1)
        async for item in streamed([first, left], ordered):
            return item
        return None

    assert asyncio.run(read_one()) == 1
    until(left.cancelled)


def test_results_are_closed_by_many_threads_at_once() -> None:
    futures = [CallFuture[int](str(i)) for i in range(20)]
    results = streamed(futures, False)
    reading = later(lambda: list(results))
    until(lambda: results._left < 20)  # type: ignore[attr-defined]
    with ThreadPoolExecutor(4) as threads:
        for closed in [threads.submit(results.close) for _ in range(4)]:  # type: ignore[attr-defined]
            closed.result(10)
    with pytest.raises(CancelledError):
        reading.result(10)


def test_a_generator_function_is_not_mapped_and_nothing_is_sent(send: Threads) -> None:
    def rows(n: int) -> Iterator[int]:
        yield n

    async def ticks(n: int) -> Any:
        yield n

    for fn in (rows, ticks):
        with pytest.raises(TypeError, match=r"is a generator function.*return a list"):
            mapped(send, PendingCompute(fn), [1, 2], 2)
    assert send.calls == []
    with pytest.raises(TypeError, match="is a generator function"):  # seen when it is called
        mapped(send, PendingCompute(lambda n: rows(n)), [1, 2], 2)


def pending(*values: int) -> list[PendingCompute[Any]]:
    return [PendingCompute(inverse, (value,), {}) for value in values]


def inverse(n: int) -> float:
    return 1 / n


def failing() -> list[Future[Any]]:
    return [done(0.5), done(NodeLost(1, "inverse")), done(TaskTimeout("inverse", 0, 5.0)), done(ValueError("no"))]


@pytest.mark.parametrize(
    "gather", [gathered, lambda f, c, k: list(streamed(f, True, c, k)), None], ids=["all", "s", "u"]
)
def test_exceptions_in_the_place_of_results_say_which_call_they_come_from(gather: Any) -> None:
    gather = gather or (lambda f, c, k: list(streamed(f, False, c, k)))
    found = gather(failing(), pending(2, 0, 7, 8), True)
    assert found[0] == 0.5
    said = ["call 1 of 4: inverse(0)", "call 2 of 4: inverse(7)", "call 3 of 4: inverse(8)"]
    assert [error.__notes__ for error in found[1:]] == [[text] for text in said]


def test_a_group_whose_futures_are_asked_again_notes_its_calls_once() -> None:
    whole = combined(failing(), pending(2, 0, 7, 8), True)
    for _ in range(2):
        assert len(whole.result()[1].__notes__) == 1


def test_an_exception_that_many_calls_share_has_a_bounded_number_of_notes() -> None:
    shared = ValueError("of an argument")
    gathered([done(shared) for _ in range(100)], pending(*range(100)), True)
    assert len(shared.__notes__) == 20


def test_a_call_of_a_map_that_gave_no_result_says_which_items_it_had() -> None:
    def crash(calls: Sequence[PendingCompute[Any]]) -> list[Future[Any]]:
        return [done(TaskCrashed("inverse", 0, 0, -9, "SIGKILL")) for _ in calls]

    each = PendingCompute[Any](inverse, (), {})
    assert mapped(crash, each, [5, 6, 7], 4, True)[1].__notes__ == ["item 1: inverse(6)"]
    with pytest.raises(TaskCrashed) as caught:
        mapped(crash, each, [5, 6, 7], 4)
    assert caught.value.__notes__[0] == "item 0: inverse(5)"


def test_several_items_that_were_one_call_are_named_by_the_first_and_the_last() -> None:
    error = TaskCrashed("inverse", 0)
    note_items(error, PendingCompute(inverse, (), {}), [5, 6, 7], 40)
    assert error.__notes__ == ["items 40 to 42, sent as one call: inverse(5) to inverse(7)"]


def test_ctrl_c_keeps_what_had_finished_of_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(gather_module._Combined, "wait", interrupt)
    running: Future[int] = Future()
    with pytest.raises(KeyboardInterrupt) as caught:
        gathered([done(1), running, done(3)])
    assert partial_of(caught.value) == {0: 1, 2: 3}
    assert "2 of 3 calls had finished" in caught.value.__notes__[0]
    assert running.cancelled()

    error = ValueError("in its place")
    with pytest.raises(KeyboardInterrupt) as caught:
        gathered([done(error), Future(), done(3)], keep=True)
    assert partial_of(caught.value) == {0: error, 2: 3}


@pytest.mark.parametrize("keep", [False, True])
def test_ctrl_c_keeps_what_had_finished_of_a_map(keep: bool) -> None:
    send = Threads(1)

    def slowly(item: int) -> int:
        time.sleep(0.05)
        if item == 0 and keep:
            raise ValueError(item)
        return 2 * item

    def interrupted(calls: Sequence[PendingCompute[Any]]) -> list[Future[Any]]:
        if len(send.batches) == 2:
            raise KeyboardInterrupt
        return send(calls)

    with pytest.raises(KeyboardInterrupt) as caught:
        mapped(interrupted, PendingCompute(slowly), list(range(100)), 1, keep)
    send.close()
    first = partial_of(caught.value)[0]
    assert isinstance(first, ValueError) if keep else first == 0
