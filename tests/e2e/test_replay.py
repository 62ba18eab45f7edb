"""A call that failed is run again here: the same exception, at the same line."""

from __future__ import annotations

import asyncio
import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import skyward as sky
from skyward.errors import InvalidArgument, NodeLost, PluginError, TaskCrashed, TaskTimeout
from skyward.history import failed_calls
from skyward.history.failed_calls import FailedCall
from skyward.history.store import entries
from skyward.pool.replay import Replay, call_of
from tests.support.waiting import until

FRAME = re.compile(r'File "(.+)", line (\d+), in (\S+)')


class Broken(ValueError):
    """An exception of this file."""

    def __init__(self, number: int, more: str) -> None:
        super().__init__(f"{number} {more}")
        self.number = number


class Model:
    def __init__(self, size: int) -> None:
        self.size = size

    def step(self, at: int) -> float:
        return [0.0] * self.size and [1.0][at]


def helper(value: int) -> float:
    return 1 / value


@sky.compute
def plain(value: int) -> float:
    return value + helper(0)


@sky.compute
def chained() -> None:
    try:
        helper(0)
    except ZeroDivisionError as exc:
        raise Broken(3, "of two") from exc


@sky.compute
def group() -> None:
    raise ExceptionGroup("two", [ValueError(1), KeyError("a")])


@sky.compute
def asserted(table: Any, at: int) -> None:
    if table.sum() != at:
        raise AssertionError(f"{table.sum()} is not {at}")  # pytest would tell the addresses of objects


@sky.compute
async def waits() -> None:
    await asyncio.sleep(0)
    raise LookupError("after a wait")


@sky.compute
def yields(count: int) -> Iterator[int]:
    yield from range(count)
    raise OSError(5, "no more")


@sky.compute
async def yields_later() -> AsyncIterator[int]:
    yield 1
    raise EOFError("no more")


@sky.compute
def unpicklable() -> Any:
    return threading.Lock()


@sky.compute
def deep(level: int) -> int:
    def down(level: int) -> int:
        return down(level + 1)

    return down(level)


@sky.compute
def allocates() -> Any:
    return np.zeros(1 << 50)


@sky.compute
def opens(path: str) -> str:
    return Path(path).read_text()


@sky.compute
def imports() -> None:
    import a_module_that_is_nowhere  # type: ignore[import-not-found]  # noqa: F401


@sky.compute
def reads(name: str) -> str:
    if os.environ["GREETING"] == "hello":
        raise ValueError(os.environ["GREETING"])
    return os.environ[name]


@sky.compute
def places() -> None:
    info = sky.instance_info()
    raise ValueError(f"{info.job_id} {info.node} of {info.total_nodes}, {info.task_id}")


@sky.compute
def shapes(one: Any, other: Any) -> Any:
    return one @ other


@sky.compute
def leaves(how: object) -> None:
    sys.exit(how)  # type: ignore[arg-type]


@sky.compute
def ends(how: int) -> None:
    if how < 0:
        os.kill(os.getpid(), -how)
    os._exit(how)


@sky.compute
def sleeps() -> None:
    print("asleep", flush=True)
    time.sleep(600)


def raised(call: Callable[[], object]) -> BaseException:
    with pytest.raises(Exception) as caught:
        result = call()
        if hasattr(result, "__next__"):
            list(result)
    return caught.value


