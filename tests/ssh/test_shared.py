"""Shared collections on hosts: over links between agents, or through the client where hosts cannot reach each other."""

from __future__ import annotations

import time
from concurrent.futures import Future
from pathlib import Path

import pytest

import skyward as sky
from skyward.errors import BarrierBroken, SharedTimeout
from tests.ssh.places import reached, specs
from tests.support.hosts import Network
from tests.support.waiting import until

LONG = 120.0


@sky.compute
def use(name: str, rounds: int) -> list[int]:
    tokens: list[int] = []
    for _ in range(rounds):
        sky.counter(f"{name}.count").add()
        with sky.lock(f"{name}.lock", timeout=LONG) as token:
            tokens.append(token)
    sky.dict(f"{name}.dict")[sky.instance_info().rank] = bytes(100_000)
    sky.barrier(f"{name}.barrier").wait(LONG)
    return tokens


@sky.compute
def count_slowly(count: int) -> list[int]:
    seen: list[int] = []
    for _ in range(count):
        seen.append(sky.counter("slow").add())
        time.sleep(0.02)
    return seen


@sky.compute
def longest_wait(seconds: float) -> float:
    longest, end = 0.0, time.monotonic() + seconds
    while time.monotonic() < end:
        began = time.monotonic()
        sky.counter("away").add()
        longest = max(longest, time.monotonic() - began)
        time.sleep(0.02)
    return longest


@sky.compute
def hold_or_meet() -> int:
    """The first one but rank 0 holds the lock for long; the others wait at a barrier."""
    rank = sky.instance_info().rank
    if rank and sky.counter("hold.first").add() == 1:
        sky.lock("hold").acquire()
        sky.dict("hold.holder")["rank"] = rank
        time.sleep(LONG)
    return sky.barrier("hold.barrier").wait(LONG)


def check_use(pool: sky.ComputePool, name: str, nodes: int) -> None:
    results = use(name, 10) @ pool
    assert sorted(token for tokens in results for token in tokens) == list(range(1, 10 * nodes + 1))
    assert pool.counter(f"{name}.count").value == 10 * nodes
    assert {rank: len(data) for rank, data in pool.dict(f"{name}.dict").items()} == dict.fromkeys(range(nodes), 100_000)
    with pytest.raises(SharedTimeout):
        pool.queue(f"{name}.queue").get(0.1)


def test_hosts_share_over_links_that_break_and_a_lost_host_lets_go(whole: Network) -> None:
    with sky.ComputePool(provider=reached(whole), console=False, retries=0) as pool:
        check_use(pool, "use", 3)

        # an operation over a link that breaks and comes back is done once
        calls: list[Future[list[int]]] = [count_slowly(100) > pool for _ in range(3)]
        until(lambda: pool.counter("slow").value > 15)
        whole[2].cut_from(whole[0])
        time.sleep(1.0)
        whole[2].heal_from(whole[0])
        seen = [value for call in calls for value in call.result(LONG)]
        assert sorted(seen) == list(range(1, 301))

        # ranks go on while the client is away
        going = [longest_wait(7.0) > pool for _ in range(3)]
        until(lambda: pool.counter("away").value > 5)
        whole.cut_client()
        time.sleep(4.5)
        whole.heal_client()
        assert all(call.result(LONG) < 4.0 for call in going)

        # a host that is lost releases its lock, and the others do not wait for it at a barrier
        waiting = [hold_or_meet() > pool for _ in range(3)]
        holder = until(lambda: pool.dict("hold.holder").get("rank"))
        until(lambda: pool.barrier("hold.barrier").waiting == 2)
        whole[holder].kill()
        assert pool.lock("hold").acquire(LONG) == 2
        errors = [call.exception(LONG) for call in waiting]
        broken = [error for error in errors if isinstance(error, BarrierBroken)]
        assert [error.rank for error in broken] == [holder] * 2, errors
        pool.lock("hold").release()


def test_hosts_that_cannot_reach_each_other_ask_through_the_client(cache: Path) -> None:
    with (
        Network(specs(cache, 2), star=True, internet=True) as net,
        sky.ComputePool(provider=reached(net), console=False) as pool,
    ):
        check_use(pool, "star", 2)
