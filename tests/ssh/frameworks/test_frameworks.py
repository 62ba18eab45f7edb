"""Frameworks and plugins on hosts do what they do on this computer, and their groups span the hosts."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import skyward as sky
from skyward.errors import PluginError
from tests.ssh.places import CACHE, TORCH, left, reached, specs, torch_plugin
from tests.support.groups import check_jax_and_keras
from tests.support.hosts import Network
from tests.support.programs import load_program

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "guides" / "11_your_own_machines.py"


@pytest.fixture(scope="module")
def pool(net: Network) -> Iterator[sky.ComputePool]:
    """Three hosts with torch and no plugin."""
    with sky.ComputePool(provider=reached(net), image=TORCH, console=False) as opened:
        yield opened


@pytest.fixture(scope="module")
def torch_pool(net: Network) -> Iterator[sky.ComputePool]:
    """Three hosts in one torch group."""
    with sky.ComputePool(provider=reached(net), image=TORCH, plugins=[torch_plugin()], console=False) as opened:
        yield opened


@pytest.fixture
def pools(torch_pool: sky.ComputePool, pool: sky.ComputePool) -> dict[str, sky.ComputePool]:
    return {"plugin": torch_pool, "decorator": pool}


FORMS = pytest.mark.parametrize("form", ["plugin", "decorator"])


def sent(form: str, body: Any, pools: dict[str, sky.ComputePool], *args: Any) -> Any:
    return sky.compute(body if form == "plugin" else sky.integrations.torch(body))(*args) @ pools[form]


def described() -> dict[str, Any]:
    """What a body finds of its group."""
    import torch.distributed as dist

    info: Any = sky.instance_info()
    names = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK", "GLOO_SOCKET_IFNAME")
    return {
        "host": socket.gethostname(),
        "head": info.head_addr,
        "port": str(info.ports["torch"]),
        "variables": [os.environ[name] for name in names],
        "group": (dist.get_rank(), dist.get_world_size(), dist.get_backend()),
    }


def trained(steps: int) -> tuple[list[torch.Tensor], float]:
    """Weights after some steps on this process's share of the data, in a group or alone, and what all_reduce gave."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    inputs, wanted = torch.randn(60, 5, dtype=torch.float64), torch.randn(60, 1, dtype=torch.float64)
    model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
    wrapped, total = model, 1.0
    if dist.is_initialized():
        inputs, wanted = sky.shard(inputs, wanted)
        torch.manual_seed(dist.get_rank())
        wrapped = DistributedDataParallel(model)
        value = torch.tensor(dist.get_rank() + 1.0)
        dist.all_reduce(value)
        total = value.item()
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        (wrapped(inputs) - wanted).square().mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()], total


@FORMS
def test_a_group_spans_the_hosts_and_meets_at_the_head(
    form: str, pools: dict[str, sky.ComputePool], net: Network
) -> None:
    found = sent(form, described, pools)
    for node, each in enumerate(found):
        assert each["host"] == net[node].name
        assert each["head"] == net[0].address
        assert each["variables"] == [net[0].address, each["port"], "3", str(node), "0", "eth0"]
        assert each["group"] == (node, 3, "gloo")


def test_a_group_listens_at_the_addresses_by_which_hosts_reach_each_other(
    torch_pool: sky.ComputePool, net: Network
) -> None:
    """SEC-2: torch's store, too, which by itself would listen at all addresses."""
    assert len(sky.compute(described)() @ torch_pool) == 3
    for host in net:
        assert {listener.address for listener in host.listeners("sky")} == {host.address}


@FORMS
def test_training_over_hosts_gives_the_weights_of_a_run_on_one(form: str, pools: dict[str, sky.ComputePool]) -> None:
    alone, _ = trained(20)
    results = sent(form, trained, pools, 20)
    for weights, total in results:
        assert total == 6.0
        assert all(mine.equal(first) for mine, first in zip(weights, results[0][0], strict=True))
        assert all(torch.allclose(mine, one, atol=1e-12) for mine, one in zip(weights, alone, strict=True))


def test_collectives_use_the_private_network_of_the_hosts(cache: Path) -> None:
    """The group meets at the head's private address, and its data takes that way too."""

    @sky.compute
    @sky.integrations.torch
    def reduce(size: int) -> list[Any]:
        import torch.distributed as dist

        value = torch.ones(size)
        dist.all_reduce(value)
        return [os.environ["MASTER_ADDR"], os.environ["GLOO_SOCKET_IFNAME"], value[-1].item()]

    with Network(specs(cache, 2), private=True, internet=True) as net:
        with sky.ComputePool(provider=reached(net), image=TORCH, console=False) as pool:
            before = [(host.bytes().received, host.bytes(private=True).received) for host in net]
            assert reduce(5_000_000) @ pool == [[net[0].private_address, "priv0", 2.0]] * 2
            for host, (public, private) in zip(net, before, strict=True):
                assert host.bytes(private=True).received - private > 10_000_000
                assert host.bytes().received - public < 5_000_000


def test_a_single_call_on_a_pool_with_a_group_waits_for_nobody(torch_pool: sky.ComputePool) -> None:
    found = sky.compute(described)() >> torch_pool
    assert found["group"][1:] == (3, "gloo")


