"""Streams on a real pool: generators out, iterators in, and both together."""

from __future__ import annotations

import gc
import itertools
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import skyward as sky
from tests.support.waiting import until


@sky.compute
def count(n: int) -> Iterator[int]:
    yield from range(n)


@sky.compute
def endless(progress: str) -> Iterator[int]:
    """Counts for ever; says how far it came, and that it ended."""
    try:
        for i in itertools.count():
            Path(progress).write_text(str(i))
            yield i
    finally:
        Path(progress).write_text("left")


@sky.compute
def breaks(after: int) -> Iterator[int]:
    yield from range(after)
    raise LookupError("in mid-stream")


@sky.compute
async def count_async(n: int) -> AsyncIterator[int]:
    for i in range(n):
        yield i


@sky.compute
def total(items: Iterator[int]) -> int:
    return sum(items)


@sky.compute
def first(items: Iterator[int], n: int = 1) -> list[int]:
    return list(itertools.islice(items, n))


@sky.compute
def doubled(items: Iterator[int]) -> Iterator[int]:
    for item in items:
        yield 2 * item


@sky.compute
def kind_of(items: Iterable[int]) -> tuple[str, int]:
    return type(items).__name__, sum(items)


def read_in_threads(items: Iterator[int]) -> list[int]:
    """What three threads get of one stream, all together."""
    found: list[int] = []
    readers = [threading.Thread(target=lambda: found.extend(items), daemon=True) for _ in range(3)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(60)
    assert not any(reader.is_alive() for reader in readers)
    return found


@sky.compute
def share_argument(items: Iterator[int]) -> list[int]:
    return read_in_threads(items)


@pytest.fixture
def own() -> Iterator[sky.ComputePool]:
    """A pool for a test whose failure would leave a body running."""
    with sky.ComputePool(console=False) as opened:
        yield opened


def reached(path: Path) -> int:
    """How far the endless generator has come, once it stands still."""
    seen, since = -1, time.monotonic()
    while time.monotonic() - since < 1.0:
        try:
            now = int(path.read_text())
        except (FileNotFoundError, ValueError):
            now = -1
        if now != seen or now < 0:
            seen, since = now, time.monotonic()
        time.sleep(0.02)
    return seen


def left(path: Path) -> Callable[[], bool]:
    return lambda: path.exists() and path.read_text() == "left"


# out


def test_a_generator_streams_its_items_in_order(pool: sky.ComputePool) -> None:
    items = count(1000) >> pool
    assert isinstance(items, Iterator)
    assert list(items) == list(range(1000))
    assert list(items) == []


def test_threads_of_the_program_and_of_a_body_share_a_stream(pool: sky.ComputePool) -> None:
    """Each item once, on either side; the window is passed several times, so nothing of it may be lost."""
    items = count(2_000) >> pool
    assert sorted(read_in_threads(items)) == list(range(2_000))
    assert sorted(share_argument(iter(range(2_000))) >> pool) == list(range(2_000))


def test_an_empty_generator_is_an_empty_stream(pool: sky.ComputePool) -> None:
    assert list(count(0) >> pool) == []


def test_a_hundred_thousand_items_stay_in_order(pool: sky.ComputePool) -> None:
    assert all(a == b for a, b in zip(count(100_000) >> pool, range(100_000), strict=True))


def test_an_endless_generator_does_not_run_far_ahead(pool: sky.ComputePool, tmp_path: Path) -> None:
    path = tmp_path / "progress"
    items = endless(str(path)) >> pool
    assert next(items) == 0
    assert reached(path) <= 1000
    for _ in range(2000):
        last = next(items)
    assert last == 2000
    assert reached(path) <= 3000
    items.close()  # type: ignore[attr-defined]
    until(left(path))


def test_large_items_do_not_pile_up(own: sky.ComputePool, tmp_path: Path) -> None:
    path = tmp_path / "progress"

    @sky.compute
    def arrays(path: str) -> Iterator[Any]:
        for i in range(60):
            Path(path).write_text(str(i))
            yield np.full(700_000, i)

    items = arrays(str(path)) >> own
    assert next(items)[0] == 0
    assert reached(path) < 30
    assert [int(a[-1]) for a in items] == list(range(1, 60))


def test_items_that_are_arrays_belong_to_the_client(own: sky.ComputePool) -> None:
    @sky.compute
    def arrays(size: int) -> Iterator[Any]:
        one = np.zeros(size)
        for _ in range(4):
            one += 1
            yield one

    for size in (10, 20_000, 700_000):
        found = list(arrays(size) >> own)
        assert [a.sum() / size for a in found] == [1, 2, 3, 4]
        found[0] += 1
        assert found[1].sum() == 2 * size


def test_closing_a_stream_stops_the_body(pool: sky.ComputePool, tmp_path: Path) -> None:
    path = tmp_path / "progress"
    items = endless(str(path)) >> pool
    next(items)
    items.close()  # type: ignore[attr-defined]
    until(left(path))
    assert list(items) == []
    assert list(count(3) >> pool) == [0, 1, 2]


def test_leaving_a_loop_and_dropping_the_stream_stops_the_body(own: sky.ComputePool, tmp_path: Path) -> None:
    path = tmp_path / "progress"
    for item in endless(str(path)) >> own:
        if item == 5:
            break
    del item
    gc.collect()
    until(left(path))


def test_a_stream_that_is_never_read_is_stopped_when_it_is_dropped(own: sky.ComputePool, tmp_path: Path) -> None:
    path = tmp_path / "progress"
    endless(str(path)) >> own
    gc.collect()
    until(left(path))


def test_a_stream_can_be_left_by_with(pool: sky.ComputePool, tmp_path: Path) -> None:
    path = tmp_path / "progress"
    with endless(str(path)) >> pool as items:  # type: ignore[attr-defined]
        assert next(items) == 0
    until(left(path))


def test_an_exception_in_mid_stream_comes_after_the_items_before_it(pool: sky.ComputePool) -> None:
    """T13."""
    for after in (0, 1, 700):
        seen: list[int] = []
        with pytest.raises(LookupError, match="in mid-stream") as caught:
            seen.extend(breaks(after) >> pool)
        assert seen == list(range(after))
        assert "breaks" in caught.value.__notes__[0]


@pytest.mark.parametrize("delay", [0.0, 0.3])
def test_every_stream_of_a_broadcast_raises_the_error_of_the_rank_that_failed(
    pool: sky.ComputePool, delay: float
) -> None:
    @sky.compute
    def rows() -> Iterator[int]:
        yield 0
        if sky.instance_info().node == 1:
            time.sleep(delay)
            raise ValueError("bad row")
        time.sleep(120)

    orders: list[Callable[[list[Iterator[int]]], Any]] = [
        lambda streams: [list(stream) for stream in streams],
        lambda streams: [list(stream) for stream in reversed(streams)],
        lambda streams: list(zip(*streams, strict=True)),
    ]
    for read in orders:
        with pytest.raises(ValueError, match="bad row") as raised:
            read(rows() @ pool)
        assert any("rank 1 of 2 (node 1) failed first" in note for note in raised.value.__notes__)


def test_a_rank_that_fails_before_another_streams_is_named_by_the_broadcast_itself(pool: sky.ComputePool) -> None:
    @sky.compute
    def rows() -> Iterator[int]:
        if sky.instance_info().node == 0:
            time.sleep(120)
        return fail()

    def fail() -> Iterator[int]:
        yield 0
        raise ValueError("bad row")

    with pytest.raises(ValueError, match="bad row") as raised:
        rows() @ pool
    assert any("rank 1 of 2 (node 1) failed first" in note for note in raised.value.__notes__)


def test_an_item_that_cannot_travel_is_named(pool: sky.ComputePool) -> None:
    @sky.compute
    def locks() -> Iterator[Any]:
        yield 1
        yield {"a": threading.Lock()}

    items = locks() >> pool
    assert next(items) == 1
    with pytest.raises(sky.errors.ResultNotSerializable, match=r"\['a'\]"):
        next(items)


def test_an_async_generator_streams(pool: sky.ComputePool) -> None:
    assert list(count_async(600) >> pool) == list(range(600))


def test_an_async_generator_that_is_closed_runs_its_finally(pool: sky.ComputePool, tmp_path: Path) -> None:
    path = tmp_path / "progress"

    @sky.compute
    async def endless_async(path: str) -> AsyncIterator[int]:
        try:
            for i in itertools.count():
                yield i
        finally:
            Path(path).write_text("left")

    items = endless_async(str(path)) >> pool
    assert next(items) == 0
    items.close()  # type: ignore[attr-defined]
    until(left(path))


def test_a_generator_on_every_node_gives_a_stream_each(pool: sky.ComputePool) -> None:
    @sky.compute
    def tagged(n: int) -> Iterator[tuple[int, int]]:
        info = sky.instance_info()
        assert info is not None
        for i in range(n):
            yield info.node, i

    streams = tagged(500) @ pool
    assert [list(s) for s in streams] == [[(node, i) for i in range(500)] for node in range(2)]


def test_streams_can_be_read_in_turn(pool: sky.ComputePool) -> None:
    one, two = count(1000) @ pool
    assert list(zip(one, two, strict=True)) == [(i, i) for i in range(1000)]


def test_a_group_and_a_future_may_hold_streams(pool: sky.ComputePool) -> None:
    one, two = (count(3) & count(2)) >> pool
    assert (list(one), list(two)) == ([0, 1, 2], [0, 1])
    assert list((count(3) > pool).result(45)) == [0, 1, 2]


def test_a_streaming_call_has_no_time_limit_left_over_for_its_reader(pool: sky.ComputePool) -> None:
    with pytest.raises(TimeoutError):
        for _ in sky.compute(endless.fn)("/dev/null").with_timeout(0.5) >> pool:
            pass
    assert list(count(2) >> pool) == [0, 1]


def test_a_stream_closed_while_its_body_computes_is_stopped(own: sky.ComputePool, tmp_path: Path) -> None:
    path = tmp_path / "progress"

    @sky.compute
    def slow(path: str) -> Iterator[int]:
        try:
            yield 1
            time.sleep(100)
            yield 2
        finally:
            Path(path).write_text("left")

    items = slow(str(path)) >> own
    assert next(items) == 1
    items.close()  # type: ignore[attr-defined]
    until(left(path))
    assert list(count(2) >> own) == [0, 1]


def test_closing_the_pool_ends_an_open_stream() -> None:
    with sky.ComputePool(console=False) as short:
        items = endless("/dev/null") >> short
        assert next(items) == 0
    with pytest.raises(RuntimeError, match="closed"):
        for _ in items:
            pass


# in


def test_a_generator_argument_is_streamed_in(pool: sky.ComputePool) -> None:
    assert total(i for i in range(20_000)) >> pool == sum(range(20_000))
    assert total(items=iter([1, 2, 3])) >> pool == 6
    assert total(iter(())) >> pool == 0


def test_a_list_given_for_an_iterator_is_an_iterator_there(pool: sky.ComputePool) -> None:
    assert first([1, 2, 3], 2) >> pool == [1, 2]


def test_a_list_given_for_an_iterable_stays_a_list(pool: sky.ComputePool) -> None:
    assert kind_of([1, 2]) >> pool == ("list", 3)
    kind, result = kind_of(i for i in range(3)) >> pool
    assert kind != "list"
    assert result == 3


def test_the_client_is_not_read_far_ahead(pool: sky.ComputePool) -> None:
    given = 0

    def source() -> Iterator[int]:
        nonlocal given
        for i in itertools.count():
            given = i
            yield i

    assert first(source(), 3) >> pool == [0, 1, 2]
    assert given <= 1000


def test_a_body_that_stops_reading_leaves_no_thread_behind(pool: sky.ComputePool) -> None:
    before = threading.active_count()
    for _ in range(5):
        assert first(itertools.count(), 2) >> pool == [0, 1]  # type: ignore[arg-type]
    until(lambda: threading.active_count() <= before)


def test_an_exception_of_the_clients_iterator_is_raised_in_the_body(pool: sky.ComputePool) -> None:
    def source() -> Iterator[int]:
        yield from range(300)
        raise OSError("the source broke")

    @sky.compute
    def careful(items: Iterator[int]) -> tuple[int, str]:
        seen = 0
        try:
            for _ in items:
                seen += 1
        except OSError as exc:
            return seen, str(exc)
        return seen, ""

    assert careful(source()) >> pool == (300, "the source broke")
    with pytest.raises(OSError, match="the source broke"):
        total(source()) >> pool


def test_an_item_of_the_client_that_cannot_travel_is_named(pool: sky.ComputePool) -> None:
    with pytest.raises(TypeError, match=r"item of .* of total"):
        total(threading.Lock() for _ in range(2)) >> pool  # type: ignore[misc]


def test_large_items_are_streamed_in(pool: sky.ComputePool) -> None:
    @sky.compute
    def sums(items: Iterator[Any]) -> list[float]:
        found = []
        for item in items:
            item += 1
            found.append(float(item[0]))
        return found

    assert sums(np.full(700_000, i, dtype="f8") for i in range(20)) >> pool == [i + 1.0 for i in range(20)]


def test_two_iterators_are_streamed_at_once(pool: sky.ComputePool) -> None:
    @sky.compute
    def paired(a: Iterator[int], b: Iterator[int], *, c: Iterator[int]) -> int:
        return sum(x * y + z for x, y, z in zip(a, b, c, strict=True))

    n = 2000
    assert paired(iter(range(n)), iter(range(n)), c=iter(range(n))) >> pool == sum(i * i + i for i in range(n))


def test_every_one_of_many_iterators_is_streamed(pool: sky.ComputePool) -> None:
    @sky.compute
    def sums(*many: Iterator[int], **named: Iterator[int]) -> list[int]:
        return [sum(m) for m in (*many, *named.values())]

    assert sums(iter([1]), iter([2, 3]), c=iter([4])) >> pool == [1, 5, 4]


def test_an_iterator_parameter_of_a_method_or_an_object_is_streamed(pool: sky.ComputePool) -> None:
    class Adder:
        def __init__(self, start: int) -> None:
            self.start = start

        @sky.compute
        def add(self, items: Iterator[int]) -> int:
            return self.start + sum(items)

        def __call__(self, items: Iterator[int]) -> int:
            return self.start + sum(items)

    assert Adder(1).add(iter([1, 2])) >> pool == 4
    assert sky.compute(Adder(1))(iter([1, 2])) >> pool == 4


def test_one_annotation_that_cannot_be_resolved_does_not_hide_the_others(pool: sky.ComputePool) -> None:
    @sky.compute
    def summed(items: Iterator[int], device: Unknown = None) -> int:  # type: ignore[name-defined] # noqa: F821
        return sum(items)

    assert summed(iter([1, 2])) >> pool == 3


def test_an_iterator_where_none_is_expected_is_explained(pool: sky.ComputePool) -> None:
    @sky.compute
    def plain(items):  # type: ignore[no-untyped-def]
        return sum(items)

    with pytest.raises(TypeError, match="Iterator"):
        plain(i for i in range(3)) >> pool


def test_an_iterator_is_not_broadcast(pool: sky.ComputePool) -> None:
    with pytest.raises(TypeError, match="read once"):
        total(iter([1])) @ pool
    assert total(iter([1])) >> pool == 1


# both


def test_items_go_in_and_come_out_of_one_call(pool: sky.ComputePool) -> None:
    assert list(doubled(iter(range(5000))) >> pool) == list(range(0, 10_000, 2))


def test_an_endless_pipe_is_only_driven_by_its_reader(pool: sky.ComputePool) -> None:
    given = 0

    def source() -> Iterator[int]:
        nonlocal given
        for i in itertools.count():
            given = i
            yield i

    items = doubled(source()) >> pool
    assert [next(items) for _ in range(3)] == [0, 2, 4]
    until(lambda: given > 3)
    items.close()  # type: ignore[attr-defined]
    assert given <= 3000
    assert double_check(pool)


def double_check(pool: sky.ComputePool) -> bool:
    return [list(s) for s in count(2) @ pool] == [[0, 1], [0, 1]]


def test_a_stream_can_feed_the_next_call(pool: sky.ComputePool) -> None:
    assert total(count(3000) >> pool) >> pool == sum(range(3000))  # one node makes them, the other adds them


def test_the_source_may_use_the_pool_itself(pool: sky.ComputePool) -> None:
    def source() -> Iterator[int]:
        for i in range(3):
            yield sky.compute(abs)(-i) >> pool

    assert total(source()) >> pool == 3
