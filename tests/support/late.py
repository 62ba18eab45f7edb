"""Programs that do not close their pool, for tests on hosts and on the test cloud; {provider} is put in."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.programs import USUAL_SIGNALS

__all__ = ["PROGRAMS", "check", "finished"]

_HEAD = """
import sys, threading, time
import skyward as sky
{imports}

@sky.compute
def echo(x, seconds=0.0):
    time.sleep(seconds)
    return x

def new():
    return sky.ComputePool(provider={provider}, nodes=2, name="late", console="plain", grace=1)

def opened():
    pool = new().__enter__()
    assert echo(1) @ pool == [1, 1]
    return pool
"""

# what a program does; what it prints, its exit status, the last line of its errors, whether it is warned
PROGRAMS: dict[str, tuple[str, str, int, str, bool]] = {
    "ends with a call running": ("pool = opened()\nfuture = echo(1, 600) > pool", "", 0, "", True),
    "raises": ("pool = opened()\nraise RuntimeError('mine')", "", 1, "RuntimeError: mine", True),
    "drops it": (
        """
closed = threading.Event()
pool = new()
pool.on_event(lambda event: isinstance(event, sky.events.PoolClosed) and closed.set())
pool.__enter__()
del pool
print(closed.wait(60))
""",
        "True",
        0,
        "",
        True,
    ),
    "drops it and ends": ("pool = opened()\ndel pool", "", 0, "", True),
    "has a thread that opens and closes after the main one": (
        """
def work():
    threading.main_thread().join()
    with new() as pool:
        print(echo(6) @ pool)
threading.Thread(target=work).start()
""",
        "[6, 6]",
        0,
        "",
        False,
    ),
}


def finished(path: Path, what: str, provider: str, imports: str = "") -> tuple[int, str, str]:
    """Runs a program to its end: status, output, errors."""
    path.write_text(_HEAD.replace("{provider}", provider).replace("{imports}", imports) + PROGRAMS[what][0])
    program = subprocess.Popen(
        [*USUAL_SIGNALS, sys.executable, "-W", "default::ResourceWarning", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = program.communicate(timeout=150)
    except subprocess.TimeoutExpired:
        os.killpg(program.pid, signal.SIGKILL)
        pytest.fail(f"the program does not end: {program.communicate()}")
    return program.returncode, out.strip(), err.strip()


def check(what: str, code: int, out: str, err: str) -> None:
    """Fails if a program has not ended as it should."""
    _, said, status, last, warned = PROGRAMS[what]
    lines = err.splitlines()
    assert (code, out) == (status, said), err
    assert err.count("ResourceWarning: <ComputePool late open") == warned, err
    assert err.count("Traceback") == bool(last), err
    assert "Exception ignored" not in err
    assert not last or last in lines
    assert [line for line in lines if line.startswith("skyward: ") and "closed" in line], err
