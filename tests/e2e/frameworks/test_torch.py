"""PyTorch on real nodes: groups of processes over gloo, made by the plugin and by the decorator."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward.errors import PluginError, TaskCrashed, TaskTimeout
from tests.support.listener import Listener
from tests.support.programs import load_program
from tests.support.waiting import until

SCRIPTS = Path(__file__).parent / "ddp_scripts"
VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK")
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


@pytest.fixture(scope="module")
def torch_pool() -> Iterator[sky.ComputePool]:
    with sky.ComputePool(nodes=2, plugins=[sky.plugins.torch()], console=False) as opened:
        yield opened


@pytest.fixture(autouse=True)
def nothing_is_left() -> None:
    """The module's pools outlive a single test."""


def described() -> dict[str, Any]:
    """What a body finds when it starts."""
    import torch
    import torch.distributed as dist

    info = sky.instance_info()
    assert info is not None
    return {
        "node": info.node,
        "head": (info.head_addr, str(info.head_port)),
        "ports": dict(info.ports),
        "variables": {name: os.environ.get(name) for name in (*VARIABLES, *INTERFACES)},
        "group": (dist.get_rank(), dist.get_world_size(), dist.get_backend()) if dist.is_initialized() else None,
        "identity": id(dist.group.WORLD),
        "threads": torch.get_num_threads(),
        "pid": os.getpid(),
        "others": [m for m in ("jax", "keras", "tensorflow", "transformers") if m in sys.modules],
    }


plain = sky.compute(described)
integrated = sky.compute(sky.integrations.torch(described))


def total() -> float:
    """The sum of rank + 1 over the group."""
    import torch
    import torch.distributed as dist

    value = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(value, op=dist.ReduceOp.SUM)
    return value.item()


summed = sky.compute(total)
integrated_sum = sky.compute(sky.integrations.torch(total))


def check(found: list[dict[str, Any]]) -> None:
    """The seven variables and the group, on every node."""
    addr, port = found[0]["head"]
    assert port == str(found[0]["ports"]["torch"])
    for node, each in enumerate(found):
        size = str(len(found))
        wanted = dict(zip(VARIABLES, (addr, port, size, str(node), "0", "1", str(node)), strict=True))
        assert each["variables"] == wanted | dict.fromkeys(INTERFACES, "lo")
        assert each["group"] == (node, len(found), "gloo")


def test_an_undecorated_function_finds_the_group_and_its_variables(torch_pool: sky.ComputePool) -> None:
    """S1-05, S1-06, S1-09, S1-12, S1-13, S1-14, S1-15, S4-02, S4-14, S4-16, S4-17, S4-18, S4-21, S0-06, S0-20, X6."""
    found = plain() @ torch_pool
    check(found)
    assert [each["others"] for each in found] == [[], []]


def test_a_later_task_finds_the_same_group(torch_pool: sky.ComputePool) -> None:
    """S4-12, S4-19, S4-22."""
    first, second = plain() @ torch_pool, plain() @ torch_pool
    assert [(a["pid"], a["identity"]) for a in first] == [(b["pid"], b["identity"]) for b in second]


def test_a_single_call_on_a_torch_pool_does_not_wait_for_the_others(torch_pool: sky.ComputePool) -> None:
    began = time.monotonic()
    assert (plain() >> torch_pool)["group"][1:] == (2, "gloo")
    assert time.monotonic() - began < 45


