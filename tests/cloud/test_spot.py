"""Machines that the cloud takes away: with notice and without, replaced, and nothing lost."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import skyward as sky
from skyward import errors, events
from skyward.machines import replacement
from skyward.setup import hosts as hosts_module
from tests.cloud.machines import Hosts
from tests.cloud.spot import Seen, instance, who
from tests.support.cloud import Cloud
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(480)


@sky.compute
def heedful() -> dict[str, Any]:
    """Works until it is told that its machine goes, and says what it was told."""
    signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
    early = sky.preempted()
    print("working", flush=True)
    while not (notice := sky.preempted()) or not signals:
        time.sleep(0.02)
    info: Any = sky.instance_info()
    return {
        "node": info.node,
        "left": notice.seconds_left,
        "signals": signals,
        "early": early,
        "host": socket.gethostname(),
    }


@sky.compute
def stubborn() -> tuple[int, str]:
    """Goes on as if nothing had happened; on another machine it is done at once."""
    info: Any = sky.instance_info()
    print("working", flush=True)
    while info.attempt == 0:
        time.sleep(0.05)
    return info.attempt, socket.gethostname()


@sky.compute(retries=2)
def together() -> tuple[int, int, list[str]]:
    """A rank whose machine goes gives up; the others would wait for it for ever."""
    info: Any = sky.instance_info()
    print("working", flush=True)
    while info.attempt == 0:
        if sky.preempted():
            raise sky.Preempted
        time.sleep(0.02)
    return info.node, info.attempt, [peer.private_ip for peer in info.peers]


def test_a_body_is_told_and_its_machine_is_replaced(
    cloud: Cloud, hosts: Hosts, opened: Callable[..., tuple[sky.ComputePool, Seen]]
) -> None:
    """Row 21: seen, told to the body, drained, replaced under the same number, given back before its time."""
    pool, seen = opened()
    with pool:
        old = dict(who() @ pool)
        futures = [pool.submit(heedful()) for _ in range(2)]
        until(lambda: seen.working() == 2)
        id = instance(cloud, hosts, old[1])
        cloud.notice(id, 60)
        done = next(f for f in futures if f in until(lambda: [f for f in futures if f.done()])).result()
        assert done["host"] == old[1]
        assert done["early"] is None
        assert done["signals"] == [signal.SIGTERM]
        assert 40 < done["left"] <= 60
        assert any(isinstance(e, events.NodeLeaving) and e.node == 1 for e in seen)
        assert (who() >> pool)[1] != old[1]
        until(lambda: pool.current_nodes() == 2, 120)
        other = cloud.machines.all[id]
        until(lambda: other.ended)
        assert other.noticed is not None
        assert other.ended < other.noticed  # nobody pays for the rest of its time
        next(f for f in futures if not f.done()).cancel()
        new = dict(who() @ pool)
        assert new[0] == old[0]
        assert new[1] not in old.values()
    assert len(cloud.machines.all) == 3
    assert "a replacement is requested" in seen.texts()


def test_what_a_body_does_not_finish_in_time_is_run_again_elsewhere(
    cloud: Cloud, hosts: Hosts, opened: Callable[..., tuple[sky.ComputePool, Seen]]
) -> None:
    """Row 21: within retries, and on the machine that is left when none takes the place of the lost one."""
    pool, seen = opened(replace=False)
    with pool:
        old = dict(who() @ pool)
        future = pool.submit(stubborn())
        until(seen.working)
        node = next(e.node for e in seen if isinstance(e, events.Output))
        cloud.notice(instance(cloud, hosts, old[node]), 4)
        until(lambda: any(isinstance(e, events.NodeLeaving) for e in seen))
        with pytest.raises(errors.NodeLost, match="taken away"):
            who() @ pool
        assert future.result(60) == (1, old[1 - node])
        assert who() >> pool == (1 - node, old[1 - node])
    assert "another one" not in seen.texts()
    assert len(cloud.machines.all) == 2


def test_a_group_that_lost_a_rank_starts_again_as_a_whole(
    cloud: Cloud, hosts: Hosts, opened: Callable[..., tuple[sky.ComputePool, Seen]]
) -> None:
    """With `attempt` raised on all of them, and the address of the new machine known to all."""
    pool, seen = opened(image=sky.Image(pip=["distributed"]))
    with pool:
        old = dict(who() @ pool)
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.extend(together() @ pool))
        thread.start()
        until(lambda: seen.working() == 2)
        id = instance(cloud, hosts, old[0])
        cloud.notice(id, 60)  # the head, of all
        thread.join(120)
        assert [(node, attempt) for node, attempt, _ in found] == [(0, 1), (1, 1)]
        addresses = [cloud.machines.all[one.id].private_ip for one in cloud.running()]
        assert all(sorted(peers) == sorted(addresses) for _, _, peers in found)
        client = pool.dask()
        assert sorted(
            client.submit(socket.gethostname, pure=False, workers=[name]).result(60) for name in ("node-0", "node-1")
        ) == sorted(hosts.of[one.id].name for one in cloud.running())


def test_all_ranks_of_a_machine_that_goes_are_started_again_on_the_next(
    cloud: Cloud, hosts: Hosts, opened: Callable[..., tuple[sky.ComputePool, Seen]]
) -> None:
    pool, seen = opened(processes_per_node=2)
    with pool:
        old = dict(who() @ pool)
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.extend(together() @ pool))
        thread.start()
        until(lambda: seen.working() == 4)
        cloud.notice(instance(cloud, hosts, old[1]), 60)
        thread.join(120)
        assert [(node, attempt) for node, attempt, _ in found] == [(0, 1), (0, 1), (1, 1), (1, 1)]
        assert len({tuple(peers) for _, _, peers in found}) == 1  # also those that go on know the new machine


def test_a_machine_that_vanishes_is_replaced_too(
    cloud: Cloud, opened: Callable[..., tuple[sky.ComputePool, Seen]]
) -> None:
    """Row 22, in a pool of one: the cloud is asked whether the machine is there, and the call runs on the next."""
    pool, seen = opened(nodes=1)
    with pool:
        future = pool.submit(stubborn())
        until(lambda: seen.working() == 1)
        cloud.end(cloud.running()[0].id)
        assert future.result(120)[0] == 1
        assert "Server.SpotInstanceTermination" in seen.texts() or "is lost" in seen.texts()


def test_a_replacement_that_dies_while_it_is_set_up_is_replaced_as_well(
    cloud: Cloud, opened: Callable[..., tuple[sky.ComputePool, Seen]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool keeps its key and group although for a while it has no machine at all."""
    monkeypatch.setattr(replacement, "_PAUSES", (0.1, 0.1))
    monkeypatch.setattr(hosts_module, "_INTERVAL", 0.5)
    pool, seen = opened(nodes=1)
    ended: list[str] = []

    def strike(event: events.Event) -> None:
        if isinstance(event, events.NodePhase) and event.phase.startswith("connecting") and not ended:
            ended.extend(one.id for one in cloud.running())
            cloud.end(ended[0])

    with pool:
        future = pool.submit(stubborn())
        until(seen.working)
        pool.on_event(strike)
        cloud.end(cloud.running()[0].id)
        assert future.result(120)[0] == 1
        assert ended
    assert len(cloud.machines.all) == 3


