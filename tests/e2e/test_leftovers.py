"""After every kind of end nothing is left: of a body, of a program, of a fork, of a pool among others."""

from __future__ import annotations

import contextlib
import glob
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

import skyward as sky
from skyward.errors import NestedPoolError, PoolClosed, TaskTimeout
from tests.support.leftovers import leftover_processes
from tests.support.processes import gone, seen
from tests.support.waiting import read_until, until

Script = Callable[..., "subprocess.Popen[str]"]


@sky.compute
def echo(x: Any) -> Any:
    return x


@sky.compute
def call(fn: Callable[..., Any], *args: Any) -> Any:
    return fn(*args)


@pytest.fixture
def solo() -> Iterator[sky.ComputePool]:
    """A pool of one node for one test alone."""
    with sky.ComputePool(console=False, grace=2) as opened:
        yield opened


def processes() -> list[int]:
    """Processes of this test run but this one and its ordinary helpers."""
    return [int(process.partition(":")[0]) for process in leftover_processes()]


def files_of(pid: int) -> list[str]:
    return [p for d in {"/dev/shm", tempfile.gettempdir()} for p in glob.glob(f"{d}/skyward-{pid}-*")]


def double_fork(mark: Path) -> None:
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            mark.write_text(str(os.getpid()))
            time.sleep(600)
        os._exit(0)
    while not mark.exists() or not mark.read_text():
        time.sleep(0.01)


def popen(mark: Path) -> None:
    process = subprocess.Popen(["sleep", "600"], start_new_session=True)
    mark.write_text(str(process.pid))


def shell_background(mark: Path) -> None:
    subprocess.run(["sh", "-c", f"(trap '' TERM HUP; sleep 600 & echo $! > {mark}; wait) &"], check=True)
    while not mark.exists() or not mark.read_text():
        time.sleep(0.01)


def fork_returns(mark: Path) -> str:
    if os.fork() == 0:
        mark.write_text(str(os.getpid()))
        return "from the child"
    while not mark.exists() or not mark.read_text():
        time.sleep(0.01)
    return "from the parent"


def fork_raises(mark: Path) -> str:
    if os.fork() == 0:
        mark.write_text(str(os.getpid()))
        raise ValueError("from the child")
    while not mark.exists() or not mark.read_text():
        time.sleep(0.01)
    return "from the parent"


def mp_process(mark: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,), daemon=False)
    process.start()
    mark.write_text(str(process.pid))


@pytest.mark.parametrize(
    "body", [double_fork, popen, shell_background, fork_returns, fork_raises, mp_process], ids=lambda b: b.__name__
)
def test_processes_that_a_body_leaves_end_with_the_call(
    solo: sky.ComputePool, tmp_path: Path, body: Callable[[Path], Any]
) -> None:
    """Row 12: 0 leftover processes; one result; the next call is fine."""
    before = echo(os.getpid()) >> solo and len(processes())
    result = call(body, tmp_path / "mark") >> solo
    assert result in (None, "from the parent")
    pid = int((tmp_path / "mark").read_text())
    until(lambda: gone(pid))
    assert echo(1) >> solo == 1
    until(lambda: len(processes()) <= before + 1)  # multiprocessing's own tracker may stay


@pytest.mark.parametrize("body", [double_fork, popen], ids=lambda b: b.__name__)
def test_processes_of_a_body_that_dies_end_too(
    solo: sky.ComputePool, tmp_path: Path, body: Callable[[Path], Any]
) -> None:
    """Rows 1 and 12."""

    def then_die() -> None:
        body(tmp_path / "mark")
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(sky.errors.TaskCrashed):
        call(then_die) >> solo
    pid = int((tmp_path / "mark").read_text())
    until(lambda: gone(pid))
    assert echo(1) >> solo == 1


def test_a_multiprocessing_pool_that_a_body_leaves_ends(solo: sky.ComputePool) -> None:
    """Row 12: also one that replaces its dead workers."""

    def leave(keep: bool) -> list[int]:
        import builtins
        import multiprocessing as mp

        workers = mp.get_context("fork").Pool(2)
        if keep:
            builtins.kept = workers  # type: ignore[attr-defined]
        return workers.map(abs, [-1, -2])

    before = len(processes())
    assert call(leave, False) >> solo == [1, 2]
    until(lambda: len(processes()) <= before + 1)
    assert call(leave, True) >> solo == [1, 2]
    until(lambda: len(processes()) <= before + 1)
    assert (echo(1) > solo).result(45) == 1


