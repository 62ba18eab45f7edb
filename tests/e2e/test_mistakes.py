"""Spellings that are nearly right get the right one, before anything is sent."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import importlib
import inspect
import pickle
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward.pool.settings import Settings
from tests.support.waiting import until


@sky.compute
def double(n: int) -> int:
    return 2 * n


def plain(n: int) -> int:
    return n


LOCK = threading.Lock()


@sky.compute
def add_up(items: Iterator[int]) -> int:
    return sum(items)


@sky.compute
def count(n: int) -> Iterator[int]:
    yield from range(n)


async def _read_later(pool: Any) -> None:
    async for _ in count(2) > pool:
        pass


async def _await_map(pool: Any) -> None:
    found = pool.map(double, [1, 2])
    assert found == [2, 4]
    assert type(pickle.loads(pickle.dumps(found))) is list
    await found


def exhausted() -> Iterator[int]:
    items = (n for n in [1])
    list(items)
    return items


CASES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a plain function's result": (lambda pool: plain(1) >> pool, "decorated with @sky.compute"),
    "a plain result, broadcast": (lambda pool: plain(1) @ pool, "decorated with @sky.compute"),
    "a plain result, later": (lambda pool: plain(1) > pool, "decorated with @sky.compute"),
    "a list of calls": (lambda pool: [double(1)] >> pool, "sky.gather(*calls) >> pool"),
    "gather of a list": (lambda pool: sky.gather([double(1)]) >> pool, "sky.gather(*calls)"),
    "gather of a generator": (lambda pool: sky.gather(double(i) for i in range(2)) >> pool, "sky.gather(*calls)"),
    "the pool on the left": (lambda pool: pool < double(1), "call > pool"),
    "compared before it has run": (lambda pool: double(1) == 2, "has not run"),
    "compared with not": (lambda pool: double(1) != 2, "has not run"),
    "asked for its result": (lambda pool: double(1).result(), "`double(...) >> pool`"),
    "ray's spelling": (lambda pool: double.remote(1), "`double(...) >> pool`"),
    "dask's spelling": (lambda pool: double.delay(1), "`double(...) >> pool`"),
    "an executor's spelling": (lambda pool: pool.submit(double, 1), "pool.submit(double(1))"),
    "an executor's, plain": (lambda pool: pool.submit(plain, 1), "pool.executor.submit(plain, ...)"),
    "run with arguments": (lambda pool: pool.run(double, n=1), "pool.run(double(n=1))"),
    "a future as an argument": (lambda pool: double(double(1) > pool) >> pool, "future.result()"),
    "a pool as an argument": (lambda pool: double(pool) >> pool, "stays in the process"),
    "a function that was not called": (lambda pool: double >> pool, "has not been called"),
    "a plain function itself": (lambda pool: plain >> pool, "Decorate it with @sky.compute, then call it"),
    "a list, broadcast": (lambda pool: [double(1)] @ pool, "[call @ pool for call in calls]"),
    "the pool first": (lambda pool: pool >> double(1), "`call >> pool`"),
    "the pool first, broadcast": (lambda pool: pool @ double(1), "`call @ pool`"),
    "the other direction": (lambda pool: double(1) << pool, "`double(...) >> pool`"),
    "a shell's pipe": (lambda pool: double(1) | pool, "`double(...) >> pool`"),
    "added before it has run": (lambda pool: double(1) + 1, "has not run"),
    "summed before they have run": (lambda pool: sum([double(1), double(2)]), "has not run"),
    "indexed before it has run": (lambda pool: double(1)[0], "has not run"),
    "iterated before it has run": (lambda pool: list(double(1)), "has not run"),
    "a number before it has run": (lambda pool: int(double(1)), "has not run"),
    "asked for what its result has": (lambda pool: double(1).shape, "`(double(...) >> pool).shape`"),
    "a group that was not sent": (lambda pool: sky.gather(double(1), double(2))[0], "`sky.gather(...) >> pool`"),
    "a stream that was not sent": (lambda pool: list(sky.gather(double(1), stream=True)), "stream=True) >> pool`"),
    "a group as a condition": (lambda pool: bool(sky.gather(double(1))), "no truth value"),
    "awaited, a group": (lambda pool: sky.gather(double(1)).__await__(), "`await (sky.gather(...) > pool)`"),
    "futures gathered": (lambda pool: sky.gather(double(1) > pool), "future.result()"),
    "parentheses forgotten": (lambda pool: double(1) & double(2) >> pool, "`(a() & b()) >> pool`"),
    "a group run": (lambda pool: pool.run(sky.gather(double(1))), "`group >> pool`"),
    "a function run": (lambda pool: pool.run(double), "double has not been called"),
    "two calls run": (lambda pool: pool.run(double(1), double(2)), "sky.gather(a(), b()) >> pool"),
    "broadcast like an executor": (lambda pool: pool.broadcast(double, 1), "pool.broadcast(double(1))"),
    "map of a call": (lambda pool: pool.map(double(1), [1]), "`pool.map(double, items)`"),
    "map turned around": (lambda pool: pool.map([1], double), "the function comes first"),
    "map of a number": (lambda pool: pool.map(double, 3), "pass the items as a list"),
    "map of two lists": (lambda pool: pool.map(double, [1], [2]), "sky.gather(*(double(a, b) for a, b in zip(...)))"),
    "multiprocessing's imap": (lambda pool: pool.imap(double, [1]), "stream=True"),
    "multiprocessing's starmap": (lambda pool: pool.starmap(double, [(1,)]), "sky.gather("),
    "an executor's end": (lambda pool: pool.shutdown(), "`pool.close()`"),
    "a pool's gather": (lambda pool: pool.gather(double(1)), "`sky.gather(*calls) >> pool`"),
    "a sum with the pool": (lambda pool: double(1) >> pool + 1, "`(fn(x) >> pool) + 1`"),
    "the pool's result": (lambda pool: double(1) > pool.result(), "`(fn(x) > pool).result()`"),
    "a pool that is called": (lambda pool: pool(double(1)), "`fn(x) >> pool`"),
    "ray's get": (lambda pool: pool.get(double(1) > pool), "`future.result()`"),
    "ray's wait": (lambda pool: pool.wait([double(1) > pool]), "`concurrent.futures.wait(futures)`"),
    "a function's map": (lambda pool: double.map([1]), "`pool.map(double, items)`"),
    "ray's options": (lambda pool: double.options(num_gpus=1), "`double(...).with_timeout(seconds)`"),
    "a call that is put": (lambda pool: pool.put(double(1)), "`double(1).keep() >> pool`"),
    "a future's get": (lambda pool: pool.submit(double(1)).get(), "`future.result()`"),
    "a future like its result": (lambda pool: pool.submit(double(1)).shape, "`future.result().shape`"),
    "ray's decorator": (lambda pool: sky.remote, "@sky.compute"),
    "another name of the pool": (lambda pool: sky.Pool, "sky.ComputePool(...)"),
    "a name with a typo": (lambda pool: sky.ComputPool, "Did you mean sky.ComputePool?"),
    "the module's map": (lambda pool: sky.map(double, [1]), "pool.map(fn, items)"),
    "the class as a target": (lambda pool: double(1) >> sky.ComputePool, "with ComputePool(...) as pool"),
    "a provider as a target": (lambda pool: double(1) >> sky.Local(), "sent to a sky.ComputePool"),
    "a lambda with a lock": (lambda pool: sky.compute(lambda: LOCK)() >> pool, "Create it inside the function"),
    "a generator in a list parameter": (lambda pool: double(x for x in [1]) >> pool, "Iterator[...]"),
    "a generator that was read": (lambda pool: add_up(exhausted()) >> pool, "Make a new one for each call"),
    "an iterator for all": (lambda pool: add_up(iter([1])) @ pool, "can be read once"),
    "async for over a future": (lambda pool: asyncio.run(_read_later(pool)), "`async for item in call >> pool`"),
    "for over a future": (lambda pool: list(count(2) > pool), "`for item in call >> pool`"),
    "a future's item": (lambda pool: (double(1) > pool)[0], "future.result()"),
    "await of a map": (lambda pool: asyncio.run(_await_map(pool)), "asyncio.to_thread(pool.map, fn, items)"),
    "map with chunks": (lambda pool: pool.map(double, [1], chunksize=3), "chunks are sized by"),
    "map without items": (lambda pool: pool.map(double), "pool.map(fn, items)"),
    "map with a word for a switch": (lambda pool: pool.map(double, [1], return_exceptions="no"), "True or False"),
    "push of a number": (lambda pool: pool.push(123), 'pool.push("data")'),
    "push of nothing": (lambda pool: pool.push(None), "expected the path of a file or folder"),
    "push of several": (lambda pool: pool.push(["a", "b"]), "Call it for each of them"),
    "push to a number": (lambda pool: pool.push("a", 3), "remote=3: expected the path"),
    "pull without a target": (lambda pool: pool.pull("out"), 'pool.pull("out", "results")'),
    "pull to a number": (lambda pool: pool.pull("out", 3), "local=3: expected the path"),
    "put of nothing": (lambda pool: pool.put(), "pool.put(obj)"),
    "a Ref like its object": (lambda pool: pool.put([1]).append(2), "ref.get().append"),
    "a Ref's item": (lambda pool: pool.put([1])[0], "`ref.get()` brings it here"),
    "a Ref added": (lambda pool: pool.put(1) + 1, "it becomes the object"),
    "a Ref iterated": (lambda pool: list(pool.put([1])), "stands for an object"),
    "a port for the page": (lambda pool: pool.view(port=8000), "any port that is free is taken"),
    "an argument for the page": (lambda pool: pool.view(8000), "pool.view()"),
    "a trace without a path": (lambda pool: pool.trace(), 'pool.trace("run.json")'),
    "a trace into a number": (lambda pool: pool.trace(3), "expected the path of a file or folder"),
    "a trace into a folder": (lambda pool: pool.trace("/"), "is a folder: give the path of a file"),
    "a trace into nowhere": (lambda pool: pool.trace("/nowhere/run.json"), "there is no folder '/nowhere'"),
    "a listener that is no function": (lambda pool: pool.on_event(3), "on_event(print)"),
    "the executor called": (lambda pool: pool.executor(), "without brackets"),
    "a call for the executor": (lambda pool: pool.executor.submit(double(1)), "`double(...) > pool`"),
    "a number for the executor": (lambda pool: pool.executor.submit(3), "takes a function and its arguments"),
    "a call that is kept": (lambda pool: pool.put(double(1)), "`double(1).keep() >> pool`"),
    "a stream, later": (lambda pool: sky.gather(double(1), stream=True) > pool, "for result in sky.gather("),
    "a stream, broadcast": (lambda pool: sky.gather(double(1), stream=True) @ pool, "`a() @ pool`"),
}

OPTIONS: dict[str, tuple[Callable[[], Any], str]] = {
    "an option with a typo": (lambda: sky.ComputePool(node=2), "Did you mean `nodes`?"),
    "hosts of the pool": (lambda: sky.ComputePool(hosts=["a"]), 'provider=sky.SSH(hosts=["gpu1", "gpu2"])'),
    "gpus": (lambda: sky.ComputePool(gpus=2), 'accelerator="A100"'),
    "cpus": (lambda: sky.ComputePool(cpus=2), "vcpus="),
    "memory": (lambda: sky.ComputePool(memory=2), "memory_gb="),
    "workers": (lambda: sky.ComputePool(workers=2), "nodes="),
    "packages of the pool": (lambda: sky.ComputePool(pip=["numpy"]), "image=sky.Image(pip=[...])"),
    "packages of the image": (lambda: sky.Image(packages=["numpy"]), "`pip=[...]`"),
    "packages as one text": (lambda: sky.Image(pip="numpy pandas"), "pip=['numpy', 'pandas']"),
    "a provider by name": (lambda: sky.ComputePool(provider="aws"), "provider=sky.AWS()"),
    "a host as a provider": (lambda: sky.ComputePool(provider="gpu1"), "provider=sky.SSH(hosts=['gpu1'])"),
    "hosts as a provider": (lambda: sky.ComputePool(provider=["a", "b"]), "provider=sky.SSH(hosts=['a', 'b'])"),
    "a provider's class": (lambda: sky.ComputePool(provider=sky.AWS), "provider=sky.AWS()"),
    "a plugin by name": (lambda: sky.ComputePool(plugins=["pytorch"]), "plugins=[sky.plugins.torch()]"),
    "a plugin without a list": (lambda: sky.ComputePool(plugins=sky.plugins.jax()), "plugins=[sky.plugins.jax()]"),
    "a plugin that was not called": (lambda: sky.ComputePool(plugins=[sky.plugins.jax]), "sky.plugins.jax()"),
    "an image as a list": (lambda: sky.ComputePool(image=["numpy"]), "image=sky.Image(pip=['numpy'])"),
    "a number in quotes": (lambda: sky.ComputePool(nodes="4"), "Write nodes=4, without quotes."),
    "a duration as a text": (lambda: sky.ComputePool(ttl="2h"), "Write ttl=7200, without quotes, in seconds."),
    "a range of nodes": (lambda: sky.ComputePool(nodes=(1, 4)), "Write nodes=4, min_nodes=1 to"),
    "an accelerator with a typo": (lambda: sky.ComputePool(accelerator="A1000"), "near ones: A100"),
    "a password for ssh": (lambda: sky.SSH(hosts=["a"], password="x"), "key="),
    "one instance type": (lambda: sky.AWS(instance_type="g5.xlarge"), "instance_types="),
    "SSH without hosts": (lambda: sky.SSH(), 'sky.SSH(hosts=["gpu1", "gpu2"])'),
    "nodes of Local": (lambda: sky.Local(nodes=4), "sky.ComputePool(nodes=4)"),
    "a number for Local": (lambda: sky.Local(4), "sky.ComputePool(nodes=4)"),
    "a port in quotes": (lambda: sky.Join(port="80"), "port='80' is not a port"),
    "a login that is not a text": (lambda: sky.Join(login=3), "login=3 is not a host"),
    "an address for Join": (lambda: sky.Join(address="a"), '`addresses=["..."]`'),
    "a time to wait for Join": (lambda: sky.Join(wait=60), "provision_timeout=seconds"),
    "a file that is no path": (lambda: sky.Join(file=3), "file=3: expected the path"),
    "Slurm's queue": (lambda: sky.Slurm(queue="gpu"), '`partition="..."`'),
    "a login of Slurm": (lambda: sky.Slurm(login=3), "login=3 is not a host"),
    "options as a text": (lambda: sky.Slurm(options="--exclusive"), "expected a dictionary"),
    "Dask without a cluster": (lambda: sky.Dask(), "sky.Dask(cluster)"),
    "Dask with a number": (lambda: sky.Dask(3), "give a dask cluster, a Client"),
    "Ray's resources as a number": (lambda: sky.Ray(resources=3), 'resources={"CPU": 4, "GPU": 1}'),
    "Ray's num_gpus": (lambda: sky.Ray(num_gpus=1), "`resources="),
    "a plugin's name without a list": (lambda: sky.ComputePool(plugins="torch"), "plugins=[sky.plugins.torch()]"),
    "slots as a worker": (lambda: sky.ComputePool(worker=4), "`concurrency=4`"),
    "an accelerator without a name": (lambda: sky.ComputePool("A100"), "sky.ComputePool(accelerator='A100')"),
    "specs in a list": (lambda: sky.ComputePool([sky.Spec()]), "sky.ComputePool(*specs)"),
    "a container as the image": (lambda: sky.ComputePool(image="python:3.12"), "not a container"),
    "an image as a dictionary": (lambda: sky.ComputePool(image={"pip": []}), "sky.Image(**settings)"),
    "bytes as a text": (lambda: sky.ComputePool(max_result_bytes="2GB"), "max_result_bytes=2000000000, without quotes"),
    "a whole number with a point": (lambda: sky.ComputePool(nodes=2.0), "Write nodes=2."),
    "ray's num_nodes": (lambda: sky.ComputePool(num_nodes=4), "Write `nodes=`."),
    "no nodes": (lambda: sky.ComputePool(nodes=0), "nodes=0: it must be a whole number of at least 1."),
    "accelerators times eight": (lambda: sky.ComputePool(accelerator="H100x8"), 'Write "H100:8"'),
    "eight accelerators": (lambda: sky.ComputePool(accelerator="8 x A100"), 'Write "A100:8"'),
    "one equals sign": (lambda: sky.Image(pip=["numpy=1.2"]), 'Write "numpy==1.2".'),
    "a name that is none": (lambda: sky.ComputePool(name=3), "name='train-1'"),
    "gpus of a function": (lambda: sky.compute(gpus=1), 'sky.ComputePool(accelerator="A100")'),
    "gather with a typo": (lambda: sky.gather(double(1), return_exception=True), "`return_exceptions`"),
    "gather with a time limit": (lambda: sky.gather(double(1), timeout=3), "with_timeout(seconds)"),
    "gather with a word for a switch": (
        lambda: sky.gather(double(1), stream="yes"),
        "stream='yes': expected True or False",
    ),
    "shard by rank": (lambda: sky.shard([1], rank=0), "`node=`"),
    "shard with a word for a switch": (lambda: sky.shard([1], shuffle="yes"), "shuffle='yes': expected True or False"),
    "shard for a text": (lambda: sky.shard([1], node="0", total_nodes=2), "node='0'"),
    "once with brackets": (lambda: sky.once(), "without brackets"),
    "the history of a number": (lambda: sky.History.load(3), "expected the name of a pool"),
    "a pool's settings by number": (lambda: Settings(Path("sky.toml")).named(3), "options have names, nodes=4"),
    "both kinds of slots": (lambda: sky.ComputePool(concurrency=2, worker=sky.Worker()), "not both"),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_an_option_that_is_not_there_is_answered_with_what_to_write(case: str) -> None:
    act, words = OPTIONS[case]
    with pytest.raises((TypeError, ValueError, AttributeError)) as caught:
        act()
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[pool.lab]\nnodes = 2", "Did you mean pools?"),
        ("[pools]\nlab = 3", "Write [pools.lab]"),
        ("[pools.lab]\nprovider = 3", '{kind = "ssh", ...}'),
        ('[pools.lab]\nprovider = "shh"', "Write one of:"),
        ('[pools.lab]\nprovider = {kind = "ssh"}', 'sky.SSH(hosts=["gpu1", "gpu2"])'),
        ('[pools.lab]\nplugins = "torch"', "expected a list"),
        ("[pools.lab]\nnode = 2", "Did you mean nodes?"),
        ('[pools.lab]\nnodes = "2"', "Write nodes=2, without quotes"),
        ("[pools.lab.image]\npip_indexes = [3]", "expected a table"),
        ('[pools.lab.image]\npackage = ["numpy"]', "package is not known"),
        ("[pools.lab]\nworker = 3", "expected a table"),
    ],
)
def test_a_wrong_line_of_a_settings_file_is_answered_with_what_to_write(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "sky.toml"
    path.write_text(text)
    with pytest.raises(ValueError) as caught:
        sky.ComputePool.from_config("lab", path=path)
    assert words in str(caught.value)


def test_a_pyproject_whose_table_is_none_says_so(tmp_path: Path) -> None:
    path = tmp_path / "pyproject.toml"
    path.write_text("[tool]\nskyward = 3")
    with pytest.raises(ValueError, match=r"Write \[tool\.skyward\.pools\.lab\]"):
        sky.ComputePool.from_config(path=path)


def test_options_that_are_right_are_still_those_of_the_signature() -> None:
    assert "nodes" in inspect.signature(sky.ComputePool).parameters
    assert list(inspect.signature(sky.Image).parameters)[:2] == ["python", "pip"]
    assert dataclasses.replace(sky.Image(pip=["numpy"]), apt=["git"]).pip == ("numpy",)


@pytest.mark.parametrize("case", CASES)
def test_a_mistake_leads_to_the_right_spelling(pool: sky.ComputePool, case: str) -> None:
    act, words = CASES[case]
    with pytest.raises((TypeError, ValueError, AttributeError)) as caught:
        act(pool)
    assert words in str(caught.value)


def test_a_captured_pool_says_why_it_is_not_sent(pool: sky.ComputePool) -> None:
    @sky.compute
    def nested() -> int:
        return double(1) >> pool

    with pytest.raises(sky.errors.NotSerializable, match="a pool stays in the process"):
        nested() >> pool


def test_a_number_alone_is_not_a_pool() -> None:
    with pytest.raises(ValueError, match=r"nodes=4"):
        sky.ComputePool(4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="provider="):
        sky.ComputePool(sky.Local())  # type: ignore[arg-type]


def test_calls_can_still_be_kept_in_sets_and_lists() -> None:
    a, b = double(1), double(1)
    assert a == a
    assert a != b
    assert len({a, b}) == 2
    assert [a, b].index(b) == 1


@sky.compute
def fail() -> None:
    raise LookupError("of a call that nobody waits for")


def test_a_failure_that_nobody_asks_for_is_told(pool: sky.ComputePool, caplog: pytest.LogCaptureFixture) -> None:
    future = fail() > pool
    future.wait()
    del future
    until(lambda: "fail failed, and its result was never retrieved: LookupError: of a call that" in caplog.text)


def test_a_failure_that_comes_after_its_future_was_dropped_is_told(
    pool: sky.ComputePool, caplog: pytest.LogCaptureFixture
) -> None:
    pool.submit(fail())
    until(lambda: "was never retrieved" in caplog.text)


def test_a_failure_that_was_asked_for_is_not_told_again(
    pool: sky.ComputePool, caplog: pytest.LogCaptureFixture
) -> None:
    for ask in (lambda f: f.exception(), lambda f: f.add_done_callback(print), lambda f: f.cancel()):
        future = fail() > pool
        ask(future)
        future.wait()
        del future
    with pytest.raises(LookupError):
        fail() >> pool
    with pytest.raises(LookupError):
        sky.gather(fail(), fail()) >> pool
    assert double(1) >> pool == 2
    gc.collect()
    assert "never retrieved" not in caplog.text


def test_a_body_that_asks_the_keyboard_says_what_to_do(pool: sky.ComputePool) -> None:
    @sky.compute
    def ask() -> str:
        return input("name? ")

    @sky.compute
    def stop() -> None:
        breakpoint()

    with pytest.raises(EOFError, match="has no keyboard"):
        ask() >> pool
    with pytest.raises(RuntimeError, match=r"stop\.local|\.local\("):
        stop() >> pool


def test_an_open_file_is_not_sent_as_a_text(pool: sky.ComputePool, tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    path.write_text("text")
    with path.open() as file, pytest.raises(sky.errors.NotSerializable, match="Pass the path"):
        double(file) >> pool  # type: ignore[arg-type]


@sky.compute
def forgets_to_send(n: int) -> Any:
    return n if n == 0 else forgets_to_send(n - 1)


@sky.compute
def sends_from_a_body() -> Any:
    return double(1) >> sky


@sky.compute
def opens_a_pool() -> int:
    with sky.ComputePool(nodes=1) as inner:
        return double(1) >> inner


@sky.compute
def returns_a_lock() -> Any:
    return threading.Lock()


@sky.compute
def ends_its_process() -> None:
    sys.exit(3)


@sky.compute
def imports_what_is_not_there() -> None:
    importlib.import_module("cv2_of_nobody")


@sky.compute
def read(path: str) -> str:
    with contextlib.chdir("/"):  # as on another machine
        return Path(path).read_text()


BODIES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "sends calls": (sends_from_a_body, sky.errors.PoolClosed, "`fn.local(...)`"),
    "opens a pool": (opens_a_pool, sky.errors.NestedPoolError, "allow_nested=True"),
    "returns a lock": (returns_a_lock, sky.errors.ResultNotSerializable, "cannot be sent back"),
    "ends its process": (ends_its_process, sky.errors.TaskCrashed, "have it return or raise instead"),
    "imports what is not there": (imports_what_is_not_there, ModuleNotFoundError, "sky.Image(pip=['cv2_of_nobody'])"),
    "reads a file of this computer": (lambda: read("pyproject.toml"), FileNotFoundError, "sky.Image(includes=[...])"),
}


@pytest.mark.parametrize("case", BODIES)
def test_a_body_that_cannot_work_says_what_to_do(pool: sky.ComputePool, case: str) -> None:
    act, kind, words = BODIES[case]
    with pytest.raises(kind) as caught:
        act() >> pool
    assert words in "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])


@pytest.mark.parametrize("act", [sends_from_a_body, opens_a_pool, returns_a_lock])
def test_remote_tracebacks_have_no_frame_of_ours(pool: sky.ComputePool, act: Callable[[], Any]) -> None:
    with pytest.raises(sky.SkywardError) as caught:
        act() >> pool
    (note,) = [note for note in caught.value.__notes__ if "remote traceback" in note]
    assert "/skyward/" not in note.replace(str(Path(__file__)), "")


def test_a_body_that_returns_a_call_is_told(pool: sky.ComputePool) -> None:
    lines: list[str] = []
    end = pool.on_event(lambda event: lines.append(event.text) if isinstance(event, sky.events.Output) else None)
    assert isinstance(forgets_to_send(1) >> pool, sky.PendingCompute)
    until(lambda: any("a call that was never run" in line and "forgets_to_send.local(...)" in line for line in lines))
    end()


def test_a_closed_pool_and_another_pools_object_say_so(pool: sky.ComputePool) -> None:
    other = sky.ComputePool(nodes=1, console=False)
    with pytest.raises(sky.errors.PoolClosed, match="not open yet"):
        double(1) >> other
    with other:
        kept = other.put([1])
        with pytest.raises(sky.errors.NotSerializable, match="belongs to the pool"):
            double(kept) >> pool
    with pytest.raises(sky.errors.PoolClosed, match="is closed"):
        other.map(double, [1])


@pytest.mark.parametrize(
    "act",
    [
        lambda pool: fail() >> pool,
        lambda pool: fail() @ pool,
        lambda pool: (fail() > pool).result(),
        lambda pool: sky.gather(fail(), fail()) >> pool,
        lambda pool: pool.map(lambda _: 1 / 0, [1, 2]),
        lambda pool: sky.ComputePool(nodes=0),
    ],
    ids=[">>", "@", "result", "gather", "map", "a wrong argument"],
)
def test_between_the_line_of_the_program_and_the_error_stands_one_frame_of_ours(
    pool: sky.ComputePool, act: Callable[[Any], Any]
) -> None:
    with pytest.raises((LookupError, ZeroDivisionError, ValueError)) as caught:
        act(pool)
    files = [frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert [name == __file__ for name in files] == [True, True, False]
    assert caught.traceback[-1].frame.f_locals["__tracebackhide__"], "notebooks and pytest leave that one out, too"


def test_frames_stay_where_code_of_the_user_has_failed_here(pool: sky.ComputePool) -> None:
    def items() -> Iterator[int]:
        yield 1
        raise LookupError("of the program")

    with pytest.raises(LookupError) as caught:
        pool.map(double, items())
    assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "items"
