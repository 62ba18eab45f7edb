"""What a body knows of where it runs: its node, its call, its environment, its threads; and what the client hears."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import skyward as sky
from skyward import events
from tests.support.listener import Listener
from tests.support.waiting import until


@sky.compute
def call(fn: Callable[..., Any], *args: Any) -> Any:
    return fn(*args)


def printed(heard: Listener, stream: str) -> list[tuple[int, str]]:
    return sorted((e.node, e.text) for e in heard.output if e.stream == stream)


def info() -> sky.InstanceInfo:
    found = sky.instance_info()
    assert found is not None
    return found


def test_every_field_of_the_info_is_filled(pool: sky.ComputePool) -> None:
    """S1-36 to S1-43, T7, D6."""
    infos = call(info) @ pool
    for number, found in enumerate(infos):
        assert (found.node, found.worker, found.total_nodes, found.workers_per_node) == (number, 0, 2, 1)
        assert (found.global_worker_index, found.total_workers) == (number, 2)
        assert found.is_head is (number == 0)
        assert (found.accelerators, found.total_accelerators, found.accelerator) == (0, 0, None)
        assert found.head_addr == "127.0.0.1"
        assert [(p.node, p.private_ip, p.public_ip) for p in found.peers] == [
            (0, "127.0.0.1", None),
            (1, "127.0.0.1", None),
        ]
        assert found.network.interface == "lo"
        assert found.hostname == socket.gethostname()
        assert found.job_id == pool.name
        assert found.attempt == 0
    assert infos[0].head_port == infos[1].head_port
    assert infos[0].ports == infos[1].ports


def test_ports_are_free_on_the_head_and_differ(pool: sky.ComputePool) -> None:
    """T15: frameworks and pools do not meet on one port."""
    here = call(info) >> pool
    ports = [here.head_port, *(port for name, port in here.ports.items() if port != here.head_port)]
    assert {"torch", "jax", "tensorflow"} <= set(here.ports)
    assert len(set(here.ports.values())) == len(here.ports)
    for port in ports:
        with socket.create_server((here.head_addr, port)):
            pass


def test_each_call_has_an_id_of_its_own(pool: sky.ComputePool, heard: Listener) -> None:
    ids = [found.task_id for found in call(info) @ pool] + [(call(info) >> pool).task_id for _ in range(3)]
    assert len(set(ids)) == 5
    until(lambda: set(ids) <= {event.call for event in heard.of(events.CallEnded)})


def test_the_info_comes_from_the_variable(pool: sky.ComputePool) -> None:
    """S1-04, and S1-44: a user can form a group from the fields alone."""

    def both() -> tuple[dict[str, Any], dict[str, str]]:
        found = info()
        group = {"MASTER_ADDR": found.head_addr, "WORLD_SIZE": str(found.total_nodes), "RANK": str(found.node)}
        return json.loads(os.environ["COMPUTE_POOL"]), group

    for rank, (raw, group) in enumerate(call(both) @ pool):
        assert raw["node"] == rank
        assert raw["total_nodes"] == 2
        assert group == {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2", "RANK": str(rank)}


def test_a_body_that_runs_here_is_the_only_rank_also_while_a_pool_is_open(pool: sky.ComputePool) -> None:
    """T16."""

    @sky.compute
    def place() -> tuple[int, int]:
        return sky.instance_info().node, sky.instance_info().total_nodes

    assert place.local() == (0, 1)
    assert "COMPUTE_POOL" not in os.environ
    assert sky.is_head()


def test_there_is_one_head(pool: sky.ComputePool) -> None:
    """S1-39."""
    assert call(sky.is_head) @ pool == [True, False]


def test_every_node_gets_the_same_arguments_and_its_own_place(pool: sky.ComputePool) -> None:
    """S1-01, S1-03."""
    given = {"rate": 0.1, "data": list(range(5))}
    assert call(lambda x: (info().node, x), given) @ pool == [(0, given), (1, given)]


class Counted:
    """Counts how often it is pickled, and says how often it was by then."""

    pickled = 0

    def __reduce__(self) -> Any:
        Counted.pickled += 1
        return int, (Counted.pickled,)


def test_every_node_gets_the_same_payload_which_is_serialised_once(pool: sky.ComputePool) -> None:
    """S1-02."""
    before = Counted.pickled
    assert call(lambda number: number, Counted()) @ pool == [before + 1] * 2
    assert Counted.pickled == before + 1


def test_a_broadcast_over_four_nodes_gives_four_results_in_node_order() -> None:
    """S1-08."""
    with sky.ComputePool(nodes=4, console=False) as four:
        found = call(lambda: (info().node, info().total_nodes, os.getpid())) @ four
    assert [(node, nodes) for node, nodes, _ in found] == [(0, 4), (1, 4), (2, 4), (3, 4)]
    assert len({pid for *_, pid in found}) == 4


@pytest.mark.parametrize("options", [{}, {"shuffle": True, "seed": 7}])
def test_the_shards_of_a_broadcast_are_the_whole(pool: sky.ComputePool, options: dict[str, Any]) -> None:
    """S1-29, S1-30, S1-32, S1-33, S1-35."""
    parts = call(lambda xs: sky.shard(xs, **options), list(range(11))) @ pool
    assert all(type(part) is list for part in parts)
    assert sorted(x for part in parts for x in part) == list(range(11))
    if not options:
        assert parts == [[0, 2, 4, 6, 8, 10], [1, 3, 5, 7, 9]]

    x = np.arange(11)
    pairs = call(lambda x, y: sky.shard(x, y, **options), x, x * 10) @ pool
    assert all(np.array_equal(a * 10, b) for a, b in pairs)
    assert sorted(np.concatenate([a for a, _ in pairs])) == list(range(11))


def test_shards_may_be_dropped_to_equal_size_or_asked_for_by_number(pool: sky.ComputePool) -> None:
    parts = call(lambda xs: sky.shard(xs, drop_last=True), list(range(11))) @ pool
    assert [len(part) for part in parts] == [5, 5]
    assert call(lambda xs: sky.shard(xs, node=1, total_nodes=3), list(range(9))) @ pool == [[1, 4, 7]] * 2


def speak() -> str:
    print(f"out {info().node}")
    print(f"err {info().node}", file=sys.stderr)
    return "said"


OUT = [(0, "out 0"), (1, "out 1")]
ERR = [(0, "err 0"), (1, "err 1")]


@pytest.mark.parametrize(
    ("decorate", "out", "err"),
    [
        (sky.stdout(only="head"), OUT[:1], ERR),
        (sky.stderr(only="head"), OUT, ERR[:1]),
        (sky.stdout(only=lambda i: i.node == 1), OUT[1:], ERR),
        (sky.silent, [], []),
        (lambda fn: sky.stdout(only="head")(sky.stderr(only=lambda i: i.node == 1)(fn)), OUT[:1], ERR[1:]),
        (lambda fn: fn, OUT, ERR),
    ],
    ids=["stdout", "stderr", "predicate", "silent", "both", "neither"],
)
def test_output_is_dropped_where_it_is_not_wanted(
    pool: sky.ComputePool, heard: Listener, decorate: Any, out: list[Any], err: list[Any]
) -> None:
    """S0-14, S1-45 to S1-48, S1-50: below compute, each stream by itself, the result unaffected."""
    assert sky.compute(decorate(speak))() @ pool == ["said", "said"]
    assert printed(heard, "stdout") == out
    assert printed(heard, "stderr") == err


def test_a_silenced_body_that_raises_leaves_the_next_call_audible(pool: sky.ComputePool, heard: Listener) -> None:
    """S1-49."""

    @sky.compute
    @sky.silent
    def fails() -> None:
        print("unheard")
        raise KeyError("so")

    with pytest.raises(KeyError):
        fails() @ pool
    call(print, "heard") @ pool
    assert printed(heard, "stdout") == [(0, "heard"), (1, "heard")]


def test_output_can_be_redirected_on_the_node(pool: sky.ComputePool, heard: Listener) -> None:
    def body() -> list[str]:
        caught: list[str] = []

        @sky.redirect_output(caught.append)
        def inner() -> None:
            print("caught")

        inner()
        print("free")
        return caught

    assert "caught" in "".join(call(body) >> pool)
    assert heard.lines("stdout") == ["free"]


def test_an_unknown_choice_is_an_error_on_the_client() -> None:
    with pytest.raises(ValueError, match="only"):
        sky.stdout(only="everyone")  # type: ignore[arg-type]


def test_with_one_slot_bodies_run_in_the_main_thread(pool: sky.ComputePool) -> None:
    def where() -> tuple[bool, int]:
        return threading.current_thread() is threading.main_thread(), os.getpid()

    found = [call(where) >> pool for _ in range(4)]
    assert all(main for main, _ in found)
    assert os.getpid() not in {pid for _, pid in found}


@pytest.fixture(scope="module")
def threaded() -> Iterator[sky.ComputePool]:
    with sky.ComputePool(nodes=1, concurrency=4, console=False) as opened:
        yield opened


def meet(directory: str, number: int, total: int) -> tuple[int, int]:
    """Waits until `total` bodies are here at the same time; returns process and thread."""
    (Path(directory) / str(number)).touch()
    deadline = time.monotonic() + 20
    while len(os.listdir(directory)) < total:
        if time.monotonic() > deadline:
            raise TimeoutError(f"only {len(os.listdir(directory))} bodies run at once")
        time.sleep(0.005)
    return os.getpid(), threading.get_ident()


def test_four_slots_run_four_bodies_at_once_in_threads(threaded: sky.ComputePool, tmp_path: Path) -> None:
    """S0-44."""
    found = sky.gather(*(call(meet, str(tmp_path), i, 4) for i in range(4))) >> threaded
    assert len({pid for pid, _ in found}) == 1
    assert len({thread for _, thread in found}) == 4
    assert (threaded.concurrency, threaded.current_nodes()) == (4, 1)


def test_more_calls_than_slots_wait_their_turn(threaded: sky.ComputePool) -> None:
    def busy() -> int:
        import builtins

        lock = builtins.__dict__.setdefault("_skyward_lock", threading.Lock())
        with lock:
            now = builtins.__dict__["_skyward_now"] = builtins.__dict__.get("_skyward_now", 0) + 1
        time.sleep(0.02)
        with lock:
            builtins.__dict__["_skyward_now"] -= 1
        return now

    most = max(sky.gather(*(call(busy) for _ in range(24))) >> threaded)
    assert 2 <= most <= 4


def test_calls_in_threads_know_their_own_call(threaded: sky.ComputePool, tmp_path: Path) -> None:
    def who(directory: str, number: int) -> tuple[str | None, str | None]:
        before = info().task_id
        meet(directory, number, 4)
        return before, info().task_id

    found = sky.gather(*(call(who, str(tmp_path), i) for i in range(4))) >> threaded
    assert len({before for before, _ in found}) == 4
    assert all(before == after for before, after in found)


def test_silencing_one_call_leaves_its_neighbours_audible(threaded: sky.ComputePool, tmp_path: Path) -> None:
    """T14."""
    listener = Listener(threaded)

    def loud(directory: str, number: int) -> None:
        meet(directory, number, 4)
        for i in range(50):
            print(f"{number}:{i}")
            print(f"{number}:{i}", file=sys.stderr)

    silent = sky.compute(sky.silent(loud))
    half = sky.compute(sky.stdout(only=lambda _: False)(loud))
    here = str(tmp_path)
    sky.gather(silent(here, 0), half(here, 1), call(loud, here, 2), call(loud, here, 3)) >> threaded
    listener.stop()
    for stream, numbers in (("stdout", (2, 3)), ("stderr", (1, 2, 3))):
        lines = [event.text for event in listener.of(events.Output) if event.stream == stream]
        for number in range(4):
            own = [line for line in lines if line.startswith(f"{number}:")]
            assert own == ([f"{number}:{i}" for i in range(50)] if number in numbers else []), (stream, number)


def test_process_slots_are_processes_that_run_at_once(tmp_path: Path) -> None:
    worker = sky.Worker(concurrency=4, executor="process")
    with sky.ComputePool(nodes=1, worker=worker, console=False) as pool:
        found = sky.gather(*(call(meet, str(tmp_path), i, 4) for i in range(4))) >> pool
        main = call(lambda: threading.current_thread() is threading.main_thread()) >> pool
    assert len({pid for pid, _ in found}) == 4
    assert main


def test_the_image_sets_variables_and_brings_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`env` is set before user code, `includes` are importable."""
    package = tmp_path / "brought_along"
    package.mkdir()
    (package / "__init__.py").write_text(
        "import os\nAT_IMPORT = os.environ.get('GREETING')\nfrom .deep import answer\n"
    )
    (package / "deep.py").write_text("def answer(): return 42\n")
    (tmp_path / "single_module.py").write_text("NAME = __name__\n")
    monkeypatch.chdir(tmp_path)
    image = sky.Image(env={"GREETING": "hello = 'world' $HOME"}, includes=["brought_along", "single_module.py"])

    def look() -> tuple[Any, ...]:
        import brought_along  # type: ignore[import-not-found]
        import single_module  # type: ignore[import-not-found]

        return os.environ["GREETING"], brought_along.AT_IMPORT, brought_along.answer(), single_module.NAME

    with sky.ComputePool(image=image, nodes=2, console=False) as pool:
        assert call(look) @ pool == [("hello = 'world' $HOME",) * 2 + (42, "single_module")] * 2
    assert "GREETING" not in os.environ


