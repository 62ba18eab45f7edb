"""What a body leaves behind is found and ended; tried in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap


def run(source: str) -> str:
    """Runs a program and returns what it printed."""
    head = "import os, signal, subprocess, sys, time, threading\nfrom skyward.node import processes\n"
    done = subprocess.run(
        [sys.executable, "-c", head + textwrap.dedent(source)], capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_children_are_found_whichever_thread_started_them() -> None:
    out = run("""
        a = subprocess.Popen(["sleep", "60"])
        made, over = threading.Event(), threading.Event()
        found = []
        def work():
            found.append(subprocess.Popen(["sleep", "60"]))
            made.set()
            over.wait()
        threading.Thread(target=work, daemon=True).start()
        made.wait()
        print(sorted(processes.children()) == sorted([a.pid, found[0].pid]))
        processes.end_children()
        print(processes.children(), a.wait(), found[0].wait())
        os._exit(0)
    """)
    assert out.split() == ["True", "[]", "-9", "-9"] or out.split() == ["True", "[]", "0", "0"]


def test_without_children_there_is_nothing_to_do() -> None:
    assert run("processes.end_children(); print(processes.children())") == "[]\n"


def test_what_forks_twice_is_adopted_and_ended() -> None:
    out = run("""
        processes.adopt_orphans()
        read, write = os.pipe()
        if os.fork() == 0:
            if os.fork() == 0:
                os.setsid()
                os.write(write, str(os.getpid()).encode())
                time.sleep(60)
            os._exit(0)
        grandchild = int(os.read(read, 100))
        os.wait()
        while os.path.exists(f"/proc/{grandchild}") and grandchild not in processes.children():
            time.sleep(0.01)
        print(processes.children() == [grandchild])
        processes.end_children()
        print(os.path.exists(f"/proc/{grandchild}"))
    """)
    assert out.split() == ["True", "False"]


def test_a_child_that_ignores_signals_is_ended_too() -> None:
    out = run("""
        child = subprocess.Popen(["sh", "-c", "trap '' TERM INT HUP; echo up; sleep 60"], stdout=subprocess.PIPE)
        child.stdout.readline()
        began = time.monotonic()
        processes.adopt_orphans()
        processes.end_children()
        print(processes.children(), time.monotonic() - began < 45)
    """)
    assert out == "[] True\n"


def test_what_is_to_be_spared_is_spared() -> None:
    out = run("""
        kept, doomed = subprocess.Popen(["sleep", "60"]), subprocess.Popen(["sleep", "60"])
        processes.end_children(spare={kept.pid})
        print(processes.children() == [kept.pid])
        kept.kill()
        kept.wait()
    """)
    assert out == "True\n"


def test_the_trackers_of_libraries_are_spared() -> None:
    """Python starts them once and uses them for as long as the process lives."""
    out = run("""
        from multiprocessing import resource_tracker
        resource_tracker.ensure_running()
        pid = resource_tracker._resource_tracker._pid
        child = subprocess.Popen(["sleep", "60"])
        processes.end_children()
        print(processes.children() == [pid])
    """)
    assert out == "True\n"


def test_a_zombie_is_cleared_away() -> None:
    out = run("""
        child = subprocess.Popen(["true"])
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        processes.end_children()
        print(processes.children())
        child.returncode = 0
    """)
    assert out == "[]\n"


def test_a_process_dies_with_its_parent() -> None:
    out = run("""
        read, write = os.pipe()
        parent = os.fork()
        if parent == 0:
            me = os.getpid()
            if os.fork() == 0:
                processes.die_with_parent(me)
                os.write(write, str(os.getpid()).encode())
                time.sleep(60)
            time.sleep(60)
        child = int(os.read(read, 100))
        os.kill(parent, signal.SIGKILL)
        os.waitpid(parent, 0)
        deadline = time.monotonic() + 60
        def alive():
            try:
                return open(f"/proc/{child}/stat").read().rpartition(")")[2].split()[0] != "Z"
            except FileNotFoundError:
                return False
        while alive() and time.monotonic() < deadline:
            time.sleep(0.01)
        print(alive())
    """)
    assert out == "False\n"


def test_a_process_whose_parent_is_dead_already_ends_at_once() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"from skyward.node.processes import die_with_parent; die_with_parent({os.getpid() + 1})",
        ],
        timeout=30,
    )
    assert done.returncode == 1
