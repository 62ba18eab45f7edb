"""A pool on three hosts does what a pool on this computer does."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import skyward as sky
from skyward import events
from tests.ssh.places import CACHE, left, ours, reached, specs
from tests.support.hosts import Network
from tests.support.waiting import until

NUMPY = sky.Image(pip=["numpy"])
SSH_FOR_A_HOST = 5  # processes, when a pool opens and closes whose environment is there


@sky.compute
def add(a: int, b: int) -> int:
    return a + b


@sky.compute
def whereabouts() -> tuple[str, str, str, int]:
    return socket.gethostname(), os.environ["HOME"], os.getcwd(), os.getuid()


@sky.compute
def place() -> sky.InstanceInfo | None:
    return sky.instance_info()


@sky.compute
def total(array: np.ndarray) -> float:
    return float(array.sum())


@sky.compute
def variable(name: str) -> str | None:
    return os.environ.get(name)


def test_as_many_nodes_as_hosts_when_no_number_is_given(pool: sky.ComputePool) -> None:
    assert pool.nodes == 3
    assert pool.current_nodes() == 3


def test_each_node_is_a_host_of_its_own(pool: sky.ComputePool, net: Network) -> None:
    found = whereabouts() @ pool
    assert [name for name, _, _, _ in found] == [host.name for host in net]
    assert {home for _, home, _, _ in found} == {"/home/sky"}
    assert all(cwd.startswith(f"{CACHE}/pools/") for _, _, cwd, _ in found)


def test_nodes_know_the_addresses_by_which_they_reach_each_other(pool: sky.ComputePool, net: Network) -> None:
    infos = place() @ pool
    for info in infos:
        assert info is not None
        assert info.head_addr == net[0].address
        assert [peer.private_ip for peer in info.peers] == [host.address for host in net]
        assert info.network.interface == "eth0"
        assert info.network.blocked is None


def test_a_large_argument_crosses_the_clients_link_once(net: Network, pool: sky.ComputePool) -> None:
    """50 MB to three hosts: the client sends it to one of them, and they pass it on."""
    array = np.random.default_rng(2).random(50_000_000 // 8)
    before = net.client_bytes()
    assert total(array) @ pool == [float(array.sum())] * 3
    first = net.client_bytes().sent - before.sent
    assert array.nbytes < first < 1.2 * array.nbytes
    assert total(array) @ pool == [float(array.sum())] * 3
    again = net.client_bytes().sent - before.sent - first
    assert again < 1_000_000


def test_an_object_that_is_put_crosses_the_clients_link_once(net: Network, pool: sky.ComputePool) -> None:
    """Of any kind: a table of texts has no buffers that would travel beside a pickle."""
    table = {f"key {n}": f"value {n}" * 10 for n in range(100_000)}

    @sky.compute
    def size(rows: dict[str, str], wanted: str) -> tuple[int, str]:
        return len(rows), rows[wanted]

    before = net.client_bytes()
    ref = pool.put(table)
    for n in range(3):
        assert size(ref, f"key {n}") @ pool == [(100_000, table[f"key {n}"])] * 3
    found = sky.gather(*(size(ref, f"key {n}") for n in range(30))) >> pool
    assert [text for _, text in found] == [table[f"key {n}"] for n in range(30)]
    assert ref.size < net.client_bytes().sent - before.sent < 1.5 * ref.size


def test_the_pool_is_a_dask_cluster(pool: sky.ComputePool) -> None:
    with pool.dask() as client:
        assert client.submit(lambda: socket.gethostname()).result() in {"h0", "h1", "h2"}
        assert len(client.scheduler_info()["workers"]) == 3


def test_variables_and_includes_reach_every_host(net: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text("ANSWER = 42\n")
    (tmp_path / "data.txt").write_text("some data\n")
    monkeypatch.chdir(tmp_path)

    @sky.compute
    def look() -> tuple[int, str | None]:
        import mine

        return mine.ANSWER, os.environ.get("SKY_WORD")

    image = sky.Image(includes=["mine", "data.txt"], env={"SKY_WORD": "it's $(here) \n"})
    with sky.ComputePool(provider=reached(net, 2), image=image, console=False) as pool:
        assert look() @ pool == [(42, "it's $(here) \n")] * 2


def test_two_hosts_with_two_ranks_each(net: Network) -> None:
    """Ranks in order, a large argument once over the client's link, a dead rank named, a lost agent's ranks again."""

    @sky.compute(retries=1)
    def summed(array: np.ndarray) -> tuple[int, str, float]:
        info = sky.instance_info()
        return info.rank, socket.gethostname(), float(array.sum())

    @sky.compute
    def die() -> None:
        if sky.instance_info().rank == 1:
            os._exit(7)
        time.sleep(60)

    provider = reached(net, 2)
    with sky.ComputePool(provider=provider, image=NUMPY, processes_per_node=2, console=False) as pool:
        array = np.random.default_rng(3).random(10_000_000 // 8)
        before, total = net.client_bytes(), float(array.sum())
        ranks = [(0, "h0", total), (1, "h0", total), (2, "h1", total), (3, "h1", total)]
        assert summed(array) @ pool == ranks
        assert array.nbytes < net.client_bytes().sent - before.sent < 1.3 * array.nbytes
        with pytest.raises(sky.errors.TaskCrashed, match=r"rank 1 \(node 0\)"):
            die() @ pool
        agent = pool._engine.greetings()[1]["pid"]  # pyright: ignore[reportPrivateUsage]
        net[1].run(["kill", "-KILL", str(agent)])
        assert summed(array) @ pool == ranks
        assert sorted(pool.map(lambda _: sky.instance_info().world_size, range(8))) == [4] * 8


def test_a_pool_that_opens_again_logs_in_once_and_does_nothing_for_a_package(
    net: Network, pool: sky.ComputePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The environment of `pool` is there. For each host: is a connection open, open it, look, keeper, close it."""
    started: list[list[str]] = []
    begin = subprocess.Popen.__init__

    def counting(self: Any, args: Any, *more: Any, **options: Any) -> None:
        started.append([str(arg) for arg in args])
        begin(self, args, *more, **options)

    monkeypatch.setattr(subprocess.Popen, "__init__", counting)
    again = sky.ComputePool(provider=pool.provider, image=pool.image, console=False)
    with again:
        assert add(1, 2) >> again == 3
    programs = Counter(os.path.basename(args[0]) for args in started)
    assert programs["ssh"] <= SSH_FOR_A_HOST * len(list(net)), started
    assert programs.keys() <= {"ssh", os.path.basename(sys.executable)}, "the other is the watchdog"


