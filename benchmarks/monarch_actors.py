"""Monarch's actors as a peer: four processes on this computer, one actor each."""

from __future__ import annotations

import statistics
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from timing import repeated, timed

__all__ = ["monarch_actors", "with_monarch"]


@contextmanager
def monarch_actors(count: int) -> Generator[Any]:
    """A mesh of `count` actors that have answered once."""
    from monarch.actor import Actor, endpoint, this_host

    class Node(Actor):
        @endpoint
        def nothing(self) -> None:
            pass

    processes = this_host().spawn_procs({"gpus": count})
    actors = processes.spawn("node", Node)
    actors.nothing.call().get()
    yield actors
    processes.stop().get()


def with_monarch(nodes: int, one_by_one: int, broadcasts: int, many: int) -> dict[str, float]:
    """Latency of a call to one actor, of one to all of them, and calls that are sent without waiting."""
    with monarch_actors(nodes) as actors:
        one = actors.slice(gpus=0)
        repeated(lambda: one.nothing.call_one().get(), one_by_one // 10)
        latencies = repeated(lambda: one.nothing.call_one().get(), one_by_one)
        all_of_them = repeated(lambda: actors.nothing.call().get(), broadcasts)
        each = [actors.slice(gpus=number) for number in range(nodes)]
        found = {
            "latency": statistics.median(latencies) * 1000,
            "broadcast": statistics.median(all_of_them) * 1000,
        }
        if many:
            took = timed(lambda: [f.get() for f in [each[n % nodes].nothing.call_one() for n in range(many)]])
            found["gather"] = many / took
    return found
