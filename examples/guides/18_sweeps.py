"""A sweep that loses nothing, results that stay, a model that is loaded once, and a pool in an asyncio program."""

import argparse
import asyncio
import math
import time
from typing import Any

import skyward as sky


@sky.compute
def train(rate: float, depth: int) -> float:
    """Stands for a training run; some settings do not work."""
    if rate > 0.5:
        raise ValueError(f"the loss is not a number with rate={rate}")
    return 1 / (1 + abs(math.log10(rate) + 2) + abs(depth - 4))


@sky.once
def model() -> dict[str, int]:
    """Stands for weights that take a while to load."""
    time.sleep(0.5)
    return {"good": 1, "bad": -1}


@sky.compute
def rate_texts(texts: list[str]) -> list[int]:
    """Uses the model that this process has loaded."""
    return [sum(model().get(word, 0) for word in text.split()) for text in texts]


@sky.compute
def length(words: dict[str, int], word: str) -> int:
    """Looks a word up in a table that this process has got once."""
    return words[word]


@sky.compute
def load(part: int) -> list[float]:
    """Stands for data that takes a while to read."""
    return [math.sin(part + n / 1000) for n in range(200_000)]


@sky.compute
def mean(values: list[float], power: int = 1) -> float:
    """Works on data that is where it runs, or comes there from another node."""
    return sum(value**power for value in values) / len(values)


@sky.compute
def largest(parts: list[list[float]]) -> float:
    """Takes what several other calls have made."""
    return max(map(max, parts))


def sweep(pool: sky.ComputePool) -> None:
    settings = [(rate, depth) for rate in (0.001, 0.01, 0.1, 1.0) for depth in (2, 4, 8)]
    results = sky.gather(*(train(*chosen) for chosen in settings), return_exceptions=True) >> pool
    for chosen, result in zip(settings, results, strict=True):
        if isinstance(result, Exception):
            print(chosen, repr(result))
    scores = {chosen: result for chosen, result in zip(settings, results, strict=True) if isinstance(result, float)}
    best = max(scores, key=lambda chosen: scores[chosen])

    failed = [chosen for chosen, result in zip(settings, results, strict=True) if isinstance(result, Exception)]
    again = sky.gather(*(train(rate / 10, depth) for rate, depth in failed), return_exceptions=True) >> pool
    print(f"best: rate={best[0]}, depth={best[1]}; {len(scores)} runs finished, {len(failed)} failed")
    print(f"sent again with a smaller rate: {sum(isinstance(result, float) for result in again)} finished")


def first_failure(pool: sky.ComputePool) -> None:
    try:
        pool.map(lambda rate: train.local(rate, 4), [0.001, 0.01, 0.1, 1.0])
    except ValueError as error:
        finished: dict[int, float] = getattr(error, "partial", {})
        print(f"stopped by: {error}; finished before it: {sorted(finished)}")


def shared_data(pool: sky.ComputePool) -> None:
    words = pool.put({word: len(word) for word in "some table that is costly to pickle".split()})
    lengths = sky.gather(*(length(words, word) for word in ("some", "table", "costly"))) >> pool
    print(f"looked up: {lengths}")


def results_that_stay(pool: sky.ComputePool) -> None:
    data = load(0).keep() >> pool
    means = sky.gather(*(mean(data, power) for power in (1, 2, 3))) >> pool
    print(f"means: {[round(value, 3) for value in means]}; {data}")
    values = data.get()
    print(f"brought here: {len(values)} values")


def calls_as_arguments(pool: sky.ComputePool) -> None:
    parts: Any = [load(part) for part in range(6)]
    print(f"the largest value of all parts: {largest(parts) >> pool:.3f}")


def inference(pool: sky.ComputePool) -> None:
    batches = [[f"a good text number {n}", "a bad one"] for n in range(200)]
    began = time.perf_counter()
    found = sky.gather(*(rate_texts(batch) for batch in batches)) >> pool
    seconds = time.perf_counter() - began
    print(f"{sum(map(len, found))} texts in {seconds:.1f} s, with a model that takes 0.5 s to load")


async def in_asyncio(nodes: int) -> None:
    async with sky.ComputePool(nodes=nodes) as pool:
        results = await asyncio.gather(*((train(rate, 4) > pool) for rate in (0.001, 0.01, 0.1)))
        print(f"awaited: {[round(result, 2) for result in results]}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=2)
    nodes = parser.parse_args().nodes
    with sky.ComputePool(nodes=nodes) as pool:
        sweep(pool)
        first_failure(pool)
        shared_data(pool)
        results_that_stay(pool)
        calls_as_arguments(pool)
        inference(pool)
    asyncio.run(in_asyncio(nodes))