def test_threads_that_a_body_leaves_do_no_harm(solo: sky.ComputePool) -> None:
    """Row 12."""

    def leave() -> None:
        threading.Thread(target=time.sleep, args=(600,)).start()
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()

    call(leave) >> solo
    assert [echo(i) >> solo for i in range(5)] == list(range(5))
    began = time.monotonic()
    solo.close()
    assert time.monotonic() - began < 45


def test_a_child_that_falls_out_of_a_generator_sends_nothing(solo: sky.ComputePool) -> None:
    """Row 12: a forked copy of the runner must not speak for it."""

    @sky.compute
    def numbers() -> Iterator[int]:
        for i in range(6):
            if i == 2:
                os.fork()
            yield i

    assert list(numbers() >> solo) == [0, 1, 2, 3, 4, 5]
    assert (echo(1) > solo).result(45) == 1


def test_a_child_that_returns_a_large_result_leaves_no_file(solo: sky.ComputePool) -> None:
    """Rows 11 and 12."""

    def large() -> bytearray:
        pid = os.fork()
        if pid:
            os.waitpid(pid, 0)
        return bytearray(2 << 20)

    assert len(call(large) >> solo) == 2 << 20
    directory = Path(solo._store.directory)
    until(lambda: not [f for f in directory.glob("*") if f.is_file() and f.stat().st_size >= 2 << 20])


def test_nothing_grows_over_many_calls(solo: sky.ComputePool) -> None:
    """N17: file descriptors, files and processes, here and on the node, over 200 calls of all kinds."""

    def mixed(i: int) -> Any:
        if i % 4 == 0:
            return bytearray(1_500_000)
        if i % 4 == 1:
            raise ValueError(i)
        if i % 4 == 2:
            subprocess.Popen(["sleep", "600"])
        return i

    def once() -> None:
        futures = [call(mixed, i) > solo for i in range(100)]
        for future in futures:
            future.exception(45)
            if future.exception() is None:
                future.result()

    def counts() -> tuple[int, int, int, int]:
        running = seen(processes(), lambda pid: len(os.listdir(f"/proc/{pid}/fd")))
        descriptors = sum(count for _, count in running)
        files = sum(len(fs) for _, _, fs in os.walk(solo._store.directory))
        return len(os.listdir("/proc/self/fd")), descriptors, files, len(processes())

    once()
    before = counts()
    for _ in range(2):
        once()
    until(lambda: all(now <= was + 2 for now, was in zip(counts(), before, strict=True)))


TIMES = 10 if os.environ.get("SKYWARD_SOAK") else 1

PROGRAM = """
import os, signal, sys, threading, time
import skyward as sky

@sky.compute
def body(seconds):
    print("in the body", flush=True)
    time.sleep(seconds)

def main():
    how = sys.argv[1]
    print("begin", flush=True)
    with sky.ComputePool(nodes=2, console=False, grace=1) as pool:
        body(0) @ pool
        print("open", flush=True)
        if how == "exception":
            raise RuntimeError("mine")
        if how == "exit":
            sys.exit(3)
        if how == "_exit":
            os._exit(4)
        if how == "call":
            body(60) >> pool
        if how == "broadcast":
            body(60) @ pool
        if how == "thread":
            threading.Thread(target=lambda: body(60) >> pool, daemon=True).start()
            time.sleep(60)
        if how == "swallow":
            ended = pool.on_event(lambda e: isinstance(e, sky.events.CallStarted) and print("running", flush=True))
            try:
                body(60) >> pool
            except KeyboardInterrupt:
                ended()
                print("caught", flush=True)
            body(0) >> pool
            print("went on", flush=True)
    print("closed", flush=True)

if sys.argv[1] == "unclosed":
    pool = sky.ComputePool(nodes=2, console=False, grace=1).__enter__()
    body(0) >> pool
    print("open", flush=True)
    body(60) > pool
else:
    main()
"""


def finish(program: subprocess.Popen[str], seconds: float = 45) -> tuple[str, str]:
    """The program's output; it has ended by itself, with nothing left of it."""
    try:
        out, err = program.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(program.pid, signal.SIGKILL)
        program.communicate()
        raise
    until(lambda: not processes(), what=leftover_processes)
    until(lambda: not files_of(program.pid))
    return out, err