def test_runners_on_one_computer_share_its_cores(torch_pool: sky.ComputePool) -> None:
    each = max(1, (os.cpu_count() or 1) // 2)
    assert [found["threads"] for found in plain() @ torch_pool] == [each, each]


def test_all_reduce_adds_up_over_the_nodes(torch_pool: sky.ComputePool) -> None:
    """S2-08."""
    assert summed() @ torch_pool == [3.0, 3.0]


@sky.compute
def ddp_steps(steps: int) -> tuple[list[float], list[float]]:
    """Parameters before DDP and after some steps on data of this node alone."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(dist.get_rank())
    model = torch.nn.Linear(4, 1)
    before = model.weight.detach().flatten().tolist()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        wrapped(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    return before, model.weight.detach().flatten().tolist()


def test_ddp_keeps_parameters_equal_on_different_data(torch_pool: sky.ComputePool) -> None:
    """S0-21, S2-05."""
    (before_0, after_0), (before_1, after_1) = ddp_steps(3) @ torch_pool
    assert before_0 != before_1
    assert after_0 == after_1


@sky.compute
def sampled(size: int, drop_last: bool) -> list[list[int]]:
    """The indices that this node gets in two epochs."""
    from torch.utils.data import DataLoader, DistributedSampler

    sampler = DistributedSampler(range(size), drop_last=drop_last)
    loader = DataLoader(range(size), batch_size=4, sampler=sampler)
    epochs = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        epochs.append([index for batch in loader for index in batch.tolist()])
    return epochs


def test_a_distributed_sampler_splits_the_data_anew_every_epoch(torch_pool: sky.ComputePool) -> None:
    """S1-34, S2-06, S2-07; with an uneven size, with and without drop_last."""
    (a0, a1), (b0, b1) = sampled(40, False) @ torch_pool
    assert sorted(a0 + b0) == sorted(a1 + b1) == list(range(40))
    assert a0 != a1
    assert [len(part) for epochs in sampled(41, False) @ torch_pool for part in epochs] == [21] * 4
    assert [len(part) for epochs in sampled(41, True) @ torch_pool for part in epochs] == [20] * 4


@sky.compute
@sky.stdout(only="head")
@sky.integrations.torch
def train_as_documented(epochs: int) -> dict[str, Any]:
    """The loop of the plugin's page, on the CPU."""
    import torch
    import torch.distributed as dist
    import torch.nn as nn
    from torch.nn.parallel import DistributedDataParallel as DDP
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = DDP(nn.Linear(784, 10))
    dataset = TensorDataset(torch.randn(200, 784), torch.randint(0, 10, (200,)))
    sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank)
    loader = DataLoader(dataset, batch_size=64, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for batch_x, batch_y in loader:
            loss = nn.CrossEntropyLoss()(model(batch_x), batch_y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"Epoch {epoch}: loss={loss.item():.4f}")
    return {"final_loss": loss.item(), "rank": rank}


@pytest.mark.parametrize("form", ["plugin", "decorator"])
def test_the_documented_loop_runs_and_prints_once(form: str, pools: dict[str, sky.ComputePool]) -> None:
    """S4-23, S4-24, S0-13, S0-14: by decorator, and by plugin and decorator together."""
    listener = Listener(pools[form])
    results = train_as_documented(2) @ pools[form]
    listener.stop()
    assert [result["rank"] for result in results] == [0, 1]
    assert [text[:7] for text in listener.lines() if text.startswith("Epoch")] == ["Epoch 0", "Epoch 1"]


def test_plugin_and_decorator_together_form_one_group(torch_pool: sky.ComputePool) -> None:
    """X1: the group is the plugin's, and is still there afterwards."""
    by_plugin, by_both, after = plain() @ torch_pool, integrated() @ torch_pool, plain() @ torch_pool
    check(by_both)
    assert [a["identity"] for a in by_plugin] == [b["identity"] for b in by_both] == [c["identity"] for c in after]


def test_the_decorator_forms_a_group_for_the_call(pool: sky.ComputePool) -> None:
    """S0-02, S0-08, S0-15 to S0-20, S2-01, S2-02, X6; nothing of it is left for an undecorated call."""
    check(integrated() @ pool)
    assert integrated_sum() @ pool == [3.0, 3.0]
    for found in plain() @ pool:
        assert found["group"] is None
        assert not any(found["variables"].values())


def test_the_decorator_takes_a_backend_and_a_timeout(pool: sky.ComputePool) -> None:
    """S2-03."""
    assert sky.compute(sky.integrations.torch(backend="gloo", timeout=60)(total))() @ pool == [3.0, 3.0]


def test_generators_and_coroutines_run_inside_the_group(pool: sky.ComputePool) -> None:
    @sky.compute
    @sky.integrations.torch
    def stream(count: int) -> Iterator[float]:
        for _ in range(count):
            yield total()

    @sky.compute
    @sky.integrations.torch
    async def later() -> float:
        return total()

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(list, stream(3) @ pool)) == [[3.0] * 3] * 2  # type: ignore[arg-type]
    assert later() @ pool == [3.0, 3.0]


def test_broadcasts_at_once_do_not_mix_their_groups(pool: sky.ComputePool) -> None:
    """Rows 18; the second comes to node 1 while node 0 is still in the first."""

    @sky.compute
    @sky.integrations.torch
    def lingering(number: int) -> tuple[int, float]:
        value = total()
        if sky.is_head():
            time.sleep(0.1)
        return number, value

    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(lambda number: lingering(number) @ pool, range(4)))
    assert results == [[(number, 3.0)] * 2 for number in range(4)]