def test_a_package_that_is_not_installed_here_is_on_the_nodes() -> None:
    """A cached environment is made for the image."""

    def use() -> str:
        import tabulate  # type: ignore[import-not-found]

        return tabulate.tabulate([[1, 2]], headers=["a", "b"], tablefmt="plain")

    with pytest.raises(ImportError):
        use()
    with sky.ComputePool(image=sky.Image(pip=["tabulate"]), console=False) as pool:
        assert (call(use) >> pool).split() == ["a", "b", "1", "2"]
        assert (call(lambda: sys.version_info[:2]) >> pool) == sys.version_info[:2]


def test_a_pool_is_a_dask_cluster(pool: sky.ComputePool) -> None:
    pytest.importorskip("distributed")
    with pool.dask() as client:
        assert client.dashboard_link is None
        workers = client.scheduler_info(n_workers=-1)["workers"]
        assert len(workers) == 2
        assert {str(worker["name"]) for worker in workers.values()} == {"node-0", "node-1"}
        assert client.submit(pow, 2, 10).result(timeout=45) == 1024
        assert client.gather(client.map(abs, range(-5, 0))) == [5, 4, 3, 2, 1]
        assert all(address.startswith("tls://127.0.0.1") for address in workers)
    assert call(abs, -1) >> pool == 1


