"""Where a body runs: topology from COMPUTE_POOL; the current call."""

from __future__ import annotations

import contextvars
import json
import os
import pickle
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from skyward.api import info
from skyward.api.info import (
    AcceleratorInfo,
    InstanceInfo,
    NetworkInfo,
    Peer,
    call_context,
    current_broadcast,
    current_call,
    instance_info,
    is_head,
    pool_info,
)

FULL = InstanceInfo(
    node=1,
    worker=1,
    total_nodes=3,
    workers_per_node=2,
    accelerators=8,
    total_accelerators=24,
    node_gpus=("0", "GPU-5f2c8a"),
    gpu_conflict="4 ranks share 2 GPUs on node 1",
    head_addr="10.0.0.1",
    head_port=29500,
    job_id="pool-7f3a",
    peers=(Peer(0, "10.0.0.1", "203.0.113.9"), Peer(1, "10.0.0.2"), Peer(2, "fe80::1%eth0")),
    accelerator=AcceleratorInfo("A100", 8, 80.0),
    network=NetworkInfo("eth0", 25.0),
    ports={"torch": 29500, "jax": 29501},
)


def small(node: int = 0, total_nodes: int = 2) -> InstanceInfo:
    peers = tuple(Peer(i, f"10.0.0.{i + 1}") for i in range(total_nodes))
    return InstanceInfo(
        node=node, total_nodes=total_nodes, head_addr="10.0.0.1", head_port=4000, job_id="p", peers=peers
    )


pytestmark = pytest.mark.usefixtures("no_pool")


def test_outside_a_pool_everyone_is_the_only_rank_and_head() -> None:
    """D6, T16."""
    info = instance_info()
    assert (info.node, info.total_nodes, info.rank, info.world_size, info.job_id) == (0, 1, 0, 1, "")
    assert is_head()
    assert pool_info() is None


def test_the_variable_holds_every_field(monkeypatch: pytest.MonkeyPatch) -> None:
    """S1-04, S1-36 to S1-43, D6."""
    monkeypatch.setenv("COMPUTE_POOL", FULL.to_json())
    assert instance_info() == FULL
    assert not is_head()


def test_a_user_can_form_a_process_group_from_the_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    """S1-44."""
    monkeypatch.setenv("COMPUTE_POOL", small(1, 4).to_json())
    info = instance_info()
    assert info is not None
    assert (info.head_addr, info.head_port, info.total_nodes, info.node) == ("10.0.0.1", 4000, 4, 1)
    assert [peer.node for peer in info.peers] == [0, 1, 2, 3]


def test_a_changed_variable_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for node in (0, 1, 0):
        monkeypatch.setenv("COMPUTE_POOL", small(node).to_json())
        info = instance_info()
        assert info is not None
        assert info.node == node


def test_workers_are_numbered_over_all_nodes() -> None:
    """D6, X10."""
    assert FULL.global_worker_index == 3
    assert FULL.total_workers == 6
    assert not FULL.is_head
    assert small(0).is_head
    assert not small(1).is_head
    assert is_head(small(0))
    assert not is_head(small(1))
    assert small().hostname == os.uname().nodename


def test_with_one_process_a_node_the_rank_is_the_node() -> None:
    for node in range(3):
        found = small(node, 3)
        assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == (node, 3, 0, 1)
        assert found.node_of(node) == node


def test_ranks_are_counted_up_node_by_node() -> None:
    assert (FULL.rank, FULL.world_size, FULL.local_rank, FULL.local_world_size) == (3, 6, 1, 2)
    assert [FULL.node_of(rank) for rank in range(6)] == [0, 0, 1, 1, 2, 2]


def test_ranks_are_counted_right_where_nodes_have_different_numbers_of_processes() -> None:
    counts = (2, 1, 4)
    found = [
        replace(FULL, node=node, worker=worker, workers_per_node=count, ranks_per_node=counts)
        for node, count in enumerate(counts)
        for worker in range(count)
    ]
    assert [info.rank for info in found] == list(range(7))
    assert {info.world_size for info in found} == {7}
    assert [found[0].node_of(rank) for rank in range(7)] == [info.node for info in found]
    assert [info.is_head for info in found] == [True] + [False] * 6
    assert [InstanceInfo.from_json(info.to_json()) for info in found] == found


def test_a_cpu_node_has_no_accelerators_by_default() -> None:
    """S1-42, T7."""
    assert small().accelerators == 0
    assert small().accelerator is None