@pytest.mark.parametrize("form", ["plugin", "decorator"])
def test_broadcasts_at_once_in_one_process_take_turns(form: str) -> None:
    """Side by side, their collectives would be mixed, in another order on each node."""

    def often(number: int) -> list[float]:
        return [total() + number for _ in range(20)]

    often = sky.compute(often if form == "plugin" else sky.integrations.torch(often))
    plugins = [sky.plugins.torch(timeout=60)] if form == "plugin" else []
    with (
        sky.ComputePool(nodes=2, concurrency=4, plugins=plugins, console=False) as busy,
        ThreadPoolExecutor(4) as threads,
    ):
        results = list(threads.map(lambda number: often(number) @ busy, range(4)))
    assert results == [[[3.0 + number] * 20] * 2 for number in range(4)]


def test_a_group_of_one_is_formed_by_the_decorator_and_none_by_the_plugin() -> None:
    """X2, S4-15, S2-04: the same body runs on one node."""
    with sky.ComputePool(plugins=[sky.plugins.torch()], console=False) as one:
        found = plain() >> one
        assert found["group"] is None
        assert not any(found["variables"].values())
        check([integrated() >> one])
        assert integrated_sum() @ one == [1.0]


def test_a_group_of_one_is_formed_by_the_plugin_where_processes_per_node_is_given() -> None:
    """As under `torchrun --nproc-per-node 1`."""
    with sky.ComputePool(processes_per_node=1, plugins=[sky.plugins.torch()], console=False) as one:
        check([plain() >> one])
        assert summed() @ one == [1.0]


def test_two_pools_hold_groups_at_the_same_time(torch_pool: sky.ComputePool) -> None:
    """T15."""
    with sky.ComputePool(nodes=2, plugins=[sky.plugins.torch(backend="gloo")], console=False) as other:
        ports = {(plain() @ each)[0]["variables"]["MASTER_PORT"] for each in (torch_pool, other)}
        with ThreadPoolExecutor(2) as threads:
            assert list(threads.map(lambda each: summed() @ each, (torch_pool, other))) == [[3.0, 3.0]] * 2
    assert len(ports) == 2
    assert summed() @ torch_pool == [3.0, 3.0]


def test_many_calls_at_once_in_one_process_share_one_group(tmp_path: Path) -> None:
    """S4-22: concurrent first tasks."""

    @sky.compute
    @sky.integrations.torch
    def together(number: int) -> tuple[int, int]:
        import torch.distributed as dist

        (tmp_path / str(number)).touch()
        while len(list(tmp_path.iterdir())) < 4:
            time.sleep(0.01)
        return id(dist.group.WORLD), dist.get_world_size()

    with sky.ComputePool(concurrency=4, console=False) as one:
        found = sky.gather(*[together(number) for number in range(4)]) >> one
    assert len(set(found)) == 1
    assert found[0][1] == 1