def test_without_distributed_the_error_says_what_to_install(
    pool: sky.ComputePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "distributed" else find(name))
    with pytest.raises(sky.SkywardError, match=re.escape("pip install distributed")):
        pool.dask()


def test_events_tell_the_life_of_a_pool_in_order() -> None:
    pool = sky.ComputePool(nodes=2, concurrency=2, console=False, name="told")
    listener = Listener(pool)
    with pool:
        call(print, "hello") >> pool
        with pytest.raises(KeyError):
            call({}.__getitem__, "missing") >> pool
        until(lambda: len(listener.of(events.CallEnded)) == 2)
        until(lambda: listener.of(events.NodeSample))
    told = listener.events
    assert all(event.pool == "told" for event in told)

    def first(kind: type[events.Event]) -> int:
        return next(i for i, event in enumerate(told) if isinstance(event, kind))

    order = [events.PoolOpening, events.NodePhase, events.PoolOpened, events.CallStarted, events.Output]
    order += [events.CallEnded, events.PoolClosing, events.PoolClosed]
    assert [first(kind) for kind in order] == sorted(first(kind) for kind in order)
    assert first(events.PoolOpening) == 0
    assert isinstance(told[-1], events.PoolClosed)

    opening, opened = listener.of(events.PoolOpening)[0], listener.of(events.PoolOpened)[0]
    assert (opening.nodes, opening.provider) == (2, "Local")
    assert (opened.nodes, opened.slots) == (2, 4)
    assert opened.seconds > 0
    for node in (0, 1):
        phases = [e.phase for e in listener.of(events.NodePhase) if e.node == node]
        assert phases[0] == "starting"
        assert phases[-1] == "ready"
    started, ended = listener.of(events.CallStarted), listener.of(events.CallEnded)
    assert [e.call for e in started] == [e.call for e in ended]
    assert [e.outcome for e in ended] == ["ok", "error"]
    assert ended[0].name == "call"
    assert all(e.seconds >= 0 for e in ended)
    assert [(e.text, e.stream) for e in listener.of(events.Output)] == [("hello", "stdout")]
    sample = listener.of(events.NodeSample)[0]
    assert sample.memory > 1 << 20
    closed = listener.of(events.PoolClosed)[0]
    assert closed.calls == 2
    assert closed.seconds > 0


def test_a_listener_can_leave(pool: sky.ComputePool) -> None:
    listener = Listener(pool)
    call(abs, 1) >> pool
    listener.stop()
    count = len(listener.events)
    call(abs, 1) >> pool
    assert count > 0
    assert len(listener.events) == count
    listener.stop()


def test_nothing_heavy_is_loaded_where_user_code_runs(pool: sky.ComputePool) -> None:
    """S0-06: only what the body uses is imported on the node."""
    heavy = ["distributed", "dask", "rich", "torch", "jax", "keras", "tensorflow", "transformers", "joblib", "sklearn"]
    assert (call(lambda names: [n for n in names if n in sys.modules], heavy) >> pool) == []