def test_a_program_written_for_torchrun_runs_over_hosts(pool: sky.ComputePool) -> None:
    """It forms its group itself, in processes that have had another one before."""
    program = load_program(ROOT / "tests" / "e2e" / "frameworks" / "ddp_scripts" / "launched.py")
    for _ in range(2):
        results = sky.compute(sky.integrations.torch(init=False)(program.main))(2, 8) @ pool
        assert [rank for rank, _, _ in results] == [0, 1, 2]
        assert all(weights.equal(results[0][2]) for _, _, weights in results)


def test_broadcasts_at_once_do_not_mix_their_groups(pool: sky.ComputePool) -> None:
    """Row 18: hosts take them up in the same order."""

    @sky.compute
    @sky.integrations.torch
    def added(number: int) -> float:
        import torch.distributed as dist

        value = torch.tensor(float(number))
        dist.all_reduce(value)
        return value.item()

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(lambda number: added(number) @ pool, range(4))) == [[3.0 * n] * 3 for n in range(4)]


def test_generators_run_inside_the_group(pool: sky.ComputePool) -> None:
    @sky.compute
    @sky.integrations.torch
    def stream(count: int) -> Iterator[float]:
        import torch.distributed as dist

        for number in range(count):
            value = torch.tensor(float(number))
            dist.all_reduce(value)
            yield value.item()

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(list, stream(3) @ pool)) == [[0.0, 3.0, 6.0]] * 3  # type: ignore[arg-type]


def test_a_large_model_goes_there_and_comes_home(pool: sky.ComputePool) -> None:
    @sky.compute
    def doubled(model: torch.nn.Module) -> torch.nn.Module:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2)
        return model

    model = torch.nn.Linear(1000, 1000)
    for home in doubled(model) @ pool:
        assert torch.equal(home.weight, 2 * model.weight)
        home.weight.data.add_(1)  # it is ours to change


def test_only_the_head_is_heard_where_the_function_says_so(pool: sky.ComputePool) -> None:
    @sky.compute
    @sky.stdout(only="head")
    @sky.stderr(only=lambda info: info.node == 2)
    def talk() -> None:
        print(f"out of {socket.gethostname()}")
        print(f"err of {socket.gethostname()}", file=sys.stderr)

    heard: list[tuple[int, str, str]] = []
    stop = pool.on_event(
        lambda e: heard.append((e.node, e.stream, e.text)) if isinstance(e, sky.events.Output) else None
    )
    talk() @ pool
    stop()
    assert sorted(heard) == [(0, "stdout", "out of h0"), (2, "stderr", "err of h2")]


def test_every_host_gets_its_own_part_of_the_data(pool: sky.ComputePool) -> None:
    @sky.compute
    def part(numbers: list[int], array: np.ndarray) -> tuple[list[int], np.ndarray]:
        return sky.shard(numbers, array, shuffle=True, seed=7)

    parts = part(list(range(50)), np.arange(50.0)) @ pool
    assert sorted(number for numbers, _ in parts for number in numbers) == list(range(50))
    assert all(list(array) == numbers for numbers, array in parts)
    assert [len(numbers) for numbers, _ in parts] == [17, 17, 16]


def test_the_executor_spreads_over_the_hosts(pool: sky.ComputePool) -> None:
    assert list(pool.executor.map(pow, range(30), [2] * 30)) == [n * n for n in range(30)]
    assert pool.executor.submit(socket.gethostname).result(60) in {"h0", "h1", "h2"}


def slow_host(_: int) -> str:
    import time

    time.sleep(0.1)
    return socket.gethostname()


def test_joblib_and_searches_of_sklearn_run_on_the_hosts(net: Network) -> None:
    """One process a slot, two slots a host; results as from a run on this computer."""
    from joblib import Parallel, delayed
    from sklearn.datasets import make_classification
    from sklearn.model_selection import GridSearchCV
    from sklearn.svm import SVC

    X, y = make_classification(n_samples=200, n_features=8, n_informative=4, random_state=3)
    search = GridSearchCV(SVC(), {"C": [0.1, 1, 10], "kernel": ["linear", "rbf"]}, n_jobs=-1, cv=3)
    here = search.fit(X, y).cv_results_["mean_test_score"]
    with sky.integrations.ScikitLearnPool(provider=reached(net), nodes=3, concurrency=2, console=False) as pool:
        found = Parallel(n_jobs=-1, batch_size=1)(delayed(slow_host)(i) for i in range(18))
        assert set(found) == {"h0", "h1", "h2"}
        assert Parallel(n_jobs=-1)(delayed(pow)(i, 2) for i in range(200)) == [i * i for i in range(200)]
        before = pool._engine.totals()[0]
        there = search.fit(X, y).cv_results_["mean_test_score"]
        assert pool._engine.totals()[0] > before
    assert np.array_equal(here, there)


def test_jax_and_keras_run_one_program_over_the_hosts(net: Network) -> None:
    check_jax_and_keras(reached(net, 2))


