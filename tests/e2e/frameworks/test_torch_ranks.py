"""PyTorch over ranks: several processes on each of several nodes, as torchrun starts them."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward.plugins import _ranks, _torch
from tests.support.programs import load_program
from tests.support.ranks import HOST, rank
from tests.support.training import check_ranks, train_with_accelerate, train_with_trainer

SCRIPTS = Path(__file__).parent / "ddp_scripts"
PLACES = [(0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1)]  # rank, local rank, node


@pytest.fixture(scope="module")
def ranks() -> Iterator[sky.ComputePool]:
    """Two nodes with two ranks each, and a torch group over all four."""
    with sky.ComputePool(nodes=2, processes_per_node=2, plugins=[sky.plugins.torch()], console=False) as opened:
        yield opened


@pytest.fixture(autouse=True)
def nothing_is_left() -> None:
    """The module's pool outlives a single test."""


def described() -> dict[str, str]:
    return dict(os.environ)


def check_variables(found: list[dict[str, str]]) -> None:
    for (number, local, node), env in zip(PLACES, found, strict=True):
        wanted = {
            "RANK": number,
            "WORLD_SIZE": 4,
            "LOCAL_RANK": local,
            "LOCAL_WORLD_SIZE": 2,
            "NODE_RANK": node,
            "GROUP_RANK": node,
            "GROUP_WORLD_SIZE": 2,
            "ROLE_RANK": number,
            "ROLE_WORLD_SIZE": 4,
        }
        assert {name: env.get(name) for name in wanted} == {name: str(value) for name, value in wanted.items()}
    assert len({(env["MASTER_ADDR"], env["MASTER_PORT"]) for env in found}) == 1


def test_the_plugin_sets_the_variables_of_torchrun_for_each_rank(ranks: sky.ComputePool) -> None:
    check_variables(sky.compute(described)() @ ranks)


def test_the_decorator_sets_the_variables_of_torchrun_for_each_rank() -> None:
    with sky.ComputePool(nodes=2, processes_per_node=2, console=False) as pool:
        for init in (True, False):
            check_variables(sky.compute(sky.integrations.torch(init=init)(described))() @ pool)


def trained(how: str, steps: int) -> tuple[int, int, int, list[float]]:
    """A line fitted by all ranks, each on its own part; rank, size, how many weights it held, and all of them."""
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    group = how != "alone"
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
    if how == "fsdp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif how == "ddp":
        model = DistributedDataParallel(model)
    data = torch.arange(64.0).reshape(16, 4) / 64
    part = sky.shard(data) if group else data
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(steps):
        optimizer.zero_grad()
        (model(part) - part).square().mean().backward()
        optimizer.step()
    held = sum((p.to_local() if how == "fsdp" else p).numel() for p in model.parameters())
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True) if group else None
    state = get_model_state_dict(model, options=whole)
    weights = [value for tensor in state.values() for value in tensor.flatten().tolist()]
    return dist.get_rank() if group else 0, dist.get_world_size() if group else 1, held, weights


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_four_ranks_train_as_one_process_would(ranks: sky.ComputePool, how: str) -> None:
    """DDP copies the weights to each rank, FSDP splits them; both average gradients over all four."""
    alone = trained("alone", 5)[3]
    found = sky.compute(trained)(how, 5) @ ranks
    assert [each[:2] for each in found] == [(number, 4) for number in range(4)]
    assert found[0][3] == pytest.approx(alone, abs=1e-5)
    held = [each[2] for each in found]
    assert (max(held) < len(alone) and sum(held) == len(alone)) if how == "fsdp" else set(held) == {len(alone)}


def test_a_program_for_torchrun_runs_unchanged_on_every_rank(ranks: sky.ComputePool) -> None:
    results = sky.compute(load_program(SCRIPTS / "launched.py").main)(2, 8) @ ranks
    assert [result[0] for result in results] == [0, 1, 2, 3]
    assert all(result[2].equal(results[0][2]) for result in results)


@pytest.mark.parametrize("body", [train_with_accelerate, train_with_trainer])
def test_accelerate_and_the_trainer_find_every_rank(ranks: sky.ComputePool, body: Any) -> None:
    check_ranks(sky.compute(body)() @ ranks, local=2)


@pytest.fixture
def stores() -> list[Any]:
    """Two ends of one store of torch."""
    TCPStore = pytest.importorskip("torch.distributed").TCPStore
    with socket.create_server((HOST, 0)) as found:
        port = found.getsockname()[1]
    limit = timedelta(seconds=60)
    first = TCPStore(HOST, port, is_master=True, wait_for_workers=False, timeout=limit)
    return [first, TCPStore(HOST, port, timeout=limit)]


@pytest.mark.parametrize(
    ("finds", "backend", "said"),
    [
        ((True, True), "nccl", ""),
        ((True, False), "gloo", "torch finds no GPU on rank 1 (on node 0): the torch group uses gloo.\n"),
        ((False, False), "gloo", ""),
    ],
)
def test_all_ranks_agree_on_what_torch_finds(
    finds: tuple[bool, bool], backend: str, said: str, stores: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    _ranks._said.clear()

    def voted(number: int) -> str:
        return _torch._voted_backend(rank(number, node_gpus=("0", "1")), stores[number], finds[number])

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(voted, range(2))) == [backend] * 2
    assert capsys.readouterr().err == said
