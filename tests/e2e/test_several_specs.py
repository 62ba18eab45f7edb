"""A pool with several specs is of the one that was taken: its machines, its image, its receipt."""

from __future__ import annotations

import pytest

import skyward as sky
from skyward import errors, events
from skyward.api.provider import Receipt
from tests.machines.test_selection import NO_ROOM, QUOTA, Shop

DEAR = sky.Spec(provider=Shop(9.0, region="dear"))
FULL = sky.Spec(provider=Shop(0.1, QUOTA, region="full"), nodes=3)
CHEAP = sky.Spec(provider=Shop(0.5, region="cheap"), nodes=2)


@sky.compute
def said() -> str | None:
    import os

    return os.environ.get("CHOSEN")


def chosen(image: sky.Image, cluster: sky.Cluster) -> sky.Image:
    provider = cluster.spec.provider
    assert isinstance(provider, Shop)
    return image.adding(env={"CHOSEN": f"{cluster.nodes} of {provider.region}"})


def test_the_cheapest_that_can_be_had_is_taken() -> None:
    seen: list[events.Event] = []
    pool = sky.ComputePool(DEAR, FULL, CHEAP, plugins=[sky.Plugin("spy", transform=chosen)], console=False)
    assert [prospect.candidate.spec for prospect in pool.plan().prospects] == [FULL, CHEAP, DEAR]
    assert pool.spec is DEAR, "the first, until one is taken"
    pool.on_event(seen.append)
    with pool:
        assert (pool.provider, pool.spec, pool.nodes) == (CHEAP.provider, CHEAP, 2)
        assert said() @ pool == ["2 of cheap"] * 2
    assert "given back to cheap" in str(pool.receipt)
    opening = [event.nodes for event in seen if isinstance(event, events.PoolOpening)]
    assert opening == [1, 3, 2]
    (notice,) = [event for event in seen if isinstance(event, events.Notice) and event.level == "warning"]
    assert "'P instances'" in notice.text
    assert "trying 2 nodes" in notice.text


def test_every_pool_has_a_receipt_once_it_is_closed() -> None:
    seen: list[events.Event] = []
    pool = sky.ComputePool(nodes=1, console=False)
    pool.on_event(seen.append)
    assert pool.receipt is None
    with pool:
        assert said() >> pool is None
    assert isinstance(pool.receipt, Receipt)
    assert "is closed" in str(pool.receipt)
    assert not [event for event in seen if isinstance(event, events.Notice) and "is closed" in event.text]


def test_the_first_that_can_be_had_is_taken_and_a_pool_may_be_opened_again() -> None:
    pool = sky.ComputePool(FULL, DEAR, CHEAP, selection="first", console=False)
    for _ in range(2):
        with pool:
            assert pool.spec is DEAR
            assert said() @ pool == [None]


def test_where_none_can_be_had_all_reasons_are_told() -> None:
    empty = sky.Spec(provider=Shop(0.2, NO_ROOM, region="empty"))
    pool = sky.ComputePool(FULL, empty, console=False)
    with pytest.raises(errors.NoCapacity) as caught:
        with pool:
            pass
    assert "'P instances'" in str(caught.value)
    assert "InsufficientInstanceCapacity" in str(caught.value)
    assert pool.receipt is None
