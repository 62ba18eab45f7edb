"""What nodes are told about the GPUs of their machines, from what their agents have found there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from skyward.api.provider import Machine
from skyward.api.spec import Spec, Worker
from skyward.errors import BootstrapError
from skyward.providers.ssh import SSH
from skyward.setup.hosts import Host
from skyward.setup.network import Address
from skyward.setup.node_settings import agent_settings, counted_ranks, instance_info, pool_gpus, shared_gpus
from tests.support.contexts import pool_context

MODEST = {
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "TF_FORCE_GPU_ALLOW_GROWTH": "true",
    "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.45",
}


@pytest.fixture(autouse=True)
def no_gpus_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", *MODEST):
        monkeypatch.delenv(name, raising=False)


def about(*gpus: str) -> dict[str, Any]:
    return {"gpu_names": list(gpus), "gpu_variable": "CUDA_VISIBLE_DEVICES", "cpus": 4}


def host(*nodes: int, **env: str) -> Host:
    keeper: Any = SimpleNamespace(scratch="/scratch", sockets={})
    return Host(keeper, nodes, env, (), "/")


def counted(abouts: list[dict[str, Any]], *hosts: Host, processes: Any, **context: Any) -> tuple[int, ...]:
    """How many processes each node runs."""
    count = len(abouts)
    pool = pool_context(nodes=count, spec=Spec(nodes=count, processes_per_node=processes), **context)
    by_node = {node: each for each in hosts for node in each.nodes}
    return counted_ranks(pool, by_node, abouts, [f"m{i}" for i in range(count)]).counts


def told(abouts: list[dict[str, Any]], *hosts: Host, **context: Any) -> list[tuple[dict[str, str], Any]]:
    """The variables about GPUs and the info of every node."""
    count = len(abouts)
    pool = pool_context(nodes=count, spec=Spec(nodes=count), **context)
    by_node = {node: each for each in hosts for node in each.nodes}
    ranks = counted_ranks(pool, by_node, abouts, [f"m{i}" for i in range(count)])
    gpus = pool_gpus(pool, by_node, abouts, ranks)
    found: list[tuple[dict[str, str], Any]] = []
    for node in range(count):
        machines = [Machine(f"m{i}") for i in range(count)]
        addresses = [Address("127.0.0.1", "lo", "255.0.0.0")] * count
        info = instance_info(pool, node, machines, addresses, None, gpus, [1, 2, 3], ranks)
        settings = agent_settings(pool, node, by_node[node], info, abouts[node], gpus)
        env = {**settings["env"], **settings["places"][0]}
        found.append(({name: env[name] for name in ("CUDA_VISIBLE_DEVICES", *MODEST) if name in env}, info))
    return found


def test_a_node_that_has_a_machine_to_itself_finds_its_environment_as_it_was() -> None:
    [(env, info)] = told([about("0", "1")], host(0))
    assert env == {}
    assert (info.accelerators, info.total_accelerators, info.node_gpus) == (2, 2, ("0", "1"))
    assert info.gpu_conflict is None


def test_nodes_of_this_computer_divide_its_gpus() -> None:
    found = told([about("0", "1", "2", "3")] * 2, host(0, 1))
    assert [env for env, _ in found] == [{"CUDA_VISIBLE_DEVICES": "0,1"}, {"CUDA_VISIBLE_DEVICES": "2,3"}]
    assert [(info.accelerators, info.total_accelerators) for _, info in found] == [(2, 4), (2, 4)]


def test_what_the_user_shows_is_all_that_there_is_to_divide() -> None:
    found = told([about("GPU-aa", "GPU-cc")] * 2, host(0, 1, CUDA_VISIBLE_DEVICES="GPU-aa,GPU-cc"))
    assert [env for env, _ in found] == [{"CUDA_VISIBLE_DEVICES": "GPU-aa"}, {"CUDA_VISIBLE_DEVICES": "GPU-cc"}]


def test_nodes_that_share_a_gpu_are_told_so_and_leave_each_other_memory() -> None:
    found = told([about("0")] * 2, host(0, 1))
    assert [env for env, _ in found] == [{"CUDA_VISIBLE_DEVICES": "0", **MODEST}] * 2
    assert [info.gpu_conflict for _, info in found] == ["2 ranks share 1 GPU on this computer"] * 2
    assert [(info.accelerators, info.total_accelerators) for _, info in found] == [(1, 1), (1, 1)]


def test_slots_that_are_processes_share_a_gpu_too_and_threads_do_not() -> None:
    [(env, _)] = told([about("0")], host(0), worker=Worker(2, executor="process"))
    assert env == {"CUDA_VISIBLE_DEVICES": "0", **MODEST}
    [(env, _)] = told([about("0")], host(0), worker=Worker(2, executor="thread"))
    assert env == {}


@pytest.mark.parametrize(
    ("gpus", "nodes", "options", "begins"),
    [
        (["0"], 4, {}, "4 processes share a GPU: JAX uses at most 22.5% of its memory in each of them"),
        (["0"], 1, {"worker": Worker(2, executor="process")}, "2 processes share a GPU"),
        (["0", "1"], 2, {}, ""),
        ([], 4, {}, ""),
    ],
)
def test_processes_that_share_a_gpu_are_told_of(gpus: list[str], nodes: int, options: Any, begins: str) -> None:
    pool = pool_context(nodes=nodes, spec=Spec(nodes=nodes), **options)
    machine, abouts = host(*range(nodes)), [about(*gpus)] * nodes
    by_node = dict.fromkeys(range(nodes), machine)
    ranks = counted_ranks(pool, by_node, abouts, ["m"] * nodes)
    text = shared_gpus(pool, pool_gpus(pool, by_node, abouts, ranks))
    assert text.startswith(begins)
    assert bool(text) == bool(begins)
    assert "set_per_process_memory_fraction" in text or not begins


def test_without_gpus_nothing_is_said() -> None:
    found = told([about()] * 3, host(0, 1, 2))
    assert [env for env, _ in found] == [{}] * 3
    assert [(info.accelerators, info.gpu_conflict) for _, info in found] == [(0, None)] * 3


def test_machines_of_their_own_do_not_share_and_one_without_a_gpu_is_named() -> None:
    provider = SSH(["a", "b"])
    found = told([about("0"), about("0")], host(0), host(1), provider=provider)
    assert [(env, info.gpu_conflict) for env, info in found] == [({}, None)] * 2
    assert found[0][1].total_accelerators == 2
    found = told([about("0"), about()], host(0), host(1), provider=provider)
    assert [info.gpu_conflict for _, info in found] == ["node 1 has no GPU"] * 2


def test_an_image_that_shows_some_gpus_of_a_host_counts() -> None:
    [(env, info)] = told([about("0", "1", "2")], host(0, CUDA_VISIBLE_DEVICES="2"), provider=SSH(["a"]))
    assert env == {"CUDA_VISIBLE_DEVICES": "2"}
    assert info.accelerators == 1


REMOTE = {"provider": SSH(["m0", "m1"])}


def test_a_node_runs_as_many_processes_as_were_asked_for() -> None:
    assert counted([about(), about("0")], host(0), host(1), processes=3, **REMOTE) == (3, 3)


def test_with_gpu_a_node_runs_one_process_for_each_of_its_gpus() -> None:
    assert counted([about("0", "1"), about("0", "1", "2", "3")], host(0), host(1), processes="gpu", **REMOTE) == (2, 4)


def test_with_gpu_the_nodes_of_this_computer_divide_its_gpus() -> None:
    assert counted([about("0", "1", "2")] * 2, host(0, 1), processes="gpu") == (1, 2)


def test_with_gpu_the_slices_of_a_gpu_have_a_process_each() -> None:
    assert counted([about("MIG-a", "MIG-b", "MIG-c")], host(0), processes="gpu") == (3,)


def test_with_gpu_a_node_without_one_is_refused_by_name() -> None:
    with pytest.raises(BootstrapError, match=r"on node 1 .*m1 shows none.*processes_per_node=2"):
        counted([about("0"), about()], host(0), host(1), processes="gpu", **REMOTE)
