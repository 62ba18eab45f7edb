"""Streams with credit, both ends in one process."""

from __future__ import annotations

import gc
import itertools
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from skyward.transport import streams
from skyward.transport.streams import WINDOW, Consumer, Producer, Stream
from tests.support.waiting import until


def joined(window: int = WINDOW) -> tuple[Producer, Consumer]:
    """A producer and a consumer that talk directly."""
    pair: dict[str, Any] = {}
    pair["consumer"] = Consumer(
        grant=lambda count: pair["producer"].grant(count),
        close=lambda: pair["producer"].close(),
        load=lambda item: item,
        window=window,
    )
    pair["producer"] = Producer(lambda batch: pair["consumer"].feed(sized(batch)), window)
    return pair["producer"], pair["consumer"]


def sized(items: list[Any]) -> list[tuple[Any, int]]:
    return [(item, len(item)) for item in items]


def produce(producer: Producer, consumer: Consumer, items: list[bytes], error: BaseException | None = None) -> int:
    """Puts items until the consumer wants no more; says how many went."""
    count = 0
    for item in items:
        if not producer.put(item, len(item)):
            break
        count += 1
    producer.finish()
    consumer.end(error)
    return count


def in_thread(act: Callable[..., Any], *args: Any) -> Any:
    threads = ThreadPoolExecutor(1)
    future = threads.submit(act, *args)
    threads.shutdown(wait=False)
    return future


def test_items_arrive_in_order_and_the_stream_ends() -> None:
    producer, consumer = joined()
    items = [str(i).encode() for i in range(5_000)]
    sent = in_thread(produce, producer, consumer, items)
    assert list(consumer) == items
    assert sent.result(60) == 5_000
    assert list(consumer) == []


def test_readers_that_wait_together_get_one_item_each() -> None:
    """One of them must not keep all that has come to itself, nor drop what another has not used yet."""
    stream = Consumer(lambda _: None, lambda: None, lambda item: item)
    readers = [in_thread(next, stream) for _ in range(2)]
    waiting: Any = stream._changed
    until(lambda: len(waiting._waiters) == 2)
    stream.feed([(item, 1) for item in ("a", "b", "c")])
    assert sorted(reader.result(60) for reader in readers) == ["a", "b"]
    stream.feed([("d", 1)])
    stream.end()
    assert list(stream) == ["c", "d"]


