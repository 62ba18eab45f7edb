"""What a type checker makes of the programming model. Checked by tests/typing/test_typing.py, never run."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Generator, Iterator
from concurrent.futures import Future

# assert_type is in typing from 3.11 on, the oldest Python we support
from typing import Any, assert_type

import skyward as sky
from skyward.api.compute import PendingStream
from skyward.api.futures import AwaitableFuture


@sky.compute
def train(x: int, *, rate: float = 0.1) -> float:
    return x * rate


@sky.compute(timeout=5, retries=2)
def limited(name: str) -> bytes:
    return name.encode()


@sky.compute()
def bare_call(x: int) -> str:
    return str(x)


@sky.compute
def with_default(x: int, width: int = 3) -> str:
    return f"{x:{width}}"


@sky.compute
async def later(x: int) -> list[int]:
    return [x]


@sky.compute(timeout=1)
async def later_limited(x: int) -> list[int]:
    return [x]


@sky.compute
def count(n: int) -> Iterator[int]:
    yield from range(n)


@sky.compute
async def ticks(n: int) -> AsyncIterator[str]:
    for i in range(n):
        yield str(i)


@sky.compute
def generated(n: int) -> Generator[int, None, None]:
    yield from range(n)


@sky.compute
def untyped(x: Any) -> Any:
    return x


@sky.compute
def consume(items: Iterator[str]) -> int:
    return sum(1 for _ in items)


@sky.compute
@sky.stdout(only="head")
@sky.silent
def quiet(x: int) -> complex:
    return complex(x)


@sky.compute
def takes_float(x: float) -> int:
    return int(x)


class Model:
    @sky.compute
    def fit(self, epochs: int) -> dict[str, float]:
        return {"loss": 1 / epochs}

    @staticmethod
    @sky.compute
    def load(path: str) -> bytes:
        return path.encode()

    @classmethod
    @sky.compute
    def named(cls, n: int) -> str:
        return cls.__name__ * n

    @sky.compute
    @classmethod
    def called(cls, n: int) -> str:
        return cls.__name__ * n


def calls() -> None:
    assert_type(train(3, rate=0.5), sky.PendingCompute[float])
    assert_type(limited("x"), sky.PendingCompute[bytes])
    assert_type(bare_call(1), sky.PendingCompute[str])
    assert_type(later(1), sky.PendingCompute[list[int]])
    assert_type(later_limited(1), sky.PendingCompute[list[int]])
    assert_type(count(3), sky.PendingCompute[Iterator[int]])
    assert_type(ticks(3), sky.PendingCompute[Iterator[str]])
    assert_type(consume(iter("abc")), sky.PendingCompute[int])
    assert_type(quiet(1), sky.PendingCompute[complex])
    assert_type(train.local(3, rate=0.5), float)
    assert_type(later.local(3), list[int])
    assert_type(count.local(3), Iterator[int])
    assert_type(ticks.local(3), Iterator[str])
    assert_type(train(3).with_timeout(5), sky.PendingCompute[float])
    assert_type(train(3).with_retries(5), sky.PendingCompute[float])


def methods(model: Model) -> None:
    assert_type(Model.named(3), sky.PendingCompute[str])
    assert_type(Model.called(3), sky.PendingCompute[str])
    assert_type(model.called(3), sky.PendingCompute[str])
    assert_type(Model.called.local(3), str)
    assert_type(model.fit(3), sky.PendingCompute[dict[str, float]])
    assert_type(Model.load("x"), sky.PendingCompute[bytes])
    assert_type(Model.fit(model, 3), sky.PendingCompute[dict[str, float]])


def other_callables() -> None:
    assert_type(sky.compute(functools.partial(int, base=2))("10"), sky.PendingCompute[int])
    assert_type(sky.compute(lambda: 3)(), sky.PendingCompute[int])


def one_call(pool: sky.ComputePool) -> None:
    assert_type(train(3) >> pool, float)
    assert_type(train(3) @ pool, list[float])
    assert_type(train(3) > pool, AwaitableFuture[float])
    assert_type(later(3) >> pool, list[int])
    assert_type(later(3) @ pool, list[list[int]])
    assert_type(count(3) >> pool, sky.Stream[int])
    assert_type(ticks(3) >> pool, sky.Stream[str])
    assert_type(generated(3) >> pool, sky.Stream[int])
    assert_type(count(3) @ pool, list[sky.Stream[int]])
    assert_type(count(3) > pool, AwaitableFuture[sky.Stream[int]])
    assert_type(count(3) >> sky, sky.Stream[int])
    assert_type(list(count(3) >> pool), list[int])
    items: Iterator[int] = count(3) >> pool
    assert_type(next(items), int)
    (count(3) >> pool).close()
    assert_type(Model().fit(2) >> pool, dict[str, float])


def the_module() -> None:
    assert_type(train(3) >> sky, float)
    assert_type(train(3) @ sky, list[float])
    assert_type(train(3) > sky, AwaitableFuture[float])
    assert_type((train(3) & limited("x")) >> sky, tuple[float, bytes])
    assert_type(train(3) >> sky.sky, float)
    assert_type(train(3) @ sky.sky, list[float])


def groups(pool: sky.ComputePool) -> None:
    two = train(3) & limited("x")
    assert_type(two, sky.PendingComputeGroup[float, bytes])
    assert_type(two >> pool, tuple[float, bytes])
    assert_type(two > pool, AwaitableFuture[tuple[float, bytes]])
    assert_type((two & bare_call(1)) >> pool, tuple[float, bytes, str])
    assert_type((two & bare_call(1) & later(1)) >> pool, tuple[float, bytes, str, list[int]])
    assert_type(two.with_timeout(3) >> pool, tuple[float, bytes])


def gathers(pool: sky.ComputePool) -> None:
    assert_type(sky.gather(train(1)) >> pool, tuple[float])
    assert_type(sky.gather(train(1), limited("x")) >> pool, tuple[float, bytes])
    assert_type(sky.gather(train(1), limited("x"), bare_call(1)) >> pool, tuple[float, bytes, str])
    assert_type(
        sky.gather(train(1), limited("x"), bare_call(1), later(1)) > pool,
        AwaitableFuture[tuple[float, bytes, str, list[int]]],
    )
    assert_type(sky.gather(*[train(i) for i in range(3)]) >> pool, tuple[float, ...])
    assert_type(sky.gather(*[train(i) for i in range(3)], stream=True), PendingStream[float])
    assert_type(sky.gather(*[train(i) for i in range(3)], stream=True, ordered=False) >> pool, sky.Stream[float])
    assert_type(sky.gather(train(1), train(2), stream=True) >> pool, sky.Stream[float])


def failures_in_their_places(pool: sky.ComputePool) -> None:
    calls = [train(i) for i in range(3)]
    assert_type(sky.gather(*calls, return_exceptions=True) >> pool, tuple[float | BaseException, ...])
    assert_type(sky.gather(*calls, stream=True, return_exceptions=True) >> pool, sky.Stream[float | BaseException])
    assert_type(pool.map(bare_call, [1, 2], return_exceptions=True), list[str | BaseException])
    assert_type(pool.map(str, [1, 2], return_exceptions=True), list[str | BaseException])


def pool_methods(pool: sky.ComputePool) -> None:
    assert_type(pool.run(train(3)), float)
    assert_type(pool.run(count(3)), sky.Stream[int])
    assert_type(pool.submit(count(3)), AwaitableFuture[sky.Stream[int]])
    assert_type(pool.broadcast(ticks(3)), list[sky.Stream[str]])
    assert_type(pool.run(untyped(3)), Any)
    assert_type(untyped(3) >> pool, Any)
    assert_type(untyped(3) @ pool, list[Any])
    assert_type(untyped(3) > pool, AwaitableFuture[Any])
    assert_type(pool.stream_parallel(sky.gather(train(1), stream=True)), sky.Stream[float])
    assert_type(pool.run_async(train(3)), AwaitableFuture[float])
    assert_type(pool.submit_all([train(3)]), list[AwaitableFuture[float]])
    assert_type(pool.run_async(train(3).keep()), AwaitableFuture[sky.Ref[float]])
    assert_type(pool.map(Model.called, [1, 2]), list[str])
    assert_type(pool.submit(train(3)), AwaitableFuture[float])
    assert_type(pool.broadcast(train(3)), list[float])
    assert_type(pool.run_parallel(train(3) & limited("x")), tuple[float, bytes])
    assert_type(pool.submit_parallel(train(3) & limited("x")), AwaitableFuture[tuple[float, bytes]])
    assert_type(pool.map(str, [1, 2]), list[str])
    assert_type(pool.map(bare_call, [1, 2]), list[str])
    assert_type(pool.map(with_default, [1, 2]), list[str])
    assert_type(pool.map(with_default, [1, 2], return_exceptions=True), list[str | BaseException])
    assert_type(pool.executor.submit(divmod, 7, 2), Future[tuple[int, int]])
    with sky.ComputePool(nodes=2) as opened:
        assert_type(opened, sky.ComputePool)
    assert_type(sky.instance_info(), sky.InstanceInfo)
    for plan in (pool.plan(), sky.plan(nodes=2)):
        assert_type(plan.hourly_cost, float)
        assert_type([offer.name for offer in plan.offers], list[str])
        assert_type([ruled.why for ruled in plan.ruled_out], list[str])
    print(plan.first)  # pyright: ignore


async def with_asyncio() -> None:
    async with sky.ComputePool(nodes=2) as pool:
        assert_type(pool, sky.ComputePool)
        assert_type(await (train(3) > pool), float)
        assert_type(await ((train(3) & limited("x")) > pool), tuple[float, bytes])
        future: Future[float] = train(3) > pool
        assert_type(future.result(), float)
        async for item in await (count(3) > pool):
            assert_type(item, int)
        async for tick in await pool.submit(ticks(3)):
            assert_type(tick, str)
        async for result in sky.gather(train(1), train(2), stream=True) >> pool:
            assert_type(result, float)
        async for each in count(3) >> pool:
            assert_type(each, int)


def objects_that_stay(pool: sky.ComputePool) -> None:
    ref = pool.put(3)
    assert_type(ref, sky.Ref[int])
    assert_type(train(ref), sky.PendingCompute[float])
    assert_type(ref.get(), int)
    assert_type(ref.size, int)
    pending: sky.PendingCompute[sky.Ref[str]] = bare_call(3).keep()
    print(pending.name)
    kept = train(3).keep() >> pool
    assert_type(kept, sky.Ref[float])
    assert_type(kept.get(), float)
    assert_type(takes_float(kept), sky.PendingCompute[int])
    assert_type(takes_float(2.0), sky.PendingCompute[int])
    assert_type(train(3).keep() @ pool, list[sky.Ref[float]])
    assert_type(pool.run(train(3).keep()), sky.Ref[float])
    assert_type(pool.broadcast(train(3).keep()), list[sky.Ref[float]])
    assert_type(pool.submit(train(3).keep()), AwaitableFuture[sky.Ref[float]])
    assert_type(sky.gather(train(3).keep(), bare_call(3).keep()) >> pool, tuple[sky.Ref[float], sky.Ref[str]])
    assert_type(train(3).with_retries(2).keep().with_timeout(5) >> pool, sky.Ref[float])
    assert_type(train(3).keep() > pool, AwaitableFuture[sky.Ref[float]])
    assert_type(train(3).keep() >> sky, sky.Ref[float])
    unchecked: Any = train(3)  # a call as an argument
    assert_type(takes_float(unchecked), sky.PendingCompute[int])


def what_is_refused(pool: sky.ComputePool) -> None:
    train("3")  # pyright: ignore[reportArgumentType]
    takes_float(train(3))  # pyright: ignore[reportArgumentType] - it would run, but so would no forgotten `>> pool`
    train()  # pyright: ignore[reportCallIssue]
    train(3, speed=1)  # pyright: ignore[reportCallIssue]
    Model().fit("x")  # pyright: ignore[reportArgumentType]
    train(3) >> 3  # pyright: ignore[reportOperatorIssue, reportUnusedExpression]
    train(3) & 3  # pyright: ignore[reportOperatorIssue, reportUnusedExpression]
    pool.run(train)  # pyright: ignore[reportArgumentType, reportCallIssue]
    sky.gather(train)  # pyright: ignore[reportArgumentType, reportCallIssue]
    train(3).timeout = 5  # pyright: ignore[reportAttributeAccessIssue]
    print(train(3).shape)  # pyright: ignore
    train(3) + 1  # pyright: ignore[reportOperatorIssue, reportUnusedExpression]
    train.remote(3)  # pyright: ignore
    3 >> pool  # pyright: ignore[reportOperatorIssue, reportUnusedExpression]
    pool.gather(train(3))  # pyright: ignore
    pool.map(bare_call, [1], [2])  # pyright: ignore[reportCallIssue]
    pool.submit(train, 3)  # pyright: ignore[reportArgumentType, reportCallIssue]
    sky.ComputePool(node=4)  # pyright: ignore[reportCallIssue]
    sky.ComputePool(nodes=(1, 2))  # pyright: ignore[reportArgumentType]
    sky.Image(packages=["numpy"])  # pyright: ignore[reportCallIssue]
    sky.Pool()  # pyright: ignore