KINDS: dict[str, Callable[[sky.ComputePool], object]] = {
    "in a helper": lambda pool: plain(3) >> pool,
    "with a cause, of a class of the user's": lambda pool: chained() >> pool,
    "a group": lambda pool: group() >> pool,
    "an assertion about a large array": lambda pool: asserted(np.ones(1 << 18), at=4) >> pool,
    "an object that was put": lambda pool: asserted(pool.put(np.ones(1 << 18)), 4) >> pool,  # type: ignore[arg-type]
    "a method": lambda pool: sky.compute(Model(2).step)(3) >> pool,
    "a partial with keywords": lambda pool: sky.compute(partial(asserted.fn, np.ones(3)))(at=9) >> pool,
    "a coroutine": lambda pool: waits() >> pool,
    "a generator": lambda pool: yields(3) >> pool,
    "an asynchronous generator": lambda pool: yields_later() >> pool,
    "a result that cannot travel": lambda pool: unpicklable() >> pool,
    "a recursion without end": lambda pool: deep(0) >> pool,
    "out of memory": lambda pool: allocates() >> pool,
    "a file that is not there": lambda pool: opens("/no/such/file") >> pool,
    "a module that is not there": lambda pool: imports() >> pool,
    "variables of the image": lambda pool: reads("X") >> pool,
    "its place in the pool": lambda pool: places() >> pool,
    "inside a library": lambda pool: shapes(np.ones((2, 3)), np.ones((2, 3))) >> pool,
    "an item of a map": lambda pool: pool.map(lambda x: 1 // x, [2, 1, 0, 3]),
    "a lambda with a closure": lambda pool: sky.compute(lambda: KINDS["not there"])() >> pool,
}


@pytest.fixture(scope="module", autouse=True)
def state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SKYWARD_STATE", str(tmp_path_factory.mktemp("state")))
        yield Path(os.environ["SKYWARD_STATE"])


@pytest.fixture(autouse=True)
def same_state(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYWARD_STATE", str(state))


@pytest.fixture(scope="module")
def pool(state: Path) -> Iterator[sky.ComputePool]:
    image = sky.Image(env={"GREETING": "hello"})
    with sky.ComputePool(nodes=2, console=False, image=image) as pool:
        yield pool


def frames(text: str) -> list[tuple[str, str, str]]:
    return [frame for frame in FRAME.findall(text) if "/skyward/" not in frame[0]]


@pytest.mark.parametrize("kind", KINDS)
def test_a_failure_is_reproduced_with_its_exception_and_line(pool: sky.ComputePool, kind: str) -> None:
    error = raised(lambda: KINDS[kind](pool))
    again = Replay(error)
    ended = again.run()
    assert frames(ended.text) == frames(again.call.error)
    assert again.compared(ended)[0].startswith("it failed as on the node: ")
    here = ended.error
    assert here is not None
    assert type(here) is type(error)
    assert str(here) == str(error)


def test_an_item_of_a_map_that_keeps_exceptions_is_reproduced(pool: sky.ComputePool) -> None:
    before = {call.id for call in kept()}
    results = pool.map(lambda x: 1 // x, [2, 1, 0, 3], return_exceptions=True)
    assert isinstance(results[2], ZeroDivisionError)
    until(lambda: {call.id for call in kept()} > before)
    (new,) = {call.id for call in kept()} - before
    with pytest.raises(ZeroDivisionError) as caught:
        sky.replay(new)
    assert caught.value.__notes__[0].startswith("item 2: ")


@pytest.mark.parametrize(
    ("call", "said"), [(leaves(7), 7), (leaves("bye"), 1), (ends(5), 5), (ends(-signal.SIGSEGV), -11)]
)
def test_the_end_of_the_process_is_reproduced(pool: sky.ComputePool, call: Any, said: int) -> None:
    error = raised(lambda: call >> pool)
    assert isinstance(error, TaskCrashed)
    with pytest.raises(TaskCrashed) as caught:
        sky.replay(error)
    assert caught.value.exit_code == error.exit_code == said
    again = Replay(error)
    assert again.compared(again.run())[0].startswith("it failed as on the node: TaskCrashed: ")


def test_a_time_limit_is_reproduced_at_the_line_where_the_body_stood(pool: sky.ComputePool) -> None:
    error = raised(lambda: sleeps().with_timeout(0.5) >> pool)
    with pytest.raises(TaskTimeout) as caught:
        sky.replay(error)
    stood = [frames(note) for each in (error, caught.value) for note in each.__notes__ if frames(note)]
    assert stood[0] == stood[1] != []
    again = Replay(error)
    assert again.compared(again.run())[0].startswith("it failed as on the node: TaskTimeout: ")


def test_a_call_that_ran_out_of_memory_gets_an_error_here_at_its_line(
    pool: sky.ComputePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And does not take this computer with it."""
    from skyward.pool import replay

    @sky.compute
    def grows(count: int) -> int:
        taken = [bytes(1 << 20) for _ in range(count)]
        raise ValueError(len(taken))

    error = raised(lambda: grows(256) >> pool)
    found = Replay(error)
    monkeypatch.setattr(replay, "_memory", lambda processes: 64 << 20)
    object.__setattr__(found.call, "error", "TaskOutOfMemory: node 0 ran out of memory")
    ended = found.run()
    assert ended.text.splitlines()[-1].startswith("MemoryError")
    assert "taken = [bytes" in ended.text


def kept() -> list[FailedCall]:
    return [call for entry in entries() for call, _ in failed_calls.kept(entry)]


def test_the_error_of_a_plugins_decorator_is_reproduced(state: Path) -> None:
    def decorate(fn: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any) -> Any:
            raise Broken(1, "in the hook")

        return wrapped

    plugin = sky.Plugin.create("mine").with_decorator(decorate)
    with sky.ComputePool(console=False, plugins=[plugin]) as pool:
        error = raised(lambda: plain(3) >> pool)
    again = Replay(error)
    ended = again.run()
    assert frames(ended.text) == frames(again.call.error) != []


def test_a_rank_of_a_broadcast_is_run_with_the_others(
    pool: sky.ComputePool, capsys: pytest.CaptureFixture[str]
) -> None:
    @sky.compute
    def each(values: list[int]) -> int:
        info = sky.instance_info()
        print("I am", info.rank, "of", info.world_size)
        assert values[info.rank] < 5, f"rank {info.rank} has {values[info.rank]}"
        return values[info.rank]

    error = raised(lambda: each([3, 7]) @ pool)
    assert Replay(error).rank == 1
    with pytest.raises(AssertionError, match="rank 1 has 7"):
        sky.replay(error)
    with pytest.raises(AssertionError, match="rank 1 has 7") as caught:
        sky.replay(error, rank=0)
    assert caught.value.__notes__[-1] == "rank 0 did not fail: it was rank 1."
    told = capsys.readouterr()
    assert "I am 1 of 2\nI am 0 of 2\n" in told.out
    assert "[rank 1] I am 1 of 2" in told.err
    other = sky_replay(call_of(error), "--rank=0")
    assert other.returncode == 1
    assert other.stderr.endswith("\nrank 0 did not fail: it was rank 1\n")
    refused = sky_replay(call_of(error), "--rank", "0", "--pdb")
    assert f"write `sky replay {call_of(error)} --rank 0 --pdb`" in refused.stderr
    with pytest.raises(InvalidArgument, match="there is no rank 2: the call was sent to ranks 0 to 1"):
        sky.replay(error, rank=2)


def test_a_call_that_does_not_fail_here_gives_its_result(pool: sky.ComputePool, tmp_path: Path) -> None:
    missing = tmp_path / "data.txt"
    error = raised(lambda: opens(str(missing)) >> pool)
    missing.write_text("found")
    assert sky.replay(error) == "found"
    missing.write_text("much" * (1 << 20))
    assert len(sky.replay(call_of(error))) == 4 << 20


def test_an_error_of_no_call_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="ValueError does not come from a call that can be run again"):
        sky.replay(ValueError("no"))
    with pytest.raises(InvalidArgument, match="no failed call 'nothing' is kept on this computer"):
        sky.replay("nothing")
    with pytest.raises(InvalidArgument, match=r"replay\(3\): expected the exception of a call, or its id"):
        sky.replay(3)  # type: ignore[arg-type]


def sky_replay(*arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "skyward", "replay", *arguments]
    return subprocess.run(argv, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)


def test_the_command_shows_the_failure_and_ends_with_1(pool: sky.ComputePool) -> None:
    error = raised(lambda: plain(3) >> pool)
    done = sky_replay(call_of(error))
    assert done.returncode == 1
    assert "plain(3), rank " in done.stderr
    assert "ZeroDivisionError: division by zero\nit failed as on the node: ZeroDivisionError" in done.stderr
    assert "/skyward/" not in done.stderr.replace(os.path.dirname(__file__), "")
    listed = sky_replay()
    assert f"{call_of(error)}  " in listed.stdout
    refused = sky_replay(call_of(error), "--pdb")
    assert refused.returncode == 1
    assert "the debugger needs a terminal" in refused.stderr


def test_what_differs_from_the_node_is_told(pool: sky.ComputePool) -> None:
    error = raised(lambda: plain(3) >> pool)
    again = Replay(error)
    there = {"host": "gpu7", "Python": "3.11.99", "system": "Linux 5.4 on aarch64", "CPUs": "999", "GPUs": "A100"}
    object.__setattr__(again.call, "machine", there)
    object.__setattr__(again.pool, "secret_variables", ["MY_TOKEN"])
    told = "\n".join(again.differences())
    assert "host: gpu7 on the node, " in told
    assert "Python: 3.11.99 on the node, " in told
    assert "system: Linux 5.4 on aarch64 on the node, Linux " in told
    assert "CPUs: 999 on the node, " in told
    assert "GPUs: A100 on the node, " in told
    assert "variable MY_TOKEN is not kept, since it may be a secret; here it is not set" in told


def in_a_terminal(argv: list[str], keys: list[tuple[str, str]]) -> tuple[str, int]:
    """Runs a program in a terminal; types each line when what belongs before it is shown. All of it, and the status."""
    ours, theirs = os.openpty()
    # what a process without a terminal opens first becomes its terminal, which Ctrl-C needs
    opening = ["sh", "-c", f'exec "$@" < {os.ttyname(theirs)} > {os.ttyname(theirs)} 2>&1', "sh", *argv]
    process = subprocess.Popen(opening, start_new_session=True)
    shown = b""
    try:
        for expected, line in keys:
            before = len(shown)
            while expected.encode() not in shown[before:] and process.poll() is None:
                shown += _read(ours)
            os.write(ours, line.encode())
        while process.poll() is None:
            shown += _read(ours)
        return (shown + _read(ours)).decode(), process.wait()
    finally:
        process.kill()
        process.wait()
        os.close(ours)
        os.close(theirs)


def _read(terminal: int) -> bytes:
    ready, _, _ = select.select([terminal], [], [], 0.2)
    return os.read(terminal, 1 << 16) if ready else b""


def test_the_debugger_has_the_terminal_and_stands_at_the_line_that_fails(pool: sky.ComputePool) -> None:
    error = raised(lambda: plain(3) >> pool)
    argv = [sys.executable, "-m", "skyward", "replay", call_of(error), "--pdb"]
    typed = [("(Pdb) ", "p value + 40\n"), ("(Pdb) ", "up\n"), ("(Pdb) ", "p value + 70\n"), ("(Pdb) ", "q\n")]
    shown, status = in_a_terminal(argv, typed)
    assert "return 1 / value\r\n(Pdb) p value + 40\r\n40\r\n" in shown
    assert "return value + helper(0)\r\n(Pdb) p value + 70\r\n73\r\n" in shown
    assert "it failed as on the node: ZeroDivisionError" in shown
    assert status == 1


def test_shared_collections_are_there_and_empty(pool: sky.ComputePool) -> None:
    @sky.compute
    def counts() -> None:
        raise ValueError(sky.counter("seen").add(1))

    raised(lambda: counts() >> pool)
    error = raised(lambda: counts() >> pool)
    assert error.args == (2,)
    with pytest.raises(ValueError) as caught:
        sky.replay(error)
    assert caught.value.args == (1,)


def test_the_log_of_a_pool_names_the_command_and_the_list_of_pools_says_how_many(pool: sky.ComputePool) -> None:
    error = raised(lambda: plain(3) >> pool)
    failed_calls.find(call_of(error))  # it is written a moment later
    argv = [sys.executable, "-m", "skyward"]
    logs = subprocess.run([*argv, "logs", pool.name], capture_output=True, text=True, check=True)
    assert f"to run it again on this computer: sky replay {call_of(error)}\n" in logs.stdout
    listed = subprocess.run([*argv, "history", "--json"], capture_output=True, text=True, check=True)
    rows = [json.loads(line) for line in listed.stdout.splitlines()]
    assert call_of(error) in next(row for row in rows if row["pool"] == pool.name)["replayable"]


def test_two_programs_keep_their_calls_apart(pool: sky.ComputePool, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import skyward as sky\n"
        "with sky.ComputePool(console=False) as pool:\n"
        "    try:\n"
        "        pool.run(sky.compute(lambda: {}['theirs'])())\n"
        "    except KeyError as error:\n"
        "        print(error.__notes__[-1].split()[2].strip('`'))\n"
    )
    mine = raised(lambda: plain(3) >> pool)
    theirs = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=True).stdout.strip()
    with pytest.raises(KeyError, match="theirs"):
        sky.replay(theirs)
    with pytest.raises(ZeroDivisionError):
        sky.replay(mine)


def test_lines_are_shown_as_they_were_when_the_call_failed(state: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import skyward as sky\n"
        "@sky.compute\n"
        "def fail(value):\n"
        "    return 1 / value  # of then\n"
        "with sky.ComputePool(console=False) as pool:\n"
        "    try:\n"
        "        fail(0) >> pool\n"
        "    except ZeroDivisionError as error:\n"
        "        print(error.__notes__[-1].split()[2].strip('`'))\n"
    )
    call = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=True).stdout.strip()
    program.touch()
    assert "has changed" not in sky_replay(call).stderr
    program.write_text("import os\n" * 20)
    edited = sky_replay(call).stderr
    assert f"- {program} has changed since: the code as it was then runs and is shown\n" in edited
    assert f'File "{program}", line 4, in fail\n    return 1 / value  # of then\n' in edited
    typed = [("(Pdb) ", "q\n")]
    shown, _ = in_a_terminal([sys.executable, "-m", "skyward", "replay", call, "--pdb"], typed)
    assert "-> return 1 / value  # of then\r\n" in shown


def test_a_call_whose_machine_was_lost_cannot_be_run_again_and_this_is_said(state: Path) -> None:
    with sky.ComputePool(console=False, retries=0) as pool:
        future = sleeps() > pool
        until(lambda: "sleeps" in str(pool.stacks()))
        for greeting in pool._engine.greetings():  # pyright: ignore[reportPrivateUsage]
            os.kill(greeting["pid"], signal.SIGKILL)
        error = raised(lambda: future.result(60))
    assert isinstance(error, NodeLost)
    with pytest.raises(InvalidArgument, match="its machine was lost while it ran, so no line of it has failed"):
        sky.replay(error)


def test_the_command_goes_on_in_the_python_of_the_program(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it has its packages; `sky` itself may be installed elsewhere."""
    other = tmp_path / "python"
    other.write_text(f'#!/bin/sh\necho "started by another" >&2\nexec {sys.executable} "$@"\n')
    other.chmod(0o755)
    with sky.ComputePool(console=False) as pool:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", str(other))
            error = raised(lambda: plain(3) >> pool)
            failed_calls.find(call_of(error))  # it is written a moment later
    done = sky_replay(call_of(error))
    assert "started by another" in done.stderr
    assert "it failed as on the node: ZeroDivisionError" in done.stderr


def test_another_python_is_refused_with_the_command_that_works(
    pool: sky.ComputePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = raised(lambda: plain(3) >> pool)
    failed_calls.find(call_of(error))
    monkeypatch.setattr(sys, "version_info", (3, 99, 0))
    command = re.escape(f"`{sys.executable} -m skyward replay {call_of(error)}`")
    with pytest.raises(InvalidArgument, match=rf"with Python 3\.\d+, and this is 3\.99: .* {command}"):
        Replay(error)


def test_a_plugins_hook_that_fails_when_the_pool_opens_is_reproduced(state: Path) -> None:
    @contextmanager
    def around(info: sky.InstanceInfo) -> Iterator[None]:
        if info.rank == 1:
            raise Broken(1, "in the hook")
        yield

    with pytest.raises(PluginError) as failed:
        with sky.ComputePool(nodes=2, console=False, plugins=[sky.Plugin.create("mine").with_around_app(around)]):
            pass
    again = Replay(failed.value)
    assert again.rank == 1
    ended = again.run()
    assert again.compared(ended)[0].endswith("Broken: 1 in the hook")
    assert frames(ended.text) == frames(again.call.error) != []


EXAMPLES = Path(__file__).parents[2] / "examples"
FAILING = {
    "tutorial/04_failures.py": 1,
    "tutorial/08_limits.py": 2,
    "guides/18_sweeps.py": 4,
    "guides/19_history.py": 1,
    "guides/26_errors_and_retries.py": 5,
    "guides/28_checkpoints.py": 1,
    "guides/32_replay.py": 1,
}


@pytest.mark.parametrize("name", FAILING)
def test_what_fails_in_an_example_fails_here_too(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYWARD_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    argv = [sys.executable, str(EXAMPLES / name)]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    if name == "guides/32_replay.py":
        assert "it fails here, too: invalid literal for int()" in ended.stdout
    found = kept()
    assert len(found) == FAILING[name]
    for call in found:
        again = Replay(call.id)
        told = again.compared(now := again.run())
        assert told[0].startswith("it failed as on the node: ")
        assert frames(now.text) == frames(call.error)
