"""GPUs dealt out among the nodes and processes of a machine, as logic."""

from __future__ import annotations

import pytest

from skyward.api.hardware import Card, Gpu, visible
from skyward.node.gpu_shares import (
    GpuMachine,
    deal,
    dealt_out,
    memory_share,
    names,
    own_gpus,
    restricted,
    variable,
    variables,
)

CARDS = [Card(Gpu(index, f"GPU-{letter * 4}", "NVIDIA H200")) for index, letter in enumerate("abcd")]
SLICES = [Gpu(0, f"MIG-{number}", "NVIDIA H200 MIG 1g.18gb", card="GPU-aaaa") for number in range(3)]
AMD = [Card(Gpu(index, "", "MI300X", vendor="amd")) for index in range(2)]


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({}, ["0", "1", "2", "3"]),
        ({"CUDA_VISIBLE_DEVICES": ""}, []),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, []),
        ({"CUDA_VISIBLE_DEVICES": "3, 1"}, ["3", "1"]),
        ({"CUDA_VISIBLE_DEVICES": "0,9,1"}, ["0"]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-cccc"}, ["GPU-a", "GPU-cccc"]),
    ],
)
def test_gpus_are_named_as_the_user_names_them(environ: dict[str, str], found: list[str]) -> None:
    assert names(visible(CARDS, environ), environ) == found


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({}, ["MIG-0", "MIG-1", "MIG-2", "GPU-bbbb"]),
        ({"CUDA_VISIBLE_DEVICES": "0"}, ["MIG-0", "MIG-1", "MIG-2"]),
        ({"CUDA_VISIBLE_DEVICES": "MIG-2,MIG-0"}, ["MIG-2", "MIG-0"]),
        ({"CUDA_VISIBLE_DEVICES": "1"}, ["1"]),
    ],
)
def test_slices_are_named_by_their_uuid(environ: dict[str, str], found: list[str]) -> None:
    cards = [Card(CARDS[0].gpu, True, tuple(SLICES)), CARDS[1]]
    assert names(visible(cards, environ), environ) == found


def test_gpus_of_amd_are_named_for_hip() -> None:
    assert variable(visible(AMD, {})) == "HIP_VISIBLE_DEVICES"
    assert names(visible(AMD, {}), {}) == ["0", "1"]
    environ = {"HIP_VISIBLE_DEVICES": "1"}
    assert names(visible(AMD, environ), environ) == ["1"]
    assert variable(visible(CARDS, {})) == variable([]) == "CUDA_VISIBLE_DEVICES"


def test_a_process_uses_one_slice_at_most() -> None:
    assert own_gpus(["MIG-0", "MIG-1", "MIG-2"], 1) == [("MIG-0",)]
    assert own_gpus(["MIG-0", "MIG-1", "MIG-2"], 2) == [("MIG-0",), ("MIG-1",)]
    found = dealt_out(
        [GpuMachine("node 0", ["MIG-0", "MIG-1", "MIG-2"], {0: 1}), GpuMachine("node 1", ["0", "1"], {1: 1})]
    )
    assert found.counts == {0: 1, 1: 2}
    assert found.total == 3


@pytest.mark.parametrize(
    ("visible", "ids"),
    [
        (None, ["0", "1", "2", "3"]),
        ("", []),
        ("-1", []),
        ("2", ["2"]),
        ("3,1", ["3", "1"]),
        ("1,7,2", ["1"]),
        ("1,1", []),
        ("GPU-aa", ["GPU-aa"]),
        ("MIG-x,MIG-y", ["MIG-x", "MIG-y"]),
    ],
)
def test_a_value_in_the_image_leaves_some_of_a_machines_gpus(visible: str | None, ids: list[str]) -> None:
    assert restricted(["0", "1", "2", "3"], visible) == ids


def test_a_value_in_the_image_makes_no_gpus_where_there_are_none() -> None:
    assert restricted([], "0,1") == []


@pytest.mark.parametrize(
    ("gpus", "takers", "parts"),
    [
        ("01234567", 2, ["0123", "4567"]),
        ("01234567", 8, list("01234567")),
        ("01234567", 3, ["01", "234", "567"]),
        ("01234567", 1, ["01234567"]),
        ("01", 4, ["0", "0", "1", "1"]),
        ("012", 4, ["0", "0", "1", "2"]),
        ("5", 3, ["5", "5", "5"]),
        ("", 2, ["", ""]),
    ],
)
def test_gpus_are_dealt_out_evenly_and_neighbours_stay_together(gpus: str, takers: int, parts: list[str]) -> None:
    assert deal(list(gpus), takers) == [tuple(part) for part in parts]


