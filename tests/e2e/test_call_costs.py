"""What a call costs the client, in counts of function calls: they hold on a busy machine, where times do not."""

from __future__ import annotations

import gc
import json
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import skyward as sky
from tests.support.processes import family
from tests.support.waiting import until

CALLS = 200
ONE_BY_ONE = 175  # functions of Skyward that run here for a call that is waited for; 155 to 160 when this was written
OF_A_VALUE = 40  # more of them for a small array, or a dict of some; up to 25 when this was written
TOGETHER = 95  # and for one of many that are sent at once; 83 to 85
OF_A_RANK = 140  # and for a rank of a broadcast to eight nodes; 110 to 120
OBJECTS = 12  # of those that the garbage collector looks at, for a call that is ready to be sent; 9 to 10
A_CHUNK = 270  # functions of Skyward that run here for a chunk of a map; 160 to 217
ON_ITS_NODE = 80  # functions of any module that run in the main thread of its process there, besides the body; 70
OF_A_VALUE_THERE = 15  # more of them for such a value; up to 6
OF_A_CLASS = 100  # more there for an object whose class only this computer has; 75
CHUNK_THERE = 95  # and for a chunk of a map; 78
IN_ITS_AGENT = 165  # functions of any module that run in the agent between them; 145


class Functions:
    """Counts the functions of Skyward that begin in threads of this process, by name."""

    def __init__(self) -> None:
        self.begun: Counter[str] = Counter()
        self._counting = False

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if self._counting and event == "call" and "/skyward/" in frame.f_code.co_filename:
            self.begun[f"{frame.f_globals.get('__name__')}.{frame.f_code.co_name}"] += 1

    def during(self, act: Callable[[], object]) -> float:
        """How many begin for each of `CALLS` calls that `act` makes."""
        self.begun.clear()
        self._counting = True
        act()
        self._counting = False
        return self.begun.total() / CALLS


@pytest.fixture(scope="module")
def functions() -> Iterator[Functions]:
    """Counts in every thread that is started from now on."""
    found, before = Functions(), sys.getprofile()
    threading.setprofile(found)
    sys.setprofile(found)
    yield found
    sys.setprofile(before)
    threading.setprofile(None)  # type: ignore[arg-type] - as its documentation says


@pytest.fixture(scope="module")
def pool(functions: Functions) -> Iterator[sky.ComputePool]:
    with sky.ComputePool(nodes=1, console=False) as pool:
        yield pool


@sky.compute
def nothing(_: Any = None) -> None:
    pass


def test_a_call_that_is_waited_for_runs_few_functions_here(functions: Functions, pool: sky.ComputePool) -> None:
    def one_by_one() -> None:
        for number in range(CALLS):
            assert nothing(number) >> pool is None

    one_by_one()
    assert functions.during(one_by_one) < ONE_BY_ONE, functions.begun.most_common(200)


@dataclass
class Point:
    x: float
    y: float = 0.0


def value_of(kind: str) -> Any:
    numpy = pytest.importorskip("numpy")
    values: dict[str, Any] = {
        "array": numpy.zeros(128),
        "slice": numpy.zeros((128, 2))[:, 0],
        "number": numpy.float32(3),
        "arrays": {"a": numpy.zeros(10), "b": numpy.zeros(10)},
        "numbers": list(range(1000)),
        "texts": ["name"] * 1000,
        "bytes": b"x" * 1000,
        "settings": {"model": {"layers": [{"size": 3, 1: (2, None)}]}},
        "object": Point(1.0),
    }
    return values[kind]


PLAIN = ["array", "slice", "number", "arrays", "numbers", "texts", "bytes", "settings"]


