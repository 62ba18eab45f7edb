"""The process beside the client does its work when the client dies, and only then."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from skyward.machines.watchdog import Watchdog, pauses
from tests.support.hosts import Network, unavailable
from tests.support.processes import gone
from tests.support.waiting import until


def catches(pid: int, number: int) -> bool:
    """Whether a process has got as far as to look after a signal."""
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return bool(int(status["SigCgt"], 16) >> (number - 1) & 1)


def mark(path: Path) -> list[str]:
    return ["touch", str(path)]


@pytest.fixture
def dog() -> Iterator[Watchdog]:
    watchdog = Watchdog()
    yield watchdog
    watchdog.close()
    until(lambda: gone(watchdog.pid))


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Callable[[str], tuple[subprocess.Popen[str], int]]]:
    """Starts a program that has a Watchdog `dog`, does what it is told, and waits; gives it and the watchdog's pid."""
    with contextlib.ExitStack() as stack:

        def started(source: str) -> tuple[subprocess.Popen[str], int]:
            program = (
                "import os, signal, subprocess, sys, time\n"
                "from skyward.machines.watchdog import Watchdog\ndog = Watchdog()\n"
                f"here = {str(tmp_path)!r}\n{textwrap.dedent(source)}\nprint(dog.pid, flush=True)\nsignal.pause()\n"
            )
            process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
            stack.callback(process.communicate)
            stack.callback(process.kill)
            assert process.stdout is not None
            pid = int(process.stdout.readline())
            stack.callback(until, lambda: gone(pid))
            return process, pid

        yield started


def test_when_the_client_is_killed_everything_is_done_and_the_watchdog_ends(client: Any, tmp_path: Path) -> None:
    """Row 31: commands, then what lets go of the host, then the directory."""
    (tmp_path / "control").mkdir()
    (tmp_path / "control" / "m").touch()
    process, pid = client("""
        dog.add("a", ["touch", f"{here}/a"], ["sh", "-c", f"test -e {here}/a && touch {here}/ended"], f"{here}/control")
        dog.add("b", ["touch", f"{here}/b"])
        dog.add("c", [], ["touch", f"{here}/only-ended"])
        dog.add("gone", ["touch", f"{here}/gone"])
        dog.drop("gone")
        dog.drop("never there")
    """)
    process.kill()
    until(lambda: gone(pid))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b", "ended", "only-ended"]


def test_while_the_client_lives_and_after_it_is_done_nothing_is_done(dog: Watchdog, tmp_path: Path) -> None:
    dog.add("a", mark(tmp_path / "a"))
    until(lambda: catches(dog.pid, signal.SIGTERM))
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        os.kill(dog.pid, number)
    dog.add("b", mark(tmp_path / "b"))
    assert not gone(dog.pid)
    dog.close()
    dog.close()
    dog.drop("a")
    until(lambda: gone(dog.pid))
    assert list(tmp_path.iterdir()) == []


def test_it_is_out_of_reach_of_the_terminal_and_keeps_no_files_of_the_client(client: Any, tmp_path: Path) -> None:
    """Row 35: who reads the client's output sees its end although the watchdog still works."""
    process, pid = client("""
        dog.add("slow", ["sh", "-c", f"until test -e {here}/go; do sleep 0.05; done; touch {here}/done"])
    """)
    assert os.getsid(pid) == pid
    assert os.readlink(f"/proc/{pid}/cwd") == "/"
    process.kill()
    assert process.stdout.read() == ""
    assert not gone(pid)
    (tmp_path / "go").touch()
    until((tmp_path / "done").exists)


def test_what_fails_is_tried_again_and_holds_up_nobody(client: Any, tmp_path: Path) -> None:
    process, pid = client("""
        dog.add("fails", ["sh", "-c", f"echo x >> {here}/tries; test -e {here}/healed"], [], None)
        dog.add("missing", [f"{here}/program"])
        dog.add("works", ["touch", f"{here}/works"])
    """)
    process.kill()
    until((tmp_path / "works").exists)
    until((tmp_path / "tries").exists)
    until(lambda: (tmp_path / "tries").read_text().count("x") >= 2)
    assert not gone(pid)
    (tmp_path / "program").write_text("#!/bin/sh\n")
    (tmp_path / "program").chmod(0o755)
    (tmp_path / "healed").touch()
    until(lambda: gone(pid))


def test_each_command_is_given_its_own_time(client: Any, tmp_path: Path) -> None:
    """Row 31: machines of a cloud take minutes to end; a host that does not answer is asked again soon."""
    process, pid = client("""
        script = f"echo x >> $1; until test -e {here}/go; do sleep 0.05; done"
        dog.add("soon", ["sh", "-c", script, "sh", f"{here}/soon"], patience=0.2)
        dog.add("late", ["sh", "-c", script, "sh", f"{here}/late"], patience=60)
    """)
    process.kill()
    until(lambda: (tmp_path / "soon").exists() and (tmp_path / "soon").read_text().count("x") >= 3)
    (tmp_path / "go").touch()
    until(lambda: gone(pid))
    assert (tmp_path / "late").read_text().count("x") == 1