@pytest.mark.parametrize(
    ("how", "status", "shown"),
    [
        ("normal", 0, ""),
        ("exception", 1, "RuntimeError: mine"),
        ("exit", 3, ""),
        ("_exit", 4, ""),
        ("unclosed", 0, ""),
    ],
)
def test_nothing_is_left_however_a_program_ends(script: Script, how: str, status: int, shown: str) -> None:
    """Row 36: the user's exception is what the user sees."""
    program = script(PROGRAM, how)
    _, err = finish(program)
    assert program.returncode == status
    assert shown in err
    if not shown:
        assert err == ""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("how", ["call", "thread"])
def test_a_signal_to_end_is_like_leaving_the_block(script: Script, number: int, how: str) -> None:
    """Row 35."""
    program = script(PROGRAM, how)
    read_until(program, "open")
    program.send_signal(number)
    _, err = finish(program)
    assert program.returncode in (128 + number, -number)
    assert err == "" or how == "thread"  # a thread of the user's own says that its call has ended


@pytest.mark.parametrize("how", ["call", "broadcast"])
def test_ctrl_c_stops_the_call_and_closes_the_pool(script: Script, how: str) -> None:
    """Row 32: KeyboardInterrupt is shown, the prompt is back within 10 s."""
    program = script(PROGRAM, how)
    read_until(program, "open")
    began = time.monotonic()
    os.killpg(program.pid, signal.SIGINT)
    _, err = finish(program)
    assert time.monotonic() - began < 45
    assert err.rstrip().endswith("KeyboardInterrupt")
    assert err.count("Traceback") == 1
    assert program.returncode in (1, 130, -signal.SIGINT)


def test_a_program_may_go_on_after_ctrl_c(script: Script) -> None:
    """Row 32: only the call is cancelled."""
    program = script(PROGRAM, "swallow")
    read_until(program, "running")
    os.killpg(program.pid, signal.SIGINT)
    out, err = finish(program)
    assert program.returncode == 0, err
    assert out.split("\n")[-4:] == ["caught", "went on", "closed", ""]


def test_ctrl_c_twice_ends_at_once(script: Script) -> None:
    """Row 33."""
    program = script(PROGRAM, "call")
    read_until(program, "open")
    began = time.monotonic()
    os.killpg(program.pid, signal.SIGINT)
    time.sleep(0.02)
    os.killpg(program.pid, signal.SIGINT)
    finish(program)
    assert time.monotonic() - began < 45


def test_no_sequence_of_interrupts_leaves_anything(script: Script) -> None:
    """Rows 33 and 34: random offsets, one to three times, from the first line to the end."""
    rng = random.Random(33)
    for _ in range(4 * TIMES):
        program = script(PROGRAM, rng.choice(["call", "normal", "broadcast"]))
        read_until(program, "begin")
        time.sleep(rng.uniform(0, 1.6))
        for _ in range(rng.randint(1, 3)):
            if program.poll() is None:
                os.killpg(program.pid, signal.SIGINT)
            time.sleep(rng.uniform(0, 0.15))
        finish(program)


@pytest.mark.parametrize("moment", ["opening", "call", "closing"])
def test_nothing_is_left_of_a_client_that_is_killed(script: Script, moment: str) -> None:
    """Row 31: the keeper ends everything within seconds."""
    rng = random.Random(31)
    for _ in range(2 * TIMES):
        program = script(PROGRAM, "call" if moment == "call" else "normal")
        read_until(program, "begin" if moment == "opening" else "open")
        time.sleep(rng.uniform(0, {"opening": 0.9, "call": 0.1, "closing": 0.03}[moment]))
        program.kill()
        finish(program)


