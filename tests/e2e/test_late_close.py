"""Pools that are not closed by their program: dropped, or open when it ends. Nothing is left, and a warning says so."""

from __future__ import annotations

import gc
import glob
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

import skyward as sky
from tests.support.leftovers import leftover_processes
from tests.support.waiting import until

HEAD = """
import atexit, contextlib, gc, multiprocessing, os, sys, threading, time
if __name__ == "__main__":
    atexit.register(lambda: last())
last = lambda: None
import skyward as sky

@sky.compute
def echo(x, seconds=0.0):
    time.sleep(seconds)
    return x

@sky.compute
def numbers():
    for i in range(1 << 40):
        yield i

def new(**options):
    return sky.ComputePool(**{"console": False, "grace": 1, **options})

def opened(**options):
    pool = new(**options).__enter__()
    assert echo(1) >> pool == 1
    return pool

def wait_for(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)

def ended():
    return not [thread for thread in threading.enumerate() if thread.name.startswith("skyward")]
"""

# what a program does; what it prints, its exit status, the last line of its errors, how many pools it did not close
PROGRAMS: dict[str, tuple[str, str, int, str, int]] = {
    "returns": ("pool = opened(nodes=2)", "", 0, "", 1),
    "exits": ("pool = opened()\nsys.exit(3)", "", 3, "", 1),
    "raises": ("pool = opened()\nraise RuntimeError('mine')", "", 1, "RuntimeError: mine", 1),
    "has a call running": (
        """
def main():
    pool = opened()
    echo(1, 600) > pool
    wait_for(lambda: pool._engine.up())
main()
""",
        "",
        0,
        "",
        1,
    ),
    "has calls waiting": ("pool = opened()\nfutures = [echo(i, 600) > pool for i in range(50)]", "", 0, "", 1),
    "has read half of a stream": ("pool = opened()\nstream = numbers() >> pool\nprint(next(stream))", "0", 0, "", 1),
    "has a stream of a pool that it dropped": (
        "stream = numbers() >> opened()\ngc.collect()\nprint([next(stream) for _ in range(2000)][-1])",
        "1999",
        0,
        "",
        1,
    ),
    "drops a stream of a pool that it dropped": (
        "stream = numbers() >> opened()\nnext(stream)\ndel stream\nwait_for(lambda: gc.collect() >= 0 and ended())",
        "",
        0,
        "",
        1,
    ),
    "has begun a generator": (
        """
def generator():
    with new() as pool:
        yield echo(5) >> pool
kept = generator()
print(next(kept))
""",
        "5",
        0,
        "",
        1,
    ),
    "drops a generator": (
        """
def generator():
    with new() as pool:
        yield echo(5) >> pool
print(next(generator()))
wait_for(ended)
""",
        "5",
        0,
        "",
        0,
    ),
    "has a daemon thread in the block": (
        """
def work():
    with new() as pool:
        echo(1) >> pool
        ready.set()
        echo(1, 600) >> pool
ready = threading.Event()
threading.Thread(target=work, daemon=True).start()
ready.wait(60)
""",
        "",
        0,
        "",
        1,
    ),
    "has daemon threads that wait for calls": (
        """
pool = opened(nodes=2)
for act in (lambda: echo(1, 600) >> pool, lambda: echo(1, 600) @ pool, lambda: list(numbers() >> pool)):
    threading.Thread(target=act, daemon=True).start()
""",
        "",
        0,
        "",
        1,
    ),
    "has a daemon thread that opens a pool": (
        """
def work():
    pool = new()
    pool.on_event(lambda event: ready.set())
    pool.__enter__()
ready = threading.Event()
threading.Thread(target=work, daemon=True).start()
ready.wait(60)
""",
        "",
        0,
        "",
        -1,  # that depends on how far it comes
    ),
    "has a thread that opens and closes after the main one": (
        """
def work():
    threading.main_thread().join()
    with new(nodes=2) as pool:
        print(echo(6) >> pool)
threading.Thread(target=work).start()
""",
        "6",
        0,
        "",
        0,
    ),
    "has a thread that opens after the main one": (
        """
kept = []
def work():
    threading.main_thread().join()
    kept.append(opened())
threading.Thread(target=work).start()
""",
        "",
        0,
        "",
        1,
    ),
    "has calls in an executor of its own": (
        """
from concurrent.futures import ThreadPoolExecutor
pool = opened()
ThreadPoolExecutor(2).submit(lambda: print(echo(7, 0.5) >> pool))
""",
        "7",
        0,
        "",
        1,
    ),
    "drops it": ("pool = opened()\ndel pool\nwait_for(ended)\nprint('closed')", "closed", 0, "", 1),
    "drops it and ends": ("pool = opened()\ndel pool", "", 0, "", 1),
    "drops it in a cycle": (
        """
@contextlib.contextmanager
def around(pool, cluster):
    yield pool
class App:
    def __init__(self):
        self.pool = new(plugins=[sky.Plugin("around", around_client=around)])
        self.pool.on_event(self.heed)
        self.pool.__enter__()
    def heed(self, event):
        self.seen = event
        if isinstance(event, sky.events.PoolClosed):
            print("closed")
app = App()
del app
gc.collect()
wait_for(ended)
""",
        "closed",
        0,
        "",
        1,
    ),
    "drops it before a future": (
        "future = echo(8, 0.5) > opened()\ngc.collect()\nprint(future.result(60))\ndel future\nwait_for(ended)",
        "8",
        0,
        "",
        1,
    ),
    "drops it before a large result is read": (
        "future = echo(bytes(5_000_000)) > opened()\nwait_for(future.done)\ngc.collect()\nprint(len(future.result()))",
        "5000000",
        0,
        "",
        1,
    ),
    "closes it in a __del__ at the very end": (
        """
class Owner:
    def __del__(self):
        self.pool.close()
        print("is_active", self.pool.is_active)
owner = Owner()
owner.pool = opened()
""",
        "is_active False",
        0,
        "",
        1,
    ),
    "uses it in atexit handlers": (
        """
def last():  # after the pool is closed
    print(type(future.exception(60)).__name__)
pool = opened(nodes=2)
atexit.register(lambda: print(echo(9) >> pool))  # registered after it was opened: before it is closed
future = echo(1, 600) > pool
""",
        "9\nPoolClosed",
        0,
        "",
        1,
    ),
    "has two": (
        """
def tell(event):
    if isinstance(event, sky.events.PoolClosed):
        print(event.pool)
pools = [new(name=name) for name in ("first", "second")]
for pool in pools:
    pool.on_event(tell)
    pool.__enter__()
""",
        "second\nfirst",
        0,
        "",
        2,
    ),
    "has children of multiprocessing": (
        """
if __name__ == "__main__":
    pool = opened()
    for kind in ("fork", "spawn"):
        multiprocessing.get_context(kind).Process(target=time.sleep, args=(0.3,)).start()
""",
        "",
        0,
        "",
        1,
    ),
    "drops it in a forked child": (
        """
pool = opened(nodes=2)
child = os.fork()
if child == 0:
    del pool
    gc.collect()
    sys.exit(4)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4
print(echo(3) @ pool)
pool.close()
""",
        "[3, 3]",
        0,
        "",
        0,
    ),
    "never opens it": ("pool = new()\ndel pool\npool = new()", "", 0, "", 0),
}