@pytest.mark.parametrize(("each_try", "tries"), [(0.0, 14), (20.0, 3)])
def test_the_pauses_grow_to_five_seconds_and_end_after_a_minute(each_try: float, tries: int) -> None:
    """The message about a host that cannot be reached says "for another minute", however long each try takes."""
    found: list[float] = []
    for pause in pauses(60, lambda: sum(found) + each_try * len(found)):
        found.append(pause)  # noqa: PERF402 - the clock reads it
    assert found[:4] == [0.5, 1.0, 2.0, 4.0][: len(found)]
    assert len(found) == tries
    assert max(found) <= 5.0


@pytest.mark.parametrize("closes", [True, False])
def test_a_forked_child_does_not_hide_the_death_of_the_client(client: Any, tmp_path: Path, closes: bool) -> None:
    """Rows 31 and 37: nor does its own end, or closing in it, start anything."""
    process, pid = client(f"""
        dog.add("a", ["touch", f"{{here}}/a"])
        if os.fork() == 0:
            dog.close()
            sys.exit()
        os.wait()
        child = os.fork()
        if child == 0:
            if {closes}:
                dog.after_fork()
            signal.pause()
        open(f"{{here}}/child", "w").write(str(child))
    """)
    dog_was_asked = (tmp_path / "a").exists()
    child = int((tmp_path / "child").read_text())
    try:
        assert not dog_was_asked
        process.kill()
        until((tmp_path / "a").exists)
        until(lambda: gone(pid))
    finally:
        os.kill(child, signal.SIGKILL)


def test_handing_over_has_everything_done_while_the_client_lives(dog: Watchdog, tmp_path: Path) -> None:
    """Row 33."""
    waiting = (
        f"until test -e {shlex.quote(str(tmp_path))}/go; do sleep 0.05; done; touch {shlex.quote(str(tmp_path))}/b"
    )
    dog.add("a", mark(tmp_path / "a"))
    dog.add("b", ["sh", "-c", waiting])
    dog.hand_over()
    dog.hand_over()
    dog.drop("a")
    until((tmp_path / "a").exists)
    dog.close()
    assert not gone(dog.pid)
    (tmp_path / "go").touch()
    until((tmp_path / "b").exists)
    until(lambda: gone(dog.pid))


def test_a_watchdog_that_was_killed_is_replaced_by_one_that_knows_everything(client: Any, tmp_path: Path) -> None:
    process, pid = client("""
        dog.add("a", ["touch", f"{here}/a"])
        os.kill(dog.pid, signal.SIGKILL)
        while os.waitid(os.P_PID, dog.pid, os.WEXITED | os.WNOWAIT) is None:
            pass
        dog.add("b", ["touch", f"{here}/b"])
    """)
    process.kill()
    until((tmp_path / "b").exists)
    until(lambda: gone(pid))
    assert (tmp_path / "a").exists()


def test_a_long_command_is_not_on_its_command_line(dog: Watchdog) -> None:
    """SEC-10: what it is told goes through the pipe."""
    dog.add("a", ["echo", "canary-9f3e" * 20_000])
    assert "canary" not in " ".join(psutil.Process(dog.pid).cmdline())
    assert b"skyward/machines/watchdog.py" in Path(f"/proc/{dog.pid}/cmdline").read_bytes()


@pytest.mark.skipif(unavailable() is not None, reason=f"no test hosts: {unavailable()}")
@pytest.mark.parametrize("cut", [False, True])
def test_a_client_that_is_killed_leaves_nothing_on_hosts_or_here(client: Any, tmp_path: Path, cut: bool) -> None:
    """Row 31, also when the link is down at that moment: the command runs there, the connection and its files end."""
    with Network(1) as net, tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as place:
        process, pid = client(f"""
            import tempfile
            from skyward.api.shell import SshTarget
            from skyward.setup.ssh.shell import SshShell
            tempfile.tempdir = {place!r}
            shell = SshShell(SshTarget({net[0].address!r}, "sky", key={str(net.key)!r},
                                       known_hosts={str(net.known_hosts)!r}, config=False))
            shell.connect(time.monotonic() + 60)
            dog.add("h0", (), *shell.ending())
            sleeper = shell.start(["sleep", "1000"], {{}}, sys.stderr.buffer)
            dog.add("h0", shell.command(["sh", "-c", "pkill -x sleep && touch stopped"]), *shell.ending())
        """)
        until(lambda: any(p.argv == ["sleep", "1000"] for p in net[0].processes(user="sky")))
        assert os.listdir(place)
        if cut:
            net[0].cut()
        process.kill()
        process.wait()
        if cut:
            time.sleep(2)  # how long the link is down, not a wait for luck
            net[0].heal()
        until(lambda: gone(pid), 60)
        assert os.listdir(place) == []
        assert net[0].read("/home/sky/stopped") == ""
        assert not any("sleep" in p.argv for p in net[0].processes(user="sky"))
        until(lambda: not [p for p in psutil.process_iter(["cmdline"]) if place in " ".join(p.info["cmdline"] or [])])