@pytest.mark.parametrize("kind", PLAIN)
def test_a_small_value_runs_hardly_more_functions_than_a_number(
    functions: Functions, pool: sky.ComputePool, kind: str
) -> None:
    value = value_of(kind)

    def one_by_one() -> None:
        for _ in range(CALLS):
            assert nothing(value) >> pool is None

    one_by_one()
    assert functions.during(one_by_one) < ONE_BY_ONE + OF_A_VALUE, functions.begun.most_common(200)
    assert not functions.begun["skyward.transport.payload._cloudpickle"]


def test_one_of_many_calls_runs_even_fewer(functions: Functions, pool: sky.ComputePool) -> None:
    def together() -> None:
        assert set(sky.gather(*[nothing(number) for number in range(CALLS)]) >> pool) == {None}

    together()
    assert functions.during(together) < TOGETHER, functions.begun.most_common(200)


def test_many_calls_leave_the_garbage_collector_little_to_look_at(functions: Functions, pool: sky.ComputePool) -> None:
    """It looks again and again at all that exists while they are made, and nothing of them waits for it afterwards."""
    gc.collect()
    gc.disable()
    try:
        before = len(gc.get_objects())
        calls = pool._sender.packing.calls([nothing(number) for number in range(CALLS)], 0)
        assert (len(gc.get_objects()) - before) / CALLS < OBJECTS
        del calls
        assert min(_garbage_of_a_gather(pool) for _ in range(3)) < CALLS  # other threads leave some at times
    finally:
        gc.enable()


def _garbage_of_a_gather(pool: sky.ComputePool) -> int:
    gc.collect()
    sky.gather(*[nothing(number) for number in range(CALLS)]) >> pool
    nothing() >> pool  # the thread that settles them keeps none of those before
    return gc.collect()


def test_a_map_runs_a_fixed_number_of_functions_for_a_chunk_and_none_for_an_item(
    functions: Functions, pool: sky.ComputePool
) -> None:
    captured = [1]

    def item(number: int) -> int:
        return number * len(captured)

    for count in (1_000, 100_000):
        assert pool.map(item, range(count)) == list(range(count))
        functions.during(lambda count=count: pool.map(item, range(count)))
        chunks = functions.begun["skyward.client.gather._chunk_call"]
        # histories write of earlier calls meanwhile, in a thread of their own
        begun = sum(times for name, times in functions.begun.items() if not name.startswith("skyward.history."))
        assert begun / chunks < A_CHUNK, functions.begun.most_common(200)
        assert functions.begun["skyward.transport.payload._cloudpickle"] == 1, "the function is packed once"


def test_a_chunk_of_a_map_runs_few_functions_on_its_node(pool: sky.ComputePool) -> None:
    assert pool.map(nothing.local, range(1000)) == [None] * 1000
    assert begin_counting() >> pool is None
    pool.map(len, [()] * CALLS * 1000)
    begun = end_counting() >> pool
    chunks = begun["skyward.node.items.__call__"]
    assert chunks > 10, chunks
    assert begun.total() / chunks < CHUNK_THERE, begun.most_common(100)


def test_a_history_alone_makes_no_event_of_a_call(functions: Functions, pool: sky.ComputePool) -> None:
    """It keeps the bare facts, and makes lines of them in a thread of its own."""
    functions.during(lambda: sky.gather(*[nothing(number) for number in range(CALLS)]) >> pool)
    assert functions.begun["skyward.history.recorder.record_end"] == CALLS
    assert functions.begun["skyward.client.futures.emit"] < CALLS / 10
    ended = [call for call in pool.history().calls() if call.name == "nothing"]
    assert len(ended) >= CALLS
    assert ended[-1].arguments == str(CALLS - 1)


