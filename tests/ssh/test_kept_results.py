"""Results that stay on hosts: they go from host to host, through the client in a star, and are lost with their host."""

from __future__ import annotations

import gc
import hashlib
import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward.errors import RefLost
from tests.ssh.places import reached, specs
from tests.support.hosts import Network
from tests.support.listener import Listener
from tests.support.waiting import until

SIZE = 20 << 20
LITTLE = 2 << 20  # what messages, output and signs of life may take meanwhile

Made = tuple[int, str, bytes]


@sky.compute
def make(seconds: float = 0.0) -> Made:
    """The node, a digest, and many bytes."""
    time.sleep(seconds)
    data = os.urandom(SIZE)
    return sky.instance_info().node, hashlib.sha256(data).hexdigest(), data


@sky.compute
def use(made: Made) -> tuple[int, int, bool]:
    """Where it is used, where it was made, whether it is whole."""
    node, digest, data = made
    return sky.instance_info().node, node, hashlib.sha256(data).hexdigest() == digest


@sky.compute
def hold(made: Made, seconds: float) -> None:
    time.sleep(seconds)


@sky.compute
def collect(parts: Any) -> list[tuple[int, bool]]:
    return [(node, hashlib.sha256(data).hexdigest() == digest) for node, digest, data in parts]


@pytest.fixture(scope="module", autouse=True)
def _nothing_of_dead_hosts(hosts_cache: Path) -> Iterator[None]:
    """A host that was cut off leaves its pool's directory in what hosts share here, as no dead machine would."""
    yield
    shutil.rmtree(hosts_cache / "pools", ignore_errors=True)


@pytest.fixture(scope="module")
def pool(net: Network) -> Iterator[sky.ComputePool]:
    with sky.ComputePool(provider=reached(net), console=False) as opened:
        yield opened


def moved(net: Network) -> int:
    """What has crossed the client's link, either way."""
    seen = net.client_bytes()
    return seen.sent + seen.received


def freed(pool: sky.ComputePool, net: Network) -> bool:
    """Whether no host and not the client has a large file of the pool's."""
    gc.collect()
    here = [path for path in Path(pool._store.directory).rglob("*") if path.is_file() and path.stat().st_size > 1 << 20]
    large = ["sh", "-c", "find /dev/shm /tmp /run/cache/pools -type f -size +1024k 2>/dev/null || true"]
    return not here and not any(host.run(large).stdout for host in net if host.alive)


def test_a_kept_result_goes_from_host_to_host_and_home_when_asked_for(pool: sky.ComputePool, net: Network) -> None:
    began = moved(net)
    ref = make().keep() >> pool
    assert ref.size > SIZE
    there = (use(ref) >> pool)[1]
    received = [host.bytes().received for host in net]
    assert use(ref) @ pool == [(node, there, True) for node in range(3)]
    got = [host.bytes().received - before for host, before in zip(net, received, strict=True)]
    assert [SIZE < size < 1.5 * SIZE for size in got] == [node != there for node in range(3)]
    assert use(ref) @ pool == [(node, there, True) for node in range(3)]
    assert moved(net) - began < LITTLE

    node, digest, data = ref.get()
    assert (node, digest) == (there, hashlib.sha256(data).hexdigest())
    assert SIZE < moved(net) - began < 1.5 * SIZE
    assert not freed(pool, net)
    del ref
    until(lambda: freed(pool, net))


def test_a_call_that_takes_it_prefers_its_host(pool: sky.ComputePool) -> None:
    refs = make().keep() @ pool
    assert sky.gather(*(use(ref) for ref in refs)) >> pool == tuple((node, node, True) for node in range(3))


def test_a_fan_in_over_hosts_brings_nothing_home(pool: sky.ComputePool, net: Network) -> None:
    began = moved(net)
    parts = collect([make(0.5) for _ in range(6)]) >> pool
    assert all(whole for _, whole in parts)
    assert {node for node, _ in parts} == {0, 1, 2}
    assert moved(net) - began < LITTLE
    until(lambda: freed(pool, net))