def finished(path: Path, source: str, *flags: str) -> tuple[int, str, str]:
    """Runs a program to its end: status, output, errors. Nothing is left of it."""
    path.write_text(HEAD + source)
    program = subprocess.Popen(
        [sys.executable, *flags, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = program.communicate(timeout=90)
    except subprocess.TimeoutExpired:
        os.killpg(program.pid, signal.SIGKILL)
        pytest.fail(f"the program does not end: {program.communicate()}")
    places = {"/dev/shm", tempfile.gettempdir()}
    until(lambda: not leftover_processes(), 20)
    until(lambda: not [p for place in places for p in glob.glob(f"{place}/skyward-{program.pid}-*")], 10)
    return program.returncode, out.strip(), err.strip()


@pytest.mark.parametrize("what", PROGRAMS)
def test_a_pool_that_a_program_does_not_close_is_closed_with_it(tmp_path: Path, what: str) -> None:
    if sys.version_info[:2] == (3, 12) and "after the main one" in what:
        pytest.skip("Python 3.12 starts no thread once the main one has ended; opening a pool says so")
    source, said, status, last, unclosed = PROGRAMS[what]
    code, out, err = finished(tmp_path / "program.py", source, "-X", "dev")
    lines = err.splitlines()
    warned = [line for line in lines if "ResourceWarning: <ComputePool " in line]
    assert (code, out) == (status, said), err
    assert unclosed in (-1, len(warned)), err
    assert err.count("ResourceWarning: ") == 2 * len(warned), err  # each has a second line, on tracemalloc
    assert err.count("Traceback") == bool(last), err
    assert "Exception ignored" not in err
    assert not last or last in lines


@pytest.mark.parametrize("what", ["returns", "raises", "drops it", "has daemon threads that wait for calls"])
def test_the_warning_is_silent_unless_asked_for(tmp_path: Path, what: str) -> None:
    """As Python's own for files and sockets."""
    source, said, status, last, _ = PROGRAMS[what]
    code, out, err = finished(tmp_path / "program.py", source)
    assert (code, out) == (status, said), err
    assert "ResourceWarning" not in err
    assert err.splitlines()[-1:] == ([last] if last else [])


@pytest.mark.parametrize("what", ["returns", "drops it and ends", "has two"])
def test_a_pool_is_closed_although_warnings_are_errors(tmp_path: Path, what: str) -> None:
    source, said, *_ = PROGRAMS[what]
    code, out, err = finished(tmp_path / "program.py", source, "-W", "error::ResourceWarning")
    assert (code, out) == (0, said), err
    assert "Exception ignored" in err  # as for a file that is not closed
    assert "ResourceWarning: <ComputePool " in err


def test_a_pool_is_closed_as_soon_as_it_is_dropped() -> None:
    """Without waiting for the garbage collector, and without making the one who drops it wait."""
    told: list[sky.events.Event] = []
    pool = sky.ComputePool(console=False, name="dropped")
    pool.on_event(told.append)
    pool.__enter__()
    gc.disable()
    try:
        with pytest.warns(
            ResourceWarning, match=r"<ComputePool dropped open, 1 x Local> was dropped .*pool\.close\(\)"
        ):
            del pool
    finally:
        gc.enable()
    until(lambda: isinstance(told[-1], sky.events.PoolClosed))
    until(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("skyward")])