FORKS = """
import os, sys, time, multiprocessing, signal, warnings
import skyward as sky

warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.12 on a fork beside threads is warned of

@sky.compute
def echo(x):
    return x

def use(pool):
    for act in (lambda: echo(1) >> pool, lambda: echo(1) @ pool, lambda: pool.executor, lambda: pool.__enter__()):
        try:
            act()
        except sky.errors.ForkedPoolError as exc:
            if str(os.getppid()) in str(exc):  # it says which process to use
                continue
        os._exit(9)

def child(how):
    use(pool)
    if how == "exit":
        sys.exit(5)
    if how == "_exit":
        os._exit(6)
    if how == "close":
        pool.close()
        sys.exit(7)

with sky.ComputePool(nodes=2, console=False) as pool:
    assert echo(1) >> pool == 1
    for how, code in (("exit", 5), ("_exit", 6), ("close", 7)):
        pid = os.fork()
        if pid == 0:
            child(how)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == code, how
        assert echo(2) @ pool == [2, 2]
    process = multiprocessing.get_context("fork").Process(target=child, args=("exit",))
    process.start()
    process.join()
    assert process.exitcode == 5
    assert [echo(i) >> pool for i in range(20)] == list(range(20))
    if sys.argv[1] == "outlive":
        if os.fork() == 0:
            os.close(1)
            os.close(2)
            time.sleep(60)
            os._exit(0)
        print("open", flush=True)
        time.sleep(60)
print("closed", flush=True)
"""


def test_a_forked_child_cannot_use_the_pool_nor_close_it(script: Script) -> None:
    """Row 37: any use raises ForkedPoolError and names the process to use; a child's exit harms no pool."""
    program = script(FORKS, "")
    out, err = finish(program)
    assert (out, err, program.returncode) == ("closed\n", "", 0)


def test_a_child_that_outlives_a_killed_client_does_not_keep_the_pool_alive(script: Script) -> None:
    """Rows 31 and 37."""
    program = script(FORKS, "outlive")
    read_until(program, "open")
    started = seen(psutil.Process(program.pid).children(), lambda process: " ".join(process.cmdline()))
    children = [process for process, line in started if "program.py" in line]
    assert len(children) == 1
    program.kill()
    program.wait()
    try:
        until(lambda: set(processes()) <= {children[0].pid})
        until(lambda: not files_of(program.pid))
        assert children[0].is_running()
    finally:
        children[0].kill()
    finish(program)


def test_two_pools_at_once_do_not_mix() -> None:
    """Row 39: nested blocks; closing one leaves the other."""
    pid = call(os.getpid)
    with sky.ComputePool(nodes=2, console=False) as one:
        with sky.ComputePool(nodes=2, console=False) as two:
            pids = [set(pid @ one), set(pid @ two)]
            assert len(pids[0] | pids[1]) == 4
            both = [echo((i, j)) > (one, two)[j] for i in range(50) for j in range(2)]
            assert [f.result(45) for f in both] == [(i, j) for i in range(50) for j in range(2)]
            assert one._store.directory != two._store.directory
        assert set(pid @ one) == pids[0]
    with pytest.raises(PoolClosed):
        echo(1) >> one


def test_two_programs_at_once_do_not_mix(script: Script) -> None:
    """Row 39: killing one client leaves the other's pool alone."""
    first = script(PROGRAM, "call")
    second = script(PROGRAM, "swallow")
    read_until(first, "open")
    read_until(second, "open")
    first.kill()
    first.communicate()
    until(lambda: not files_of(first.pid))
    os.killpg(second.pid, signal.SIGINT)
    out, err = finish(second)
    assert second.returncode == 0, err
    assert "went on" in out


def open_nested(**options: Any) -> int:
    with sky.ComputePool(nodes=2, console=False, **options) as inner:
        return sum(call(lambda: 1) @ inner)


def test_a_pool_in_a_body_is_refused(solo: sky.ComputePool) -> None:
    """Row 40."""
    with pytest.raises(NestedPoolError, match="allow_nested"):
        call(open_nested) >> solo
    assert echo(1) >> solo == 1


def test_a_pool_in_a_body_works_when_it_is_meant(solo: sky.ComputePool) -> None:
    """Row 40."""
    before = len(processes())

    def nested() -> int:
        return open_nested(allow_nested=True)

    assert call(nested) >> solo == 2
    until(lambda: len(processes()) <= before)