@pytest.mark.parametrize("moment", ["starting", "up"])
def test_a_replacement_that_is_taken_away_at_once_is_replaced_as_well(
    cloud: Cloud, hosts: Hosts, opened: Callable[..., tuple[sky.ComputePool, Seen]], moment: str
) -> None:
    """Its notice counts, also when it comes before or just when we connect to it."""
    pool, seen = opened()
    noticed: list[str] = []

    def strike(event: events.Event) -> None:
        now = isinstance(event, events.NodePhase) and event.phase == "starting"
        if (isinstance(event, events.NodeUp) if moment == "up" else now) and not noticed:
            noticed.append(cloud.running()[-1].id)
            cloud.notice(noticed[0], 60)

    with pool:
        old = dict(who() @ pool)
        pool.on_event(strike)
        cloud.notice(instance(cloud, hosts, old[1]), 60)
        until(lambda: len(cloud.machines.all) == 4, 120)
        until(lambda: pool.current_nodes() == 2, 120)
        until(lambda: len(cloud.running()) == 2)
        new = dict(who() @ pool)
        assert new[1] not in (old[1], hosts.of[noticed[0]].name)
    assert sum(isinstance(event, events.NodeLeaving) for event in seen) == 2


def test_a_quota_that_counts_the_old_machine_is_waited_for(
    cloud: Cloud,
    hosts: Hosts,
    opened: Callable[..., tuple[sky.ComputePool, Seen]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And all nodes together stay within what may be spent."""
    monkeypatch.setattr(replacement, "_PAUSES", (0.1, 0.1))
    pool, seen = opened(max_hourly_cost=0.07)
    with pool:
        old = dict(who() @ pool)
        cloud.fail("RunInstances", "MaxSpotInstanceCountExceeded")
        cloud.notice(instance(cloud, hosts, old[1]), 60)
        until(lambda: len(cloud.machines.all) == 3, 120)
        until(lambda: pool.current_nodes() == 2, 120)
        assert dict(who() @ pool)[0] == old[0]
    assert any(isinstance(e, events.NodePhase) and "no replacement yet" in e.phase for e in seen)
    assert all(bill.hourly_cost <= 0.035 for bill in pool.receipt.machines)  # type: ignore[attr-defined]


def test_without_capacity_the_rest_goes_on_and_the_reason_is_told(
    cloud: Cloud,
    hosts: Hosts,
    opened: Callable[..., tuple[sky.ComputePool, Seen]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replacement, "_PAUSES", (0.1,))
    pool, seen = opened()
    with pool:
        old = dict(who() @ pool)
        cloud.room(0)
        cloud.notice(instance(cloud, hosts, old[1]), 4)
        until(lambda: "could not be replaced" in seen.texts())
        assert who() >> pool == (0, old[0])
        with pytest.raises(errors.NodeLost, match="node 1"):
            who() @ pool
    assert "InsufficientInstanceCapacity" in seen.texts()


def test_a_pool_may_be_closed_while_a_machine_is_replaced(
    cloud: Cloud, hosts: Hosts, opened: Callable[..., tuple[sky.ComputePool, Seen]]
) -> None:
    """Nothing that was asked for at the last moment is left."""
    pool, _ = opened()
    with pool:
        cloud.times.boot = 600
        cloud.notice(cloud.running()[1].id, 60)
        until(lambda: len(cloud.machines.all) == 3)
    assert cloud.running() == []
    assert len(pool.receipt.machines) == 3  # type: ignore[attr-defined]


def test_replacing_is_refused_where_there_is_nothing_to_replace_with() -> None:
    with pytest.raises(sky.SkywardError, match="replace=True: Local has no other machines"):
        sky.ComputePool(replace=True)