def test_several_threads_share_a_stream_without_loss() -> None:
    """Each item comes once, and what was used is granted again: with a lost grant the producer would wait for ever."""
    producer, consumer = joined(window=8)
    items = [str(number).encode() for number in range(4_000)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        readers = [in_thread(list, consumer) for _ in range(4)]
        sent = in_thread(produce, producer, consumer, items)
        found = [reader.result(60) for reader in readers]
    finally:
        sys.setswitchinterval(before)
        consumer.close()
    assert sent.result(60) == len(items)
    assert sorted(itertools.chain(*found)) == sorted(items)


def test_of_several_readers_one_gets_the_error_and_the_others_end() -> None:
    stream = Consumer(lambda _: None, lambda: None, lambda item: item)
    readers = [in_thread(list, stream) for _ in range(3)]
    stream.end(ValueError("broken"))
    assert sorted(repr(reader.exception(60)) for reader in readers) == ["None", "None", "ValueError('broken')"]


def test_an_empty_stream_ends_at_once() -> None:
    producer, consumer = joined()
    produce(producer, consumer, [])
    assert list(consumer) == []


def test_a_producer_stops_when_nobody_reads() -> None:
    """Back-pressure: at most a window of items is under way."""
    producer, consumer = joined(window=8)
    put = []
    blocked = in_thread(lambda: [put.append(i) for i in range(100) if producer.put(b"x", 1)])
    with pytest.raises(TimeoutError):
        blocked.result(0.3)
    assert len(put) == 8
    for _ in range(4):
        next(consumer)
    with pytest.raises(TimeoutError):
        blocked.result(0.3)
    assert 8 < len(put) <= 12
    producer.close()
    blocked.result(60)
    producer.finish()


def test_large_items_go_on_flowing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The window is one of bytes too: a reader that uses what it gets must get the rest."""
    monkeypatch.setattr(streams, "WINDOW_BYTES", 1000)
    producer, consumer = joined()
    items = [bytes([i]) * 600 for i in range(20)]
    sent = in_thread(produce, producer, consumer, items)
    received = in_thread(lambda: list(consumer))
    try:
        assert received.result(60) == items
    finally:
        producer.close()
        consumer.close()
    assert sent.result(60) == 20


def test_large_items_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "WINDOW_BYTES", 1000)
    producer, consumer = joined()
    put = []
    blocked = in_thread(lambda: [put.append(i) for i in range(20) if producer.put(b"x" * 600, 600)])
    with pytest.raises(TimeoutError):
        blocked.result(0.3)
    assert 1 <= len(put) <= 3
    consumer.close()
    blocked.result(60)
    producer.finish()


def test_an_item_larger_than_the_window_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "WINDOW_BYTES", 1000)
    producer, consumer = joined()
    in_thread(produce, producer, consumer, [b"x" * 5000]).result(60)
    assert list(consumer) == [b"x" * 5000]


def test_an_error_comes_after_the_items_before_it_and_once() -> None:
    """T13: an exception in mid-stream is raised, not swallowed."""
    producer, consumer = joined()
    produce(producer, consumer, [b"a", b"b"], ValueError("broken"))
    assert [next(consumer), next(consumer)] == [b"a", b"b"]
    with pytest.raises(ValueError, match="broken"):
        next(consumer)
    with pytest.raises(StopIteration):
        next(consumer)


def test_closing_stops_the_producer_and_drops_what_is_left() -> None:
    producer, consumer = joined(window=4)
    sent = in_thread(produce, producer, consumer, [b"x"] * 1000)
    assert next(consumer) == b"x"
    consumer.close()
    assert sent.result(60) < 1000
    assert list(consumer) == []
    consumer.close()


def test_a_reader_that_waits_is_woken_by_closing() -> None:
    producer, consumer = joined()
    reading = in_thread(lambda: list(consumer))
    consumer.close()
    assert reading.result(60) == []
    producer.finish()


def test_closing_is_told_once_and_not_after_the_end() -> None:
    told: list[str] = []
    stream = Consumer(lambda _: None, lambda: told.append("closed"), lambda item: item)
    stream.close()
    stream.close()
    assert told == ["closed"]
    ended = Consumer(lambda _: None, lambda: told.append("closed again"), lambda item: item)
    ended.end()
    ended.close()
    assert told == ["closed"]


def test_what_the_user_holds_is_closed_by_leaving_it_or_letting_go() -> None:
    told: list[str] = []
    consumer = Consumer(lambda _: None, lambda: told.append("closed"), lambda item: item)
    consumer.feed([("a", 1), ("b", 1)])
    with Stream[str](consumer) as stream:
        assert next(stream) == "a"
    assert told == ["closed"]
    assert list(stream) == []

    let_go = threading.Event()
    dropped: Stream[str] = Stream(Consumer(lambda _: None, let_go.set, lambda item: item))
    del dropped
    gc.collect()
    assert let_go.wait(10)


def test_an_error_of_a_stream_that_was_closed_is_not_raised() -> None:
    stream = Consumer(lambda _: None, lambda: None, lambda item: item)
    stream.close()
    stream.end(ValueError())
    stream.feed([(b"late", 4)])
    assert list(stream) == []


def test_credit_is_granted_in_steps_and_never_more_than_was_used() -> None:
    granted: list[int] = []
    stream = Consumer(granted.append, lambda: None, lambda item: item, window=8)
    used: list[int] = []
    for start in range(0, 20, 4):
        stream.feed([(i, 1) for i in range(start, start + 4)])
        used += [next(stream) for _ in range(4)]
    assert used == list(range(20))
    assert 16 <= sum(granted) <= 20
    assert max(granted) <= 8
    stream.close()


def test_what_gathers_while_a_batch_is_sent_goes_together() -> None:
    batches: list[int] = []
    first, go_on = threading.Event(), threading.Event()

    def send(batch: list[Any]) -> None:
        batches.append(len(batch))
        first.set()
        assert go_on.wait(60)

    producer = Producer(send)
    producer.put(b"x", 1)
    assert first.wait(60)
    for _ in range(100):
        producer.put(b"x", 1)
    go_on.set()
    producer.finish()
    assert batches == [1, 100]


def test_a_closed_producer_takes_nothing() -> None:
    sent: list[Any] = []
    producer = Producer(sent.append)
    producer.close()
    assert producer.put(b"x", 1) is False
    producer.finish()
    assert sent == []


def test_a_loader_that_raises_leaves_the_rest_readable() -> None:
    def load(item: int) -> int:
        if item == 1:
            raise ValueError("cannot be rebuilt")
        return item

    stream = Consumer(lambda _: None, lambda: None, load)
    stream.feed([(0, 1), (1, 1), (2, 1)])
    stream.end()
    assert next(stream) == 0
    with pytest.raises(ValueError, match="rebuilt"):
        next(stream)
    assert list(stream) == [2]


def test_a_stream_may_be_collected_in_a_thread_that_holds_the_lock_which_closing_needs() -> None:
    """The garbage collector runs at any allocation, inside a link that reads or writes for instance."""
    lock, closed, collected = threading.Lock(), threading.Event(), threading.Event()

    def close() -> None:
        with lock:
            closed.set()

    def collect() -> None:
        stream: Any = Stream[str](Consumer(lambda _: None, close, lambda item: item))
        stream.itself = stream  # only the garbage collector finds it
        del stream
        with lock:
            gc.collect()
        collected.set()

    threading.Thread(target=collect, daemon=True).start()
    assert collected.wait(10)
    assert closed.wait(10)


def test_a_stream_that_has_ended_starts_no_thread_when_it_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "run_in_thread", lambda _: pytest.fail("there is nothing to close"))
    consumer = Consumer(lambda _: None, lambda: None, lambda item: item)
    stream = Stream[str](consumer)
    consumer.end()
    del stream
    gc.collect()


def test_a_stream_is_closed_once_by_several_threads_at_once() -> None:
    for _ in range(50):
        told: list[str] = []
        stream = Stream[str](Consumer(lambda _: None, lambda told=told: told.append("closed"), lambda item: item))
        with ThreadPoolExecutor(4) as threads:
            reading = threads.submit(list, stream)
            for closing in [threads.submit(stream.close) for _ in range(3)]:
                closing.result(10)
            assert reading.result(10) == []
        assert told == ["closed"]


def test_an_item_that_cannot_be_sent_is_an_error_of_the_producer_not_a_gap() -> None:
    def send(batch: list[Any]) -> None:
        raise TypeError("not a message")

    producer = Producer(send, window=4)
    for _ in range(100):
        if not producer.put(b"x", 1):  # it would wait for ever for credit
            break
    with pytest.raises(TypeError, match="not a message"):
        producer.finish()