def test_info_is_a_value_that_can_travel() -> None:
    assert pickle.loads(pickle.dumps(FULL)) == FULL
    assert hash(FULL) == hash(InstanceInfo.from_json(FULL.to_json()))
    with pytest.raises(AttributeError):
        FULL.node = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"node": 3}, "node"),
        ({"node": -1}, "node"),
        ({"node": "0"}, "node"),
        ({"node": True}, "node"),
        ({"node": 0.0}, "node"),
        ({"node": None}, "node"),
        ({"worker": 2}, "worker"),
        ({"ranks_per_node": [1, 2]}, "ranks_per_node"),
        ({"ranks_per_node": [1, 2, 0]}, "ranks_per_node"),
        ({"ranks_per_node": [2, 1, 2]}, "ranks_per_node"),
        ({"ranks_per_node": 2}, "ranks_per_node"),
        ({"total_nodes": 0}, "total_nodes"),
        ({"total_nodes": 10**30}, "total_nodes"),
        ({"accelerators": -1}, "accelerators"),
        ({"node_gpus": "0"}, "node_gpus"),
        ({"node_gpus": ["0", "1;x"]}, "node_gpus"),
        ({"gpu_conflict": "a\nb"}, "gpu_conflict"),
        ({"head_addr": "10.0.0.1; touch pwned"}, "head_addr"),
        ({"head_addr": "$(touch pwned)"}, "head_addr"),
        ({"head_addr": "-oProxyCommand=x"}, "head_addr"),
        ({"head_addr": "10.0.0.1\n"}, "head_addr"),
        ({"head_addr": ""}, "head_addr"),
        ({"head_addr": "a" * 65536}, "head_addr"),
        ({"head_port": 0}, "head_port"),
        ({"head_port": 65536}, "head_port"),
        ({"job_id": "`x`"}, "job_id"),
        ({"job_id": ["a"]}, "job_id"),
        ({"peers": []}, "peers"),
        ({"peers": {}}, "peers"),
        ({"peers": [1, 2, 3]}, "peers"),
        ({"peers": [{"node": 0, "private_ip": "a"}] * 3}, "peers"),
        ({"peers": [{"node": 0, "private_ip": "a", "key": "-----BEGIN"}]}, "key"),
        ({"accelerator": "A100"}, "accelerator"),
        ({"accelerator": {"type": "A100", "is_trainium": 1}}, "is_trainium"),
        ({"accelerator": {"type": "A100", "memory_gb": float("nan")}}, "memory_gb"),
        ({"accelerator": {"type": "A100", "memory_gb": 10**400}}, "memory_gb"),
        ({"network": {"interface": "eth0 && x"}}, "interface"),
        ({"network": {"bandwidth_gbps": float("inf")}}, "bandwidth_gbps"),
        ({"network": {"bandwidth_gbps": "fast"}}, "bandwidth_gbps"),
        ({"ports": {"torch": 0}}, "torch"),
        ({"ports": {"T;x": 1}}, "ports"),
        ({"ports": [1]}, "ports"),
        ({"attempt": -1}, "attempt"),
        ({"task_id": {}}, "task_id"),
        ({"token": "hf_canary"}, "token"),
    ],
)
def test_a_hostile_value_is_refused_by_name(
    changes: dict[str, object], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SEC-14."""
    raw = json.dumps({**json.loads(FULL.to_json()), **changes})
    with pytest.raises(ValueError, match=named) as caught:
        InstanceInfo.from_json(raw)
    assert len(str(caught.value)) < 600
    monkeypatch.setenv("COMPUTE_POOL", raw)
    with pytest.raises(ValueError, match="COMPUTE_POOL"):
        instance_info()


@pytest.mark.parametrize("raw", ["{", "null", "[]", "7", '"text"', "[" * 200_000, "9" * 10_000, "{}", "\x00"])
def test_what_is_not_such_an_object_is_refused(raw: str) -> None:
    """SEC-14."""
    with pytest.raises(ValueError, match="COMPUTE_POOL"):
        InstanceInfo.from_json(raw)


def test_the_current_call_is_part_of_the_info(monkeypatch: pytest.MonkeyPatch) -> None:
    """faults.md, section 0 (identity)."""
    monkeypatch.setenv("COMPUTE_POOL", small().to_json())
    with call_context("call-1", 2, threads=False):
        info = instance_info()
        assert info is not None
        assert (info.task_id, info.attempt) == ("call-1", 2)
    info = instance_info()
    assert info is not None
    assert (info.task_id, info.attempt) == (None, 0)


@pytest.mark.parametrize("threads", [False, True])
def test_calls_nest_and_end_when_the_body_raises(threads: bool) -> None:
    with call_context("outer", 0, threads=threads, broadcast="all"):
        with pytest.raises(ZeroDivisionError), call_context("inner", 1, threads=threads):
            assert current_call() == ("inner", 1)
            assert current_broadcast() is None
            raise ZeroDivisionError
        assert current_call() == ("outer", 0)
        assert current_broadcast() == "all"
    assert current_call() is None


def test_threads_of_a_body_see_the_call_of_their_process() -> None:
    seen: list[object] = []
    with call_context("call-1", 0, threads=False):
        thread = threading.Thread(target=lambda: seen.append(current_call()))
        thread.start()
        thread.join()
    assert seen == [("call-1", 0)]


def test_calls_in_threads_do_not_see_each_other() -> None:
    """T14, for the call itself."""
    both_inside = threading.Barrier(2, timeout=60)
    seen: dict[str, object] = {}

    def body(name: str) -> None:
        with call_context(name, 0, threads=True):
            both_inside.wait()
            seen[name] = current_call()
            both_inside.wait()

    workers = [threading.Thread(target=contextvars.Context().run, args=(body, name)) for name in ("call-a", "call-b")]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert seen == {"call-a": ("call-a", 0), "call-b": ("call-b", 0)}
    assert current_call() is None


def test_what_shares_a_process_with_user_code_loads_no_framework() -> None:
    """S0-03; the modules of a runner are standard library only."""
    script = (
        "import sys, skyward.api.info, skyward.api.sharding, skyward.node.stdio\n"
        "heavy = {'numpy', 'torch', 'jax', 'pandas', 'keras', 'tensorflow', 'transformers', 'datasets',"
        " 'distributed', 'dask', 'rich'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    source = str(Path(info.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": source},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "[]\n"