@contextmanager
def noted(info: sky.InstanceInfo) -> Iterator[None]:
    """Leaves marks in the host's home."""
    with open(f"/home/sky/marks-{info.node}", "a") as file:
        file.write(f"enter {socket.gethostname()}\n")
    yield
    with open(f"/home/sky/marks-{info.node}", "a") as file:
        file.write(f"leave {socket.gethostname()}\n")


def test_hooks_of_a_plugin_run_on_every_host(net: Network) -> None:
    """Shell lines with the environment's own programs first on the path; contexts entered and left; decorators."""

    def louder(fn: Any) -> Any:
        return lambda *args: f"{fn(*args)}!"

    made = (
        sky.Plugin.create("marking")
        .with_bootstrap(lambda cluster: ["cd", f"python -c 'print({cluster.nodes}, flush=True)' > 'a mark'"])
        .with_around_app(noted)
        .with_decorator(louder)
    )
    with sky.ComputePool(provider=reached(net), plugins=[made], console=False) as pool:
        assert sky.compute(socket.gethostname)() @ pool == ["h0!", "h1!", "h2!"]
    for node, host in enumerate(net):
        assert host.read("/home/sky/a mark").strip() == "3"
        assert host.read(f"/home/sky/marks-{node}").split("\n") == [f"enter {host.name}", f"leave {host.name}", ""]


def test_a_shell_line_that_fails_is_told_with_its_host_and_last_words(net: Network) -> None:
    files = [left(host) for host in net]
    failing = sky.Plugin(
        "failing", bootstrap=lambda cluster: ["test $(hostname) != h1 || { echo no such luck >&2; exit 3; }"]
    )
    with pytest.raises(PluginError, match=r"(?s)failing.*status 3.*no such luck") as caught:
        with sky.ComputePool(provider=reached(net), plugins=[failing], console=False):
            pass
    assert caught.value.node == 1
    assert [left(host) for host in net] == files


@pytest.fixture
def user_settings(net: Network, tmp_path: Path) -> dict[str, str]:
    """An environment whose `ssh` reads settings of its own, in which h0, h1 and h2 are names of hosts."""
    program = tmp_path / "bin" / "ssh"
    program.parent.mkdir()
    net.ssh_config(tmp_path)
    with (tmp_path / ".ssh" / "config").open("a") as config:
        config.write(f"Host *\n  IdentityFile {net.key}\n  UserKnownHostsFile {tmp_path}/.ssh/known_hosts\n")
    program.write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F "{tmp_path}/.ssh/config" "$@"\n')
    program.chmod(0o755)
    return {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}"}


def ran(argv: list[str], env: dict[str, str] | None = None) -> str:
    done = subprocess.run([sys.executable, *argv], env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_example_trains_on_hosts_named_on_the_command_line(net: Network, user_settings: dict[str, str]) -> None:
    hosts = ["h0", "h1", f"sky@{net[2].address}:{net[2].port}"]
    said = ran([str(EXAMPLE), *hosts, "--epochs", "15"], user_settings)
    assert [line.split(":")[0] for line in said.splitlines() if line.startswith("rank")] == [
        f"rank {node} on h{node}" for node in range(3)
    ]


def test_the_example_runs_on_this_computer_when_no_host_is_named() -> None:
    assert "rank 1 on" in ran([str(EXAMPLE)])


def test_the_five_lines_of_the_example_train_a_model(
    net: Network, user_settings: dict[str, str], tmp_path: Path
) -> None:
    """From two hosts to a trained model; the function is one that knows nothing of Skyward."""
    lines = re.findall(r"^    (import skyward.*?)\n\"\"\"", EXAMPLE.read_text(), re.DOTALL | re.MULTILINE)[0]
    assert len(lines.splitlines()) == 5
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "from torch.nn.parallel import DistributedDataParallel\n"
        "def train():\n"
        "    model = torch.nn.Linear(3, 1)\n"
        "    wrapped = DistributedDataParallel(model)\n"
        "    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)\n"
        "    for _ in range(100):\n"
        "        inputs = torch.randn(32, 3)\n"
        "        loss = (wrapped(inputs) - inputs.sum(1, keepdim=True)).square().mean()\n"
        "        optimizer.zero_grad(); loss.backward(); optimizer.step()\n"
        "    return model\n"
    )
    program = "\n".join(line.removeprefix("    ") for line in lines.splitlines())
    program = program.replace('"gpu1"', '"h0"').replace("user@10.0.0.7:2222", f"sky@{net[1].address}:{net[1].port}")
    report = "\nimport json\nprint(json.dumps([*model.weight[0].tolist(), *model.bias.tolist()]))\n"
    (tmp_path / "program.py").write_text(program + report)
    said = ran([str(tmp_path / "program.py")], user_settings)
    assert json.loads(said) == pytest.approx([1, 1, 1, 0], abs=0.01)


def test_environments_are_kept_for_the_next_pool(net: Network, pool: sky.ComputePool) -> None:
    """Everything above installed torch once."""
    found = net[0].run(["sh", "-c", f"ls -d {CACHE}/envs/*/lib/python*/site-packages/torch"], user="sky").stdout
    assert len(found.splitlines()) == 1
