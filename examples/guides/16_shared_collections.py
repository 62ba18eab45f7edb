"""Ranks that share work and findings while they run: a queue of jobs, the best result so far, one writer at a time."""

import argparse
from functools import partial

import skyward as sky


def score(job: int) -> float:
    """Stands for a training run with the settings number `job`."""
    return 1.0 - abs(job - 37) / 100


@sky.compute
def search() -> int:
    """Takes jobs until there are none, and keeps the best score of the whole pool up to date."""
    jobs = sky.queue("jobs", int)
    best = sky.dict("best", str, tuple[float, int])
    done = 0
    while True:
        try:
            job = jobs.get(timeout=0)
        except TimeoutError:
            return done
        best.change("score", partial(max, (score(job), job)), default=(0.0, -1))
        sky.counter("searched").add()
        done += 1


@sky.compute
def report(rounds: int) -> list[int]:
    """Writes rounds in step with the other ranks; the lock keeps two lines from being mixed up."""
    rank = sky.instance_info().rank
    tokens = []
    for number in range(rounds):
        with sky.lock("report", timeout=60) as token:
            sky.dict("lines").change(number, lambda lines: [*lines, f"rank {rank}"], default=[])
            tokens.append(token)
        sky.barrier("round").wait(timeout=60)  # nobody begins the next round before all have ended this one
    return tokens


@sky.compute
def count_words(text: str, progress: sky.SharedQueue[str]) -> int:
    """A collection can be an argument; on the node it is the one of the same name."""
    progress.put(f"{len(text.split())} words")
    return len(text.split())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, default=4)
    nodes = parser.parse_args().nodes
    with sky.ComputePool(nodes=nodes, console=False) as pool:
        jobs = pool.queue("jobs", int)
        for job in range(100):
            jobs.put(job)
        done = search() @ pool
        print(f"{pool.counter('searched').value} jobs, best: {pool.dict('best')['score']}")
        assert sum(done) == pool.counter("searched").value == 100
        assert pool.dict("best")["score"] == (1.0, 37)

        tokens = report(3) @ pool
        assert sorted(token for mine in tokens for token in mine) == list(range(1, 3 * nodes + 1))
        assert [len(lines) for lines in pool.dict("lines").values()] == [nodes] * 3

        progress = pool.queue("progress", str)
        call = count_words("to be or not to be", progress) > pool
        print(progress.get(timeout=60))
        assert call.result() == 6


if __name__ == "__main__":
    main()