def test_every_gpu_is_used_and_none_twice_while_there_are_enough() -> None:
    for count in range(1, 17):
        for takers in range(1, 20):
            parts = deal([str(gpu) for gpu in range(count)], takers)
            assert len(parts) == takers
            assert all(parts)
            used = [gpu for part in parts for gpu in part]
            assert set(used) == {str(gpu) for gpu in range(count)}
            assert len(used) == max(count, takers)
            assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_process_sees_its_own_gpus_and_takes_little_memory_where_it_shares_them() -> None:
    assert variables(["2", "3"], 1, {}) == {"CUDA_VISIBLE_DEVICES": "2,3"}
    assert variables(["0"], 4, {"TF_FORCE_GPU_ALLOW_GROWTH": "false"}) == {
        "CUDA_VISIBLE_DEVICES": "0",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.225",
    }


@pytest.mark.parametrize("name", ["XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"])
def test_a_fraction_of_memory_that_the_user_set_counts(name: str) -> None:
    """JAX also refuses to start if it finds both names."""
    assert not [key for key in variables(["0"], 4, {name: "0.5"}) if key.endswith("MEM_FRACTION")]


def test_the_shares_of_all_processes_fit_on_the_gpu() -> None:
    for sharers in range(2, 65):
        assert 0.5 < sharers * memory_share(sharers) <= 0.9


def machine(name: str, gpus: str, **ranks: int) -> GpuMachine:
    return GpuMachine(name, gpus.split(), {int(node.removeprefix("n")): count for node, count in ranks.items()})


def test_nodes_of_one_machine_have_gpus_of_their_own_while_there_are_enough() -> None:
    found = dealt_out([machine("this computer", "0 1 2 3", n0=1, n1=1)])
    assert found.by_node == {0: ("0", "1"), 1: ("2", "3")}
    assert (found.total, found.conflict) == (4, None)


def test_nodes_that_share_a_gpu_count_it_once() -> None:
    found = dealt_out([machine("this computer", "0", n0=1, n1=1)])
    assert found.by_node == {0: ("0",), 1: ("0",)}
    assert found.total == 1
    assert found.sharers == {0: 2, 1: 2}


def test_it_is_known_how_many_ranks_share_a_gpu() -> None:
    assert dealt_out([machine("this computer", "0 1 2", n0=2, n1=2)]).sharers == {0: 2}
    assert dealt_out([machine("this computer", "0 1 2", n0=1, n1=1, n2=1, n3=1)]).sharers == {0: 2, 1: 2}
    assert dealt_out([machine("this computer", "0", n0=1, n1=1, n2=1, n3=1)]).sharers == dict.fromkeys(range(4), 4)
    assert dealt_out([machine("this computer", "", n0=2, n1=2)]).sharers == {}
    assert dealt_out([machine("node 0", "0 1", n0=3), machine("node 1", "0 1", n1=2)]).sharers == {0: 2}


def test_unequal_machines_are_counted_each_by_itself() -> None:
    found = dealt_out([machine("node 0", "0 1 2 3", n0=4), machine("node 1", "0 1", n1=2)])
    assert found.by_node == {0: ("0", "1", "2", "3"), 1: ("0", "1")}
    assert (found.total, found.conflict) == (6, None)


@pytest.mark.parametrize(
    ("machines", "why"),
    [
        ([machine("node 0", "0", n0=1), machine("node 1", "0", n1=1)], None),
        ([machine("node 0", "0 1", n0=2)], None),
        ([machine("node 0", "", n0=1)], None),
        ([machine("this computer", "", n0=1, n1=1)], None),
        ([machine("node 0", "MIG-x", n0=1)], None),
        ([machine("node 0", "MIG-x", n0=1), machine("node 1", "MIG-x", n1=1)], None),
        ([machine("this computer", "0", n0=1, n1=1)], "2 ranks share 1 GPU on this computer"),
        ([machine("this computer", "0 1", n0=2, n1=2)], "4 ranks share 2 GPUs on this computer"),
        ([machine("node 0", "0 1", n0=2), machine("node 1", "0 1", n1=3)], "3 ranks share 2 GPUs on node 1"),
        ([machine("node 0", "0", n0=1), machine("node 1", "", n1=1)], "node 1 has no GPU"),
        (
            [machine("node 0", "0", n0=1), machine("node 1", "", n1=1), machine("node 2", "", n2=2)],
            "nodes 1, 2 have no GPU",
        ),
        ([machine("node 0", "MIG-x MIG-y", n0=2)], "2 ranks use slices (MIG) of GPUs on node 0"),
    ],
)
def test_nccl_needs_a_gpu_for_each_rank(machines: list[GpuMachine], why: str | None) -> None:
    assert dealt_out(machines).conflict == why
