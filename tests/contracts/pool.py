"""The pool contract: what holds on every provider, as tests to inherit.

class TestSsh(PoolContract): ...

A module that inherits it has a fixture `pool`: an open pool of at least two nodes, with numpy in its image. The tests
leave it as they found it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, as_completed
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import skyward as sky
from tests.support.listener import Listener
from tests.support.waiting import until

__all__ = ["LONG", "PoolContract", "add"]

LONG = 120.0
LARGE = 3_000_000  # bytes: travels beside the pickle


@sky.compute
def add(a: Any, b: Any) -> Any:
    return a + b


@sky.compute
def place() -> tuple[int, int, str, int]:
    info = sky.instance_info()
    return info.node, info.total_nodes, info.head_addr, os.getpid()


@sky.compute
def count(upto: int) -> Iterator[int]:
    yield from range(upto)


@sky.compute
def blocks(number: int) -> Iterator[np.ndarray]:
    for i in range(number):
        yield np.full(LARGE // 8 if i % 2 else 3, i)


@sky.compute
def say(text: str) -> None:
    print(text)


@sky.compute
def fail(text: str) -> None:
    raise KeyError(text)


@sky.compute
def die(node: int) -> str:
    if sky.instance_info().node == node:
        os._exit(7)
    time.sleep(LONG)
    return "not stopped"


@sky.compute
def fail_on(node: int) -> str:
    if sky.instance_info().node == node:
        raise ValueError(f"node {node} fails")
    time.sleep(LONG)
    return "not stopped"


@sky.compute
def nap(seconds: float) -> None:
    sky.counter("napping").add()
    time.sleep(seconds)


@sky.compute
def made(number: int) -> np.ndarray:
    return np.full(LARGE // 8, float(number))


@sky.compute
def total(*arrays: np.ndarray) -> float:
    return float(sum(array.sum() for array in arrays))


@sky.compute
def meet(name: str, rounds: int) -> list[int]:
    tokens: list[int] = []
    for _ in range(rounds):
        sky.counter(f"{name}.count").add()
        with sky.lock(f"{name}.lock", timeout=LONG) as token:
            tokens.append(token)
    sky.dict(f"{name}.dict")[sky.instance_info().rank] = bytes(100_000)
    sky.barrier(f"{name}.barrier").wait(LONG)
    return tokens


@sky.compute
def write(name: str) -> str:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"node {sky.instance_info().node}")
    return os.getcwd()


@sky.compute
def read(name: str) -> str:
    return Path(name).read_text()


class PoolContract:
    """What users may rely on, wherever their nodes come from."""

    @pytest.fixture
    def heard(self, pool: sky.ComputePool) -> Iterator[Listener]:
        listener = Listener(pool)
        yield listener
        listener.stop()

    def test_each_operator_gives_what_it_promises(self, pool: sky.ComputePool) -> None:
        nodes = pool.current_nodes()
        assert add(1, 2) >> pool == 3
        assert add(1, 2) @ pool == [3] * nodes
        assert (add(1, 2) > pool).result(LONG) == 3
        assert (add(1, 2) & add(3, 4)) >> pool == (3, 7)
        assert pool.map(lambda x: x * x, range(50)) == [x * x for x in range(50)]
        assert list(count(5) >> pool) == [0, 1, 2, 3, 4]
        assert list(pool.executor.map(abs, [-1, 2])) == [1, 2]

    def test_nodes_are_numbered_in_order_and_agree_on_the_head(self, pool: sky.ComputePool) -> None:
        nodes = pool.current_nodes()
        found = place() @ pool
        assert [node for node, _, _, _ in found] == list(range(nodes))
        assert {total for _, total, _, _ in found} == {nodes}
        assert len({head for _, _, head, _ in found}) == 1

    def test_many_small_calls_run_on_all_nodes(self, pool: sky.ComputePool) -> None:
        futures = [add(i, 1) > pool for i in range(200)]
        assert [future.result(LONG) for future in futures] == list(range(1, 201))
        held = [nap(1.0) > pool for _ in range(2 * pool.current_nodes())]
        began = sky.gather(*(place() for _ in range(8))) >> pool
        assert {node for node, _, _, _ in began} <= set(range(pool.current_nodes()))
        for future in as_completed(held, LONG):
            future.result()

    def test_output_comes_home_line_by_line_with_its_node(self, pool: sky.ComputePool, heard: Listener) -> None:
        say("hello\nthere") @ pool
        expected = [(node, text) for node in range(pool.current_nodes()) for text in ("hello", "there")]
        until(lambda: len(heard.output) >= len(expected))
        assert sorted((event.node, event.text) for event in heard.output) == sorted(expected)

    def test_an_exception_keeps_its_type_and_names_the_node(self, pool: sky.ComputePool) -> None:
        with pytest.raises(KeyError, match="gone") as caught:
            fail("gone") >> pool
        assert any("node" in note for note in caught.value.__notes__)
        found = sky.gather(add(1, 1), fail("two"), add(2, 2), return_exceptions=True) >> pool
        assert (found[0], found[2]) == (2, 4)
        assert isinstance(found[1], KeyError)

    def test_a_broadcast_fails_as_one_and_the_next_one_works(self, pool: sky.ComputePool) -> None:
        with pytest.raises(ValueError, match="node 1 fails"):
            fail_on(1) @ pool
        assert add(1, 1) @ pool == [2] * pool.current_nodes()

    def test_a_crash_is_told_as_one_and_the_next_broadcast_works(self, pool: sky.ComputePool) -> None:
        with pytest.raises(sky.errors.TaskCrashed, match=r"node 1") as caught:
            die(1) @ pool
        assert "7" in str(caught.value)
        assert add(1, 1) @ pool == [2] * pool.current_nodes()

    def test_a_call_ends_at_its_time_limit(self, pool: sky.ComputePool) -> None:
        with pytest.raises(sky.errors.TaskTimeout):
            nap(LONG).with_timeout(0.5) >> pool
        assert add(1, 1) >> pool == 2

    def test_cancelling_stops_the_body(self, pool: sky.ComputePool) -> None:
        before = pool.counter("napping").value
        future = nap(LONG) > pool
        until(lambda: pool.counter("napping").value > before)
        assert future.cancel()
        with pytest.raises(CancelledError):
            future.result(LONG)
        until(lambda: not [stack for stack in pool.stacks() if stack.call is not None])
        assert add(1, 1) @ pool == [2] * pool.current_nodes()

    def test_large_arguments_and_results_arrive_unchanged(self, pool: sky.ComputePool) -> None:
        array = np.random.default_rng(1).random(LARGE // 8)
        for result in add(array, array) @ pool:
            assert np.array_equal(result, array * 2)
        assert add(b"x" * LARGE, b"y") >> pool == b"x" * LARGE + b"y"

    def test_a_stream_of_large_items_keeps_its_order(self, pool: sky.ComputePool) -> None:
        assert [int(block[0]) for block in blocks(8) >> pool] == list(range(8))

    def test_what_is_put_and_what_is_kept_can_be_used_on_every_node(self, pool: sky.ComputePool) -> None:
        table = pool.put(np.ones(LARGE // 8))
        assert total(table) @ pool == [LARGE / 8] * pool.current_nodes()
        refs = sky.gather(made(1).keep(), made(2).keep()) >> pool
        assert total(*refs) @ pool == [3 * LARGE / 8] * pool.current_nodes()
        assert float(refs[1].get()[0]) == 2.0

    def test_nodes_and_client_share_collections(self, pool: sky.ComputePool) -> None:
        nodes, name = pool.current_nodes(), f"meet-{os.getpid()}"
        tokens = meet(name, 10) @ pool
        assert sorted(token for each in tokens for token in each) == list(range(1, 10 * nodes + 1))
        assert pool.counter(f"{name}.count").value == 10 * nodes
        found = {rank: len(data) for rank, data in pool.dict(f"{name}.dict").items()}
        assert found == dict.fromkeys(range(nodes), 100_000)
        with pytest.raises(sky.errors.SharedTimeout):
            pool.queue(f"{name}.queue").get(0.1)

    def test_files_go_there_and_come_back(self, pool: sky.ComputePool, tmp_path: Path) -> None:
        (tmp_path / "data").mkdir()
        (tmp_path / "data" / "words.txt").write_text("some words")
        pool.push(tmp_path / "data", "contract-data")
        assert read("contract-data/words.txt") @ pool == ["some words"] * pool.current_nodes()
        write("contract-out/which.txt") @ pool
        pool.pull("contract-out", tmp_path / "back")
        found = sorted(path.read_text() for path in (tmp_path / "back").rglob("which.txt"))
        assert found, "what a node has written is here"
        assert set(found) <= {f"node {node}" for node in range(pool.current_nodes())}

    def test_stacks_show_where_a_body_is(self, pool: sky.ComputePool) -> None:
        future = nap(LONG) > pool
        until(lambda: any("nap" in [f.function for f in stack.frames] for stack in pool.stacks()), LONG)
        future.cancel()