def test_nothing_is_left_on_the_hosts_when_a_pool_is_closed(net: Network) -> None:
    processes, files = [ours(host) for host in net], [left(host) for host in net]
    with sky.ComputePool(provider=reached(net, 2), console=False) as pool:
        assert add(1, 1) @ pool == [2, 2]
        assert all(len(ours(net[i])) > len(processes[i]) for i in range(2))
        assert all(len(left(net[i])) > len(files[i]) for i in range(2))
    assert [ours(host) for host in net] == processes
    assert [left(host) for host in net] == files


def test_two_pools_on_the_same_hosts_do_not_disturb_each_other(net: Network) -> None:
    """Row 39."""
    with sky.ComputePool(provider=reached(net, 2), console=False) as one:
        with sky.ComputePool(provider=reached(net, 2), console=False) as two:
            both = [add(i, j) > (one, two)[j] for i in range(20) for j in range(2)]
            assert [f.result(60) for f in both] == [i + j for i in range(20) for j in range(2)]
        assert add(1, 2) @ one == [3, 3]


def test_hosts_can_be_named_by_the_users_own_ssh_settings(
    net: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Aliases, users, keys and known hosts of ~/.ssh/config count."""
    # the ssh program looks into the home of the password file, whatever HOME says: this one is told where to look
    wrapper = tmp_path / "ssh"
    wrapper.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {net.config} "$@"\n')
    wrapper.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with sky.ComputePool(provider=sky.SSH(hosts=["h0", "h1"]), console=False) as pool:
        assert [name for name, *_ in whereabouts() @ pool] == ["h0", "h1"]


def test_more_nodes_than_hosts_is_refused_before_anything_is_started(net: Network) -> None:
    with pytest.raises(sky.errors.InvalidArgument, match=r"4.*3|3.*4"):
        with sky.ComputePool(provider=reached(net), nodes=4, console=False):
            pass


def test_a_private_network_between_the_hosts_is_used(cache: Path) -> None:
    with Network(specs(cache, 2), private=True, internet=True) as net:
        with sky.ComputePool(provider=reached(net), image=NUMPY, console=False) as pool:
            infos = place() @ pool
            assert all(info.network.interface == "priv0" for info in infos)
            array = np.random.default_rng(3).random(5_000_000)
            before = [host.bytes().received for host in net]
            assert total(array) @ pool == [float(array.sum())] * 2
            gained = [host.bytes().received - b for host, b in zip(net, before, strict=True)]
            assert sorted(g > array.nbytes for g in gained) == [False, True]


def test_hosts_that_cannot_reach_each_other_take_calls_but_form_no_groups(cache: Path) -> None:
    """network="star" is found by itself; the blocked pair is named."""
    notices: list[str] = []
    with Network(specs(cache, 2), star=True, internet=True) as net:
        pool = sky.ComputePool(provider=reached(net), image=NUMPY, console=False)
        pool.on_event(lambda e: notices.append(e.text) if isinstance(e, events.Notice) else None)
        with pool:
            assert add(1, 2) @ pool == [3, 3]
            assert pool.map(lambda x: x + 1, range(10)) == list(range(1, 11))
            array = np.random.default_rng(4).random(500_000)
            assert total(array) @ pool == [float(array.sum())] * 2
            info = (place() @ pool)[0]
            assert info is not None
            assert "cannot connect to node" in (info.network.blocked or "")
            with pytest.raises(sky.SkywardError, match="dask"):
                pool.dask()
        assert any("node 0" in text and "node 1" in text for text in notices)
        grouping = sky.Plugin("grouping", around_app=_enter)
        with pytest.raises(sky.errors.BootstrapError, match=r"grouping.*cannot connect to node"):
            with sky.ComputePool(provider=reached(net), plugins=[grouping], console=False):
                pass


def _enter(info: sky.InstanceInfo) -> object:
    from contextlib import nullcontext

    return nullcontext()


def test_a_broken_host_is_named_at_once_while_the_others_go_on(cache: Path) -> None:
    """Row 48: one of three does not answer."""
    notices: list[str] = []
    with Network(specs(cache), internet=True) as net:
        net[1].kill()
        pool = sky.ComputePool(provider=reached(net, ssh_timeout=4), console=False)
        pool.on_event(lambda e: notices.append(e.text) if isinstance(e, events.Notice) else None)
        with pytest.raises(sky.errors.HostUnreachable, match=net[1].address.replace(".", r"\.")):
            pool.__enter__()
        assert any(net[1].address in text for text in notices)
        until(lambda: not ours(net[0]))


def test_a_host_that_allows_too_few_open_files_is_refused_in_words(cache: Path) -> None:
    """Row 27."""
    with Network(specs(cache, 1, limits={"nofile": 256}), internet=True) as net:
        with pytest.raises(sky.errors.BootstrapError, match=r"256 open files"):
            with sky.ComputePool(provider=reached(net), console=False):
                pass