@sky.compute
def begin_counting() -> None:
    begun: list[str] = []
    sys.begun = begun  # pyright: ignore[reportAttributeAccessIssue] - found again by the next body of the process

    def count(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            begun.append(f"{frame.f_globals.get('__name__')}.{frame.f_code.co_name}")

    sys.setprofile(count)


@sky.compute
def end_counting() -> Counter[str]:
    sys.setprofile(None)
    return Counter(vars(sys)["begun"])


@sky.compute
def same(value: Any) -> Any:
    return value


@pytest.mark.parametrize("kind", [*PLAIN, "object"])
def test_a_small_value_that_comes_back_runs_hardly_more_functions_on_its_node(pool: sky.ComputePool, kind: str) -> None:
    value = value_of(kind)
    assert same(value) >> pool is not None
    assert begin_counting() >> pool is None
    for _ in range(CALLS):
        same(value) >> pool
    begun = end_counting() >> pool
    more = OF_A_CLASS if kind == "object" else OF_A_VALUE_THERE
    assert begun.total() / CALLS < ON_ITS_NODE + more, begun.most_common(100)


def test_a_call_runs_few_functions_on_its_node(pool: sky.ComputePool) -> None:
    assert begin_counting() >> pool is None
    for number in range(CALLS):
        assert nothing(number) >> pool is None
    begun = end_counting() >> pool
    assert begun.total() / CALLS < ON_ITS_NODE, begun.most_common(100)


def test_keeping_failed_calls_costs_nothing_for_those_that_succeed(functions: Functions, pool: sky.ComputePool) -> None:
    """They are looked at when they fail, and not before."""
    functions.during(lambda: sky.gather(*[nothing(number) for number in range(CALLS)]) >> pool)
    ours = ("skyward.history.failed_calls.", "skyward.pool.failures.")
    begun = {name: count for name, count in functions.begun.items() if name.startswith(ours)}
    assert set(begun) <= {"skyward.pool.failures.flush"}  # in the history's thread, twice a second
    assert sum(begun.values()) < CALLS / 10


def test_a_rank_of_a_broadcast_costs_the_same_however_many_there_are(functions: Functions) -> None:
    nodes = 8

    def broadcasts() -> None:
        for number in range(CALLS // nodes):
            assert nothing(number) @ pool == [None] * nodes

    with sky.ComputePool(nodes=nodes, console=False) as pool:
        broadcasts()
        ranks = CALLS // nodes * nodes
        assert functions.during(broadcasts) * CALLS / ranks < OF_A_RANK, functions.begun.most_common(200)
        assert functions.begun["skyward.client.connections.connected"] < 2 * ranks


# Imported by every interpreter of a pool: SIGUSR2 begins to count, and the next one writes the counts down.
COUNT = """
import json, os, signal, sys
from collections import Counter

begun = Counter()

def count(frame, event, _):
    if event == "call":
        begun[f"{frame.f_globals.get('__name__')}.{frame.f_code.co_name}"] += 1

def toggle(*_):
    path = os.path.join(os.environ["SKYWARD_WATCH"], f"{os.getpid()}")
    if sys.getprofile() is not None:
        sys.setprofile(None)
        path += ".json"
    with open(path + ".part", "w") as file:
        json.dump(begun, file)
    os.rename(path + ".part", path)
    if not path.endswith(".json"):
        begun.clear()
        sys.setprofile(count)

signal.signal(signal.SIGUSR2, toggle)
"""


def test_a_call_runs_few_functions_in_the_agent_of_its_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(COUNT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("SKYWARD_WATCH", str(tmp_path))
    with sky.ComputePool(nodes=1, console=False) as pool:
        assert nothing() >> pool is None
        agent = next(p for p in family(pool._fleet.by_node[0].keeper.pid) if p.name() == "skyward-agent")
        agent.send_signal(signal.SIGUSR2)
        until((tmp_path / f"{agent.pid}").exists)
        for number in range(CALLS):
            assert nothing(number) >> pool is None
        agent.send_signal(signal.SIGUSR2)
        until((tmp_path / f"{agent.pid}.json").exists)
        begun: Counter[str] = Counter(json.loads((tmp_path / f"{agent.pid}.json").read_text()))
    assert sum(count for name, count in begun.items() if "usage" not in name) / CALLS < IN_ITS_AGENT, begun
