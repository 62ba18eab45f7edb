"""`pool.push`, `pool.pull` and the working directory on real hosts: what crosses the link, breaks, full disks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward.errors import TransferError
from tests.e2e.test_files import folder, tree
from tests.ssh.places import reached
from tests.support.hosts import Network
from tests.support.waiting import until

__all__ = ["folder"]

PROJECT = {"data/x.csv": "1,2,3\n", "lib/mine.py": "VALUE = 42\n"}


@sky.compute
def uses_includes() -> tuple[str, int, str]:
    import mine  # type: ignore[import-not-found]

    with open("data/x.csv") as file, open("result.txt", "w") as out:
        out.write("done")
        return file.read(), mine.VALUE, os.path.basename(os.getcwd())


@sky.compute
def content(path: str) -> tuple[int, bytes]:
    with open(path, "rb") as file:
        data = file.read()
    return len(data), data[:20] + data[-20:]


@sky.compute
def make(path: str, size: int) -> bytes:
    data = os.urandom(size)
    with open(path, "wb") as file:
        file.write(data)
    return data[:20] + data[-20:]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    before, made = Path.cwd(), tmp_path_factory.mktemp("project")
    for name, text in PROJECT.items():
        (made / name).parent.mkdir(exist_ok=True)
        (made / name).write_text(text)
    os.chdir(made)
    yield made
    os.chdir(before)


@pytest.fixture(scope="module")
def pool(net: Network, project: Path) -> Iterator[sky.ComputePool]:
    image = sky.Image(includes=["data", "lib"])
    with sky.ComputePool(provider=reached(net), image=image, console=False) as opened:
        yield opened


def test_the_same_body_finds_included_files_on_hosts_and_on_this_computer(pool: sky.ComputePool, project: Path) -> None:
    assert uses_includes() @ pool == [("1,2,3\n", 42, "work")] * 3
    with sky.ComputePool(image=sky.Image(includes=["data", "lib"]), console=False) as here:
        assert (uses_includes() >> here) == ("1,2,3\n", 42, project.name)


def test_a_folder_arrives_on_every_host_and_comes_back(pool: sky.ComputePool, folder: Path, tmp_path: Path) -> None:
    assert pool.push(folder, "pushed").files > 10
    assert content("pushed/x.csv") @ pool == [(6, b"1,2,3\n1,2,3\n")] * 3
    done = pool.pull("pushed", tmp_path / "all")
    assert done.unchanged == 0
    for node in range(3):
        assert tree(tmp_path / "all" / f"node-{node}") == tree(folder)
    assert pool.push(folder, "pushed").files == 0
    assert pool.pull("pushed", tmp_path / "all").files == 0
    pool.pull("result.txt", tmp_path / "results")
    assert (tmp_path / "results" / "node-2" / "result.txt").read_text() == "done"


def test_each_byte_leaves_this_computer_once(pool: sky.ComputePool, net: Network, tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(os.urandom(30 << 20))
    before = net.client_bytes().sent
    pool.push(tmp_path / "big", "once")
    first = net.client_bytes().sent - before
    assert 30 << 20 < first < 1.2 * (30 << 20)
    assert len(set(content("once") @ pool)) == 1
    pool.push(tmp_path / "big", "once")
    assert net.client_bytes().sent - before - first < 100_000


@pytest.mark.timeout(300)
def test_a_broken_link_does_not_begin_a_large_file_again(
    pool: sky.ComputePool, net: Network, whole: Network, tmp_path: Path
) -> None:
    size = 60 << 20
    (tmp_path / "big").write_bytes(os.urandom(size))
    net[0].slow(200)
    for act, way in (
        (lambda: pool.push(tmp_path / "big", "cut"), "sent"),
        (lambda: pool.pull("cut", tmp_path / "back", node=0), "received"),
    ):
        moved = _cut_while(net, act, way, size // 4)
        assert size < moved < 1.5 * size
    assert (tmp_path / "back").read_bytes() == (tmp_path / "big").read_bytes()


def _cut_while(net: Network, act: Callable[[], Any], way: str, after: int) -> int:
    """Cuts the client off in the middle of a transfer; how many bytes the client has moved in all."""
    before = getattr(net.client_bytes(), way)
    with ThreadPoolExecutor(1) as threads:
        working = threads.submit(act)
        until(lambda: getattr(net.client_bytes(), way) - before > after, 60)
        net.cut_client()
        time.sleep(12)  # not for luck: a link counts as broken after ten seconds of silence
        assert not working.done()
        net.heal_client()
        working.result(120)
    return getattr(net.client_bytes(), way) - before


def test_a_full_disk_and_a_closed_folder_are_said(pool: sky.ComputePool, net: Network, tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(os.urandom(12 << 20))
    with pytest.raises(TransferError, match=r"'x' on node \d: permission denied.*have this user allowed"):
        pool.push(tmp_path / "big", "/etc/x")
    net[1].run(["mkdir", "-p", "/home/small"], user="root")
    net[1].run(["sh", "-c", "mount -t tmpfs -o size=6m none /home/small && chmod 777 /home/small"], user="root")
    with pytest.raises(TransferError, match=r"'big' on node 1: no space left on device. Make room there"):
        for host in (net[0], net[2]):
            host.run(["sh", "-c", "mkdir -p /home/small && chmod 777 /home/small"], user="root")
        pool.push(tmp_path / "big", "/home/small/big")
    assert net[1].run(["ls", "-A", "/home/small"]).stdout == ""
    net[1].run(["umount", "/home/small"], user="root")


def test_nodes_that_do_not_have_it_are_left_out_and_named(pool: sky.ComputePool, tmp_path: Path) -> None:
    (tmp_path / "x").write_text("x")

    @sky.compute
    def leave() -> None:
        if sky.instance_info().node == 1:
            with open("only here", "w") as file:
                file.write("x")

    leave() @ pool
    done = pool.pull("only here", tmp_path / "some")
    assert (done.files, done.left_out) == (1, ("node 0, which has no only here", "node 2, which has no only here"))
    with pytest.raises(TransferError, match=r"nowhere' on node 0: no such file"):
        pool.pull("nowhere", tmp_path / "none")


def test_a_file_of_one_node_comes_from_that_node(pool: sky.ComputePool, tmp_path: Path) -> None:
    ends = make("made", 5 << 20) @ pool
    for node in range(3):
        pool.pull("made", tmp_path / f"made-{node}", node=node)
        data = (tmp_path / f"made-{node}").read_bytes()
        assert data[:20] + data[-20:] == ends[node]
