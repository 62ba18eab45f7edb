"""What goes wrong around a pool under stress: processes stopped for moments or killed, and cores that are taken."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tests.support.leftovers import marked

__all__ = ["hogs", "kill", "pauses", "pools_in_another_namespace"]

_HOG = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    sum(range(100_000))"


_POOLS = """
import sys
import skyward as sky
while True:
    with sky.ComputePool(nodes=1, console=False) as pool:
        assert sky.compute(len)(bytes(2_000_000)) >> pool == 2_000_000
    print("closed", flush=True)
"""
_NAMESPACE = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]


def kill(pid: int, number: int = signal.SIGKILL) -> bool:
    """Sends a signal to a process of this test run; False if it is gone."""
    try:
        if not marked(pid):
            return False
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


@contextmanager
def hogs(count: int = 2) -> Iterator[None]:
    """Processes that each burn a core until the block is left, or this process is gone."""
    burning = [subprocess.Popen([sys.executable, "-c", _HOG]) for _ in range(count)]
    try:
        yield
    finally:
        for hog in burning:
            hog.kill()
            hog.wait()


@contextmanager
def pools_in_another_namespace() -> Iterator[None]:
    """Pools are opened and closed, one after the other, by a program that shares /dev/shm and sees no process of ours.

    Without the right to make namespaces the program runs beside this one.
    """
    possible = subprocess.run([*_NAMESPACE, "true"], capture_output=True, check=False).returncode == 0
    beside = subprocess.Popen(
        [*(_NAMESPACE if possible else []), sys.executable, "-c", _POOLS], stdout=subprocess.PIPE, text=True
    )
    assert beside.stdout is not None
    try:
        assert beside.stdout.readline() == "closed\n"
        yield
        assert beside.poll() is None, "the program in another namespace has failed"
    finally:
        beside.kill()
        beside.communicate()


@contextmanager
def pauses(pids: Callable[[], list[int]], rng: random.Random, longest: float = 0.1) -> Iterator[None]:
    """Stops one of the processes at a time, for a moment, again and again, until the block is left."""
    over = threading.Event()
    own = random.Random(rng.random())
    problems: list[BaseException] = []

    def run() -> None:
        while not over.wait(own.expovariate(16)):
            choice = pids()
            if choice and kill(pid := own.choice(choice), signal.SIGSTOP):
                over.wait(own.uniform(0, longest))
                kill(pid, signal.SIGCONT)

    def guarded() -> None:
        try:
            run()
        except BaseException as exc:
            problems.append(exc)

    thread = threading.Thread(target=guarded, name="pauses")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    if problems:
        raise problems[0]
