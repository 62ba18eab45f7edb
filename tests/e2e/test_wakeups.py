"""How many threads a call wakes, over all processes: each costs more than what it does, most of all on a busy machine.

The fewest of several rounds count, since other programs make threads wait for each other, too.
"""

from __future__ import annotations

import errno
import fcntl
import os
import pty
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

import psutil

import skyward as sky
from tests.support.processes import family, gone
from tests.support.waiting import until

ROUNDS, CALLS = 100, 50
IN_RUNNER = 2.0  # for a call that is waited for; 1.0 to 1.2 when this was written
IN_ALL = 6.0  # 4.7 to 5.1
OF_BROADCAST = 21.0  # to four nodes; 16 to 18


@sky.compute
def process() -> int:
    return os.getpid()


def switches(pid: int) -> int:
    """How often threads of a process have gone to sleep."""
    count = 0
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        try:
            count += int(status.read_text().partition("\nvoluntary_ctxt_switches:")[2].split()[0])
        except (FileNotFoundError, ProcessLookupError):
            pass  # the thread has ended
    return count


def processes() -> list[int]:
    """This process, and all that it has started."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        children.setdefault(parent, []).append(int(stat.parent.name))
    found = [os.getpid()]
    for pid in found:
        found += children.get(pid, [])
    return found


def fewest(pids: list[int], act: Callable[[], object], enough: float) -> float:
    """How often threads went to sleep for each call of `act`; ends with the first round that is below `enough`."""
    least = float("inf")
    for _ in range(ROUNDS):
        before = sum(map(switches, pids))
        for _ in range(CALLS):
            act()
        least = min(least, (sum(map(switches, pids)) - before) / CALLS)
        if least < enough:
            break
    return least


def test_a_call_wakes_its_runner_once_and_few_threads_in_all() -> None:
    with sky.ComputePool(nodes=1, console=False) as pool:
        runner = process() >> pool
        assert fewest([runner], lambda: process() >> pool, IN_RUNNER) < IN_RUNNER
        assert fewest(processes(), lambda: process() >> pool, IN_ALL) < IN_ALL


def test_a_broadcast_wakes_few_threads() -> None:
    with sky.ComputePool(nodes=4, console=False) as pool:
        assert len(process() @ pool) == 4
        assert fewest(processes(), lambda: process() @ pool, OF_BROADCAST) < OF_BROADCAST


def test_the_processes_of_a_local_pool_share_the_session_of_their_client() -> None:
    """Linux shares busy cores out among sessions first, so that a wake-up of another one waits for its turn. With two
    busy cores, a broadcast to four nodes took 15 ms where each runner had a session, and takes 1.5 ms.
    """
    with sky.ComputePool(nodes=2, console=False) as pool:
        runners = process() @ pool
        started = [process.pid for process in family(pool._fleet.by_node[0].keeper.pid)]
        assert {os.getsid(pid) for pid in started} == {os.getsid(0)}
        assert os.getpgid(0) not in map(os.getpgid, started), "Ctrl-C in a terminal would reach them"
        assert [os.getpgid(runner) for runner in runners] == runners, "each is killed with what its bodies have started"


IN_A_TERMINAL = """
import skyward as sky

@sky.compute
def ask():
    try:
        open("/dev/tty").close()
    except OSError as exc:
        return exc.errno

open("/dev/tty").close()
with sky.ComputePool(console=False) as pool:
    print(ask() >> pool)
"""


def test_bodies_cannot_ask_at_the_terminal_of_their_client() -> None:
    """A process that is not in its foreground would be stopped there."""
    ours, theirs = pty.openpty()
    try:
        program = subprocess.Popen(
            [sys.executable, "-c", IN_A_TERMINAL],
            stdin=theirs,
            stdout=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        assert program.communicate(timeout=100)[0].split() == [str(errno.ENXIO).encode()]
    finally:
        os.close(ours)
        os.close(theirs)


def test_nothing_on_an_idle_node_wakes_up_but_for_its_heartbeat() -> None:
    """An agent tells the client every second that it is there; keeper, fork server and runners sleep."""
    with sky.ComputePool(nodes=1, console=False) as pool:
        process() >> pool
        names = {pid: Path(f"/proc/{pid}/comm").read_text().strip() for pid in processes()[1:]}
        assert "skyward-agent" in names.values()
        others = [pid for pid, name in names.items() if name != "skyward-agent"]

        def silent() -> bool:
            before = sum(map(switches, others))
            time.sleep(3)
            return sum(map(switches, others)) == before

        assert any(silent() for _ in range(8))


def test_a_sleeping_keeper_ends_in_time_when_a_node_is_told_of_an_earlier_end() -> None:
    with sky.ComputePool(nodes=1, console=False) as pool:
        runner = process() >> pool
        keeper = next(
            parent for parent in psutil.Process(runner).parents() if "skyward.node.keeper" in parent.cmdline()
        )
        pool._engine.tell_terms(1, left=2.0, drain=0.0)
        until(lambda: gone(keeper.pid), 40)  # it would look again after 60 s