@pytest.mark.timeout(300)  # after those that share a pool, as it loses a host too
def test_a_lost_host_takes_results_along_unless_they_may_be_made_again(whole: Network) -> None:
    with sky.ComputePool(provider=reached(whole), console=False, retries=0) as pool:
        heard = Listener(pool)
        once = sky.gather(*(make(0.5).keep() for _ in range(3))) >> pool
        more = sky.gather(*(make(0.5).with_retries(2).keep() for _ in range(3))) >> pool
        copied = make().keep() >> pool
        assert all(whole for _, _, whole in use(copied) @ pool)
        made = [[(use(ref) >> pool)[1] for ref in refs] for refs in (once, more)]
        assert sorted(made[0]) == sorted(made[1]) == [0, 1, 2]
        gone = made[0][0]
        lost, again = once[0], more[made[1].index(gone)]

        whole[gone].kill()
        for act in (lambda: use(lost) >> pool, lost.get, lambda: use(lost) @ pool):
            with pytest.raises(RefLost, match=rf"the result of make, which was kept on node {gone}, is gone") as caught:
                act()
            assert (caught.value.task, caught.value.node) == ("make", gone)
        node, at, right = use(again) >> pool
        assert right
        assert node != gone != at
        until(lambda: "it is recomputed, retry 1 of 2" in heard.notices())
        assert (use(copied) >> pool)[2]
        assert [ref.get()[0] for ref in once[1:]] == made[0][1:]
        with pytest.raises(RefLost, match="make"):
            collect([lost, make()]) >> pool


@pytest.mark.skipif("SKYWARD_SOAK" not in os.environ, reason="links count as broken after ten seconds: make soak")
@pytest.mark.timeout(400)
def test_broken_links_and_a_host_that_vanishes_meanwhile_cost_time_only(whole: Network) -> None:
    with sky.ComputePool(provider=reached(whole), console=False) as pool:
        refs = sky.gather(*(make(0.5).keep() for _ in range(3))) >> pool
        ref = next(ref for ref in refs if (use(ref) >> pool)[1] == 0)

        # the host that has it cannot be reached from the others: through the client
        for host in (whole[1], whole[2]):
            whole[0].cut_from(host)
        assert use(ref) @ pool == [(node, 0, True) for node in range(3)]
        for host in (whole[1], whole[2]):
            whole[0].heal_from(host)

        # the client's link breaks while a result comes home: what has come does not come again
        whole[0].slow(50)
        kept = (make().keep() @ pool)[0]
        began = whole.client_bytes().received
        with ThreadPoolExecutor(1) as threads:
            home = threads.submit(kept.get)
            until(lambda: whole.client_bytes().received - began > SIZE // 3)
            whole.cut_client()
            time.sleep(12)  # not for luck: a link counts as broken after ten seconds of silence
            assert not home.done()
            whole.heal_client()
            assert len(home.result(120)[2]) == SIZE
        assert whole.client_bytes().received - began < 1.5 * SIZE

        # the power of the host goes while another gets a result from it: it is made again
        refs = sky.gather(*(make(0.5).keep() for _ in range(3))) >> pool
        ref = next(ref for ref in refs if (use(ref) >> pool)[1] == 0)
        received = [host.bytes().received for host in whole]
        busy = hold(ref, 60) > pool
        until(busy.running)
        elsewhere = use(ref) > pool
        until(lambda: max(whole[n].bytes().received - received[n] for n in (1, 2)) > SIZE // 3)
        whole[0].kill(silent=True)
        node, made, right = elsewhere.result(120)
        assert right
        assert 0 not in (node, made)
        busy.cancel()


def test_hosts_that_cannot_reach_each_other_get_it_through_the_client(cache: Path) -> None:
    with (
        Network(specs(cache, 2), star=True, internet=True) as net,
        sky.ComputePool(provider=reached(net), console=False, retries=0) as pool,
    ):
        began = net.client_bytes()
        ref = make().keep() >> pool
        there = (use(ref) >> pool)[1]
        assert moved(net) - began.sent - began.received < LITTLE
        for _ in range(2):
            assert use(ref) @ pool == [(node, there, True) for node in range(2)]
            seen = net.client_bytes()
            assert SIZE < seen.received - began.received < 1.5 * SIZE
            assert SIZE < seen.sent - began.sent < 1.5 * SIZE
        data = ref.get()[2]
        assert len(data) == SIZE
        assert net.client_bytes().received - began.received < 1.5 * SIZE  # the copy that is here
        parts = collect([make(0.5) for _ in range(4)]) >> pool
        assert all(whole for _, whole in parts)
        assert {node for node, _ in parts} == {0, 1}
        net[there].kill()
        assert (use(ref) >> pool) == (1 - there, there, True)
        assert not freed(pool, net)
        del ref
        until(lambda: freed(pool, net))