@pytest.mark.parametrize("how", ["timeout", "crash"])
def test_a_nested_pool_ends_with_its_body(solo: sky.ComputePool, tmp_path: Path, how: str) -> None:
    """Rows 4 and 40: stopped or crashed; neither processes nor files stay."""
    before = len(processes())

    def nested(mark: Path, how: str) -> None:
        with sky.ComputePool(console=False, allow_nested=True) as inner:
            mark.write_text(str(os.getpid()))
            if how == "crash":
                os.kill(os.getpid(), signal.SIGKILL)
            call(time.sleep, 60) >> inner

    mark = tmp_path / "mark"
    with pytest.raises((TaskTimeout, sky.errors.TaskCrashed)):
        call(nested, mark, how).with_timeout(5) >> solo
    assert echo(1) >> solo == 1
    until(lambda: len(processes()) <= before)
    pid = int(mark.read_text())
    until(lambda: not files_of(pid))


def test_closing_from_another_thread_ends_a_running_call() -> None:
    """Row 38."""
    with sky.ComputePool(nodes=2, console=False, grace=1) as pool:
        calls = [call(time.sleep, 60) > pool for _ in range(5)]
        until(lambda: calls[0].running())
        closing = threading.Thread(target=pool.close)
        closing.start()
        for future in calls:
            assert isinstance(future.exception(45), PoolClosed)
        with pytest.raises(PoolClosed):
            echo(1) >> pool
        closing.join(10)
        assert not closing.is_alive()
    assert not pool.is_active


def test_a_pool_can_be_closed_twice_and_opened_again() -> None:
    """Row 38."""
    pool = sky.ComputePool(console=False)
    for i in range(2):
        with pool:
            assert echo(i) >> pool == i
        pool.close()
        pool.close()
    with pool, pytest.raises(PoolClosed):
        pool.__enter__()


def test_closing_from_many_threads_at_once_returns_when_it_is_closed() -> None:
    """Row 38: idempotent; whoever returns from close() finds the pool closed."""
    pool = sky.ComputePool(console=False).__enter__()

    def close() -> str:
        pool.close()
        return repr(pool)

    with ThreadPoolExecutor(8) as threads:
        states = list(threads.map(lambda _: close(), range(8)))
    assert all(" closed" in state for state in states), states


def test_closing_a_pool_that_another_thread_opens_ends_the_opening() -> None:
    """Whoever returns from close() finds the pool closed, with nothing left of it."""
    entered, go, errors, before = threading.Event(), threading.Event(), list[BaseException](), len(processes())

    @contextlib.contextmanager
    def slow(_: object, __: object) -> Iterator[None]:
        entered.set()
        go.wait(60)
        yield

    pool = sky.ComputePool(nodes=2, console=False, plugins=[sky.Plugin("slow", around_client=slow)])

    def enter() -> None:
        try:
            pool.__enter__()
        except BaseException as exc:
            errors.append(exc)

    opening = threading.Thread(target=enter)
    opening.start()
    assert entered.wait(60)
    closing = threading.Thread(target=pool.close)
    closing.start()
    until(lambda: pool._state._unwanted)
    go.set()
    closing.join(60)
    assert " closed" in repr(pool)
    until(lambda: len(processes()) <= before)
    opening.join(60)
    assert [type(error) for error in errors] == [PoolClosed]
    assert "closed while it was opening" in str(errors[0])


def test_sixteen_threads_use_one_pool(solo: sky.ComputePool) -> None:
    """Row 38."""

    def use(k: int) -> list[Any]:
        got = [echo((k, i)) >> solo for i in range(20)]
        got += list(sky.gather(*(echo((k, i)) for i in range(20, 30))) >> solo)
        got += [(k, 30) for _ in (echo(k) @ solo)]
        return got

    with ThreadPoolExecutor(16) as threads:
        for k, got in enumerate(threads.map(use, range(16))):
            assert got == [(k, i) for i in range(31)]


def test_a_pool_opened_and_closed_in_a_thread_works() -> None:
    """Row 38."""

    def use() -> int:
        with sky.ComputePool(console=False) as pool:
            return echo(3) >> pool

    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(use).result(45) == 3


def test_a_failed_opening_leaves_nothing() -> None:
    """Row 36: the half-built pool unwinds by the same path."""

    def explode(*_: object) -> Any:
        raise RuntimeError("hook")

    plugin = sky.Plugin("bad", around_app=explode)
    with pytest.raises(sky.errors.PluginError, match="bad"), sky.ComputePool(nodes=2, plugins=[plugin], console=False):
        pass
    until(lambda: not processes(), what=leftover_processes)
    assert not files_of(os.getpid())
    assert sys.exc_info() == (None, None, None)