def test_variables_that_the_user_set_are_kept() -> None:
    threads = {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"}
    image = sky.Image(env={"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "mine0", **threads})
    with sky.ComputePool(nodes=2, image=image, console=False) as two:
        for found in integrated() @ two:
            assert [found["variables"][name] for name in INTERFACES] == ["lo", "mine0", "lo"]
            assert found["threads"] == 2


def test_no_rank_begins_before_all_ranks_have_formed_the_group() -> None:
    """A body without a collective ends at once. Its rank then closed connections that another one still made."""

    @sky.compute
    def slow_in_rank_1() -> None:
        import torch.distributed as dist

        c10d = dist.distributed_c10d

        def late(*args: Any, really: Any = c10d._store_based_barrier, **kwargs: Any) -> None:
            time.sleep(0.5 * (sky.instance_info().node == 1))
            os.environ["FORMED_AT"] = str(time.monotonic())
            really(*args, **kwargs)

        c10d._store_based_barrier = late

    @sky.compute
    @sky.integrations.torch
    def times() -> tuple[float, float]:
        return time.monotonic(), float(os.environ["FORMED_AT"])

    with sky.ComputePool(nodes=2, console=False) as two:
        slow_in_rank_1() @ two
        found = times() @ two
    assert min(began for began, _ in found) > max(formed for _, formed in found)


def test_the_group_is_destroyed_when_the_pool_closes(tmp_path: Path) -> None:
    """S4-20, T12."""

    @sky.compute
    def watch(path: str) -> None:
        import torch.distributed as dist

        def told(*args: Any, really: Any = dist.destroy_process_group, **kwargs: Any) -> None:
            really(*args, **kwargs)
            rank = os.environ["RANK"]
            Path(path, rank).write_text(str(dist.is_initialized()))

        dist.destroy_process_group = told

    with sky.ComputePool(nodes=2, plugins=[sky.plugins.torch()], console=False) as two:
        watch(str(tmp_path)) @ two
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"0": "False", "1": "False"}


def exit_rank_1() -> None:
    import torch
    import torch.distributed as dist

    if dist.get_rank() == 1:
        os._exit(3)
    dist.all_reduce(torch.ones(1))


def raise_in_rank_1() -> None:
    import torch
    import torch.distributed as dist

    if dist.get_rank() == 1:
        raise KeyError("mine")
    dist.all_reduce(torch.ones(1))


def skip_in_rank_1() -> None:
    import torch
    import torch.distributed as dist

    if dist.get_rank() == 1:
        time.sleep(300)
    dist.all_reduce(torch.ones(1))


FORMS = pytest.mark.parametrize("form", ["plugin", "decorator"])


def sent(form: str, body: Any, pools: dict[str, sky.ComputePool]) -> Any:
    return sky.compute(body if form == "plugin" else sky.integrations.torch(body))() @ pools[form]


@pytest.fixture
def pools(torch_pool: sky.ComputePool, pool: sky.ComputePool) -> dict[str, sky.ComputePool]:
    return {"plugin": torch_pool, "decorator": pool}


@FORMS
def test_a_rank_that_dies_is_named_and_the_next_gang_works(form: str, pools: dict[str, sky.ComputePool]) -> None:
    """Row 16."""
    began = time.monotonic()
    with pytest.raises(TaskCrashed, match="node 1") as caught:
        sent(form, exit_rank_1, pools)
    assert time.monotonic() - began < 45
    assert caught.value.exit_code == 3
    assert any("rank 1 of 2" in note for note in caught.value.__notes__)
    assert sent(form, total, pools) == [3.0, 3.0]


@FORMS
def test_a_rank_that_raises_ends_the_others(form: str, pools: dict[str, sky.ComputePool]) -> None:
    """Row 16: the error is the user's own, from the rank that raised it."""
    began = time.monotonic()
    with pytest.raises(KeyError, match="mine") as caught:
        sent(form, raise_in_rank_1, pools)
    assert time.monotonic() - began < 45
    assert any("rank 1 of 2" in note for note in caught.value.__notes__)
    assert sent(form, total, pools) == [3.0, 3.0]


@FORMS
def test_a_hang_in_a_collective_ends_at_the_calls_time_limit(form: str, pools: dict[str, sky.ComputePool]) -> None:
    """Row 17."""
    body = skip_in_rank_1 if form == "plugin" else sky.integrations.torch(skip_in_rank_1)
    began = time.monotonic()
    with pytest.raises(TaskTimeout):
        sky.compute(timeout=2)(body)() @ pools[form]
    assert time.monotonic() - began < 60
    assert sent(form, total, pools) == [3.0, 3.0]


def test_a_mismatched_collective_ends_at_the_groups_own_time_limit(pool: sky.ComputePool) -> None:
    """Row 17: the limit is in the error."""
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"[Tt]imed out") as caught:
        sky.compute(sky.integrations.torch(timeout=2)(skip_in_rank_1))() @ pool
    assert time.monotonic() - began < 60
    assert any("timeout=2 s" in note for note in caught.value.__notes__)


def once_more_in_rank_0() -> None:
    """What DDP does over parts that differ in length."""
    import torch
    import torch.distributed as dist

    for _ in range(2 - dist.get_rank()):
        dist.all_reduce(torch.ones(1))


def destroyed() -> float:
    """What programs for torchrun end with."""
    import torch.distributed as dist

    value = total()
    dist.destroy_process_group()
    return value


def test_a_group_that_is_broken_is_formed_again_on_all_nodes() -> None:
    """S4-19: by a collective that failed, by a body that raised in one rank, and by one that destroyed it."""
    with sky.ComputePool(nodes=2, plugins=[sky.plugins.torch(timeout=3)], console=False) as healing:
        before = [each["identity"] for each in plain() @ healing]
        with pytest.raises(RuntimeError, match=r"(?i)timed out|connection") as caught:
            sky.compute(once_more_in_rank_0)() @ healing
        assert any("sky.plugins.torch(timeout=...)" in note for note in caught.value.__notes__)
        assert summed() @ healing == [3.0, 3.0]
        assert [each["identity"] for each in plain() @ healing] != before
        for _ in range(2):
            assert sky.compute(destroyed)() @ healing == [3.0, 3.0]
        check(plain() @ healing)
        assert summed() @ healing == [3.0, 3.0]


def test_a_call_without_a_group_says_what_to_add(pool: sky.ComputePool) -> None:
    with pytest.raises(ValueError, match="Default process group") as caught:
        summed() @ pool
    assert any("sky.plugins.torch()" in note for note in caught.value.__notes__)


def test_a_rank_that_never_arrives_is_named(pool: sky.ComputePool, caplog: pytest.LogCaptureFixture) -> None:
    """A decorated call that was sent to one node of two: before the error, a record says for whom it waits."""
    alone = sky.compute(sky.integrations.torch(timeout=1)(total))
    errors = []
    busy = None
    for _ in range(2):  # once on each node: the one that has answered last comes first, if it is free
        with pytest.raises(sky.SkywardError, match="timeout=1 s") as caught:
            alone() >> pool
        errors.append(str(caught.value))
        if busy is None:
            busy = sky.compute(time.sleep)(60) > pool
    assert busy is not None
    assert busy.cancel()
    assert any("node 0 waits for node 1" in text for text in errors)
    assert any("node 1 waits for node 0" in text for text in errors)
    assert all("@ pool" in text for text in errors)
    until(lambda: any(record.name == "skyward" for record in caplog.records))
    record = next(record for record in caplog.records if record.name == "skyward")
    assert record.levelname == "WARNING"
    assert "to form the torch group, at most 1 s" in record.getMessage()
    assert "call() @ pool" in record.getMessage()


def test_a_call_that_waits_for_its_group_can_be_cancelled(pool: sky.ComputePool) -> None:
    began = time.monotonic()
    waiting = integrated_sum() > pool
    time.sleep(0.5)
    waiting.cancel()
    assert integrated_sum() @ pool == [3.0, 3.0]
    assert time.monotonic() - began < 60


@FORMS
def test_nccl_without_cuda_is_refused_in_words(form: str, pool: sky.ComputePool) -> None:
    if form == "decorator":
        with pytest.raises(ValueError, match=r'no CUDA device there\. Write backend="gloo"'):
            sky.compute(sky.integrations.torch(backend="nccl")(total))() @ pool
        return
    with pytest.raises(PluginError, match="plugin 'torch'") as caught:
        with sky.ComputePool(nodes=2, plugins=[sky.plugins.torch(backend="nccl")], console=False):
            pass
    assert 'backend="gloo"' in str(caught.value)


def test_a_node_without_torch_says_what_to_add() -> None:
    """S0-07."""

    @sky.compute
    def hide() -> None:
        sys.modules["torch"] = None  # type: ignore[assignment] - as if it were not installed

    with sky.ComputePool(console=False) as bare:
        hide() >> bare
        with pytest.raises(ModuleNotFoundError, match=r"sky\.plugins\.torch\(\)") as caught:
            integrated() >> bare
    assert 'sky.Image(pip=["torch"])' in str(caught.value)


def test_a_program_written_for_torchrun_runs_unchanged(pool: sky.ComputePool) -> None:
    """It forms its group itself: `init=False`. Twice in the same processes."""
    run = sky.compute(sky.integrations.torch(init=False)(load_program(SCRIPTS / "launched.py").main))
    for _ in range(2):
        (rank_0, steps_0, weights_0), (rank_1, steps_1, weights_1) = run(2, 8) @ pool
        assert (rank_0, rank_1, steps_0, steps_1) == (0, 1, 8, 8)
        assert weights_0.equal(weights_1)


def test_a_program_that_uses_a_group_if_there_is_one_runs_unchanged(
    pool: sky.ComputePool, torch_pool: sky.ComputePool
) -> None:
    """S2-04: the same program here, alone, and on two nodes by decorator and by plugin."""
    program = load_program(SCRIPTS / "guarded.py")
    alone, _ = program.main()
    assert len(alone) == 2
    for results in (
        sky.compute(sky.integrations.torch(program.main))() @ pool,
        sky.compute(program.main)() @ torch_pool,
    ):
        assert results[0] == results[1]


def test_a_model_comes_home_as_it_was(torch_pool: sky.ComputePool) -> None:
    import torch

    @sky.compute
    def doubled(model: torch.nn.Module) -> torch.nn.Module:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2)
        return model

    model = torch.nn.Linear(300, 300)
    home = doubled(model) >> torch_pool
    assert torch.equal(home.weight, 2 * model.weight)
    home.weight.data.add_(1)  # it is ours to change
