"""A group over hosts that loses one of its ranks: it ends as one, names who was first, and the next one works."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

import skyward as sky
from skyward import events
from skyward.errors import NodeLost, TaskCrashed, TaskTimeout
from tests.ssh.places import TORCH, ours, reached, torch_plugin
from tests.support.hosts import Network
from tests.support.waiting import until

FORMS = pytest.mark.parametrize("gang", ["plugin", "decorator"], indirect=True)
PLUGIN = pytest.mark.parametrize("gang", ["plugin"], indirect=True)
DECORATOR = pytest.mark.parametrize("gang", ["decorator"], indirect=True)
pytestmark = pytest.mark.timeout(400)


class Gang:
    """A pool on hosts that may break, and the way its groups are formed."""

    def __init__(self, form: str, pool: sky.ComputePool, net: Network) -> None:
        self.form, self.pool, self.net, self.limit = form, pool, net, 600.0
        self.seen: list[events.Event] = []
        self.stop = pool.on_event(self.seen.append)

    def call(self, body: Any, *args: Any, **options: Any) -> Any:
        """A call whose body finds a group."""
        formed = body if self.form == "plugin" else sky.integrations.torch(timeout=self.limit)(body)
        return sky.compute(**options)(formed)(*args)

    def begin(self, body: Any, *args: Any, **options: Any) -> Callable[[], BaseException]:
        """Starts a broadcast in a thread; gives a function that waits for its error."""
        errors: list[BaseException] = []

        def run() -> None:
            try:
                self.call(body, *args, **options) @ self.pool
            except BaseException as exc:
                errors.append(exc)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()

        def wait() -> BaseException:
            thread.join(90)
            assert errors, "the broadcast did not fail"
            return errors[0]

        return wait

    def ranks(self) -> list[int]:
        """The process of each rank of the last group that has got going, by node, as its own host counts."""
        said = {e.node: e.text.split() for e in self.seen if isinstance(e, events.Output) and "turns" in e.text}
        return [int(said[node][1]) for node in range(3)] if len(said) == 3 else []

    def notices(self) -> str:
        return "\n".join(e.text for e in self.seen if isinstance(e, events.Notice))

    def single(self) -> None:
        """A call for any node, while one is gone: the others take it, unless they are nothing without a group."""
        if self.form == "decorator":
            assert sky.compute(pow)(2, 5) >> self.pool == 32
        else:
            with pytest.raises(NodeLost):
                (sky.compute(pow)(2, 5) > self.pool).result(60)

    def works(self) -> None:
        """A whole group can be formed (again), of processes that have seen no other."""
        until(lambda: self.pool.current_nodes() == 3, 90)
        assert self.call(total) @ self.pool == [6.0] * 3


@pytest.fixture(autouse=True)
def _nothing_is_left() -> None:
    """The pools outlive a single test, with processes that come and go; `pools` looks when they are closed."""


@pytest.fixture(scope="module")
def pools(net: Network) -> Iterator[Callable[[str], sky.ComputePool]]:
    """A pool for each form, opened when it is first asked for: every test leaves it whole again."""
    opened: dict[str, sky.ComputePool] = {}
    with ExitStack() as stack:

        def pool(form: str) -> sky.ComputePool:
            if form not in opened:
                plugins = [torch_plugin()] if form == "plugin" else []
                made = sky.ComputePool(provider=reached(net), image=TORCH, plugins=plugins, console=False)
                opened[form] = stack.enter_context(made)
            return opened[form]

        yield pool
    until(lambda: not any(ours(host) for host in net))


@pytest.fixture
def gang(request: pytest.FixtureRequest, whole: Network, pools: Callable[[str], sky.ComputePool]) -> Iterator[Gang]:
    made = Gang(request.param, pools(request.param), whole)
    until(lambda: made.pool.current_nodes() == 3, 120)
    yield made
    made.stop()


def total() -> float:
    """The sum of rank + 1 over the group."""
    import torch.distributed as dist

    value = torch.tensor(dist.get_rank() + 1.0)
    dist.all_reduce(value)
    return value.item()


def turning(seconds: float = 100) -> None:
    """A loop of collectives, as training is."""
    for turn in range(int(seconds * 20)):
        total()
        if turn == 3:
            print("process", os.getpid(), "turns", flush=True)
        time.sleep(0.05)


def waiting(rank: int, seconds: float = 100) -> None:
    """One rank never comes to the collective."""
    import torch.distributed as dist

    if dist.get_rank() == rank:
        time.sleep(seconds)
    total()


def alive(net: Network, node: int, pid: int) -> bool:
    """Whether a process is still there; one that has ended and waits to be buried is not."""
    status = net[node].run(["cat", f"/proc/{pid}/stat"], check=False).stdout
    return bool(status) and status.rpartition(")")[2].split()[0] != "Z"


@FORMS
def test_a_rank_that_is_killed_is_named_and_the_next_group_works(gang: Gang) -> None:
    """Row 16: seconds after a crash; the survivors do not go on."""
    failed = gang.begin(turning)
    pids = until(gang.ranks)
    gang.net[1].signal(pids[1], "KILL")
    error = failed()
    assert isinstance(error, TaskCrashed)
    assert (error.node, error.signal) == (1, "SIGKILL")
    assert any("rank 1 of 3" in note for note in error.__notes__)
    gang.works()
    found = gang.call(os.getpid) @ gang.pool
    assert found[1] != pids[1]


@pytest.mark.parametrize(("gang", "node"), [("plugin", 0), ("decorator", 2)], indirect=["gang"])
def test_a_host_that_dies_in_a_group_is_named_and_the_next_group_works_when_it_is_back(gang: Gang, node: int) -> None:
    """Rows 14, 16, 19: the error is not the one that torch raises elsewhere; the head is a host like the others."""
    failed = gang.begin(turning)
    pids = until(gang.ranks)
    gang.net[node].kill()
    error = failed()
    assert isinstance(error, NodeLost)
    assert error.node == node
    assert f"node {node} is lost" in gang.notices()
    with pytest.raises(NodeLost):
        gang.call(total) @ gang.pool
    gang.single()
    gang.net[node].restart()
    gang.works()
    if gang.form == "plugin":  # no process of a broken group is in the next one
        assert not any(alive(gang.net, other, pids[other]) for other in range(3) if other != node)


@DECORATOR
def test_a_host_that_falls_silent_in_a_group_is_named_and_fenced(gang: Gang) -> None:
    """Rows 13, 16, 18, 23: its rank still waits for the others when it is reached again, and joins no later group."""
    failed = gang.begin(turning)
    pids = until(gang.ranks)
    gang.net[1].cut()
    error = failed()
    assert isinstance(error, NodeLost)
    assert error.node == 1
    assert alive(gang.net, 1, pids[1])
    gang.single()
    gang.net[1].heal()
    gang.works()
    assert not alive(gang.net, 1, pids[1])


@PLUGIN
def test_a_host_that_stands_still_is_given_up_and_its_rank_comes_back_into_no_group(gang: Gang) -> None:
    """Row 18: its kernel still answers, so only its silence tells."""
    failed = gang.begin(turning)
    pids = until(gang.ranks)
    gang.net[2].freeze()
    try:
        error = failed()
        gang.single()
    finally:
        gang.net[2].thaw()
    assert isinstance(error, NodeLost)
    assert error.node == 2
    gang.works()
    assert not alive(gang.net, 2, pids[2])


def test_a_host_may_be_away_for_longer_than_the_others_wait_for_a_group(whole: Network) -> None:
    """Rows 16, 18: they give up forming one, and are still there when it is back."""
    limit = 3
    plugins = [torch_plugin(timeout=limit)]
    with sky.ComputePool(provider=reached(whole), image=TORCH, plugins=plugins, console=False) as pool:
        gang = Gang("plugin", pool, whole)
        failed = gang.begin(turning)
        until(gang.ranks)
        whole[2].kill()
        assert isinstance(failed(), NodeLost)
        time.sleep(3 * limit)
        whole[2].restart()
        gang.works()


@DECORATOR
def test_a_group_goes_on_while_the_clients_link_is_cut(gang: Gang) -> None:
    """Rows 28, 29: hosts need each other, not the client."""
    future = threading.Thread(target=lambda: results.append(gang.call(turning, 15) @ gang.pool))
    results: list[Any] = []
    future.start()
    pids = until(gang.ranks)
    gang.net.cut_client()
    until(lambda: {e.node for e in gang.seen if isinstance(e, events.NodeDown)} == {0, 1, 2}, 120)
    gang.net.heal_client()
    future.join(90)
    assert results == [[None] * 3]
    assert gang.call(os.getpid) @ gang.pool == pids


@PLUGIN
def test_a_rank_that_never_comes_ends_the_group_at_the_calls_time_limit(gang: Gang) -> None:
    """Row 17."""
    with pytest.raises(TaskTimeout):
        gang.call(waiting, 1, timeout=2) @ gang.pool
    gang.works()


@DECORATOR
def test_hosts_that_lose_each_other_in_a_collective_meet_the_groups_own_time_limit(gang: Gang) -> None:
    """Rows 17, 23: the client sees all of them, so none is lost; the error says what the limit was."""
    gang.limit = 4
    failed = gang.begin(turning)
    until(gang.ranks)
    gang.net[1].cut_from(gang.net[2])
    error = failed()
    assert isinstance(error, RuntimeError)
    assert any("timeout=4 s" in note for note in error.__notes__)
    gang.net[1].heal_from(gang.net[2])
    gang.limit = 600
    gang.works()
    gang.works()
