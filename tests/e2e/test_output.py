"""What bodies print: every line once, whole, in order, with its node and call, before the result."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward.events import Output
from tests.support.listener import Listener
from tests.support.waiting import until


@sky.compute
def call(fn: Callable[..., Any], *args: Any) -> Any:
    return fn(*args)


def my_call() -> tuple[str | None, int]:
    info = sky.instance_info()
    assert info is not None
    return info.task_id, info.node


def test_lines_of_python_c_and_subprocesses_arrive_in_order_before_the_result(
    pool: sky.ComputePool, heard: Listener
) -> None:
    """Everything a body prints, with its node and its call."""

    def speak() -> tuple[str | None, int]:
        libc = ctypes.CDLL(None)
        print("one from Python")
        os.write(1, b"two from the descriptor\n")
        libc.puts(b"three from C")
        libc.fflush(None)
        subprocess.run(["sh", "-c", "echo four from a subprocess"], check=True)
        sys.stdout.write("five ")
        sys.stdout.flush()
        sys.stdout.write("in two pieces\n")
        sys.stdout.buffer.write(b"six through the buffer\n")
        libc.printf(b"seven from printf\n")
        return my_call()

    task, node = call(speak) >> pool
    assert heard.lines("stdout") == [
        "one from Python",
        "two from the descriptor",
        "three from C",
        "four from a subprocess",
        "five in two pieces",
        "six through the buffer",
        "seven from printf",
    ]
    assert {(e.node, e.call) for e in heard.output} == {(node, task)}


def test_stderr_comes_apart_from_stdout(pool: sky.ComputePool, heard: Listener) -> None:
    def speak() -> None:
        print("to stdout")
        print("to stderr", file=sys.stderr)
        os.write(2, b"also to stderr\n")

    call(speak) >> pool
    assert heard.lines("stdout") == ["to stdout"]
    assert heard.lines("stderr") == ["to stderr", "also to stderr"]


def test_a_last_line_without_an_end_arrives_with_the_result(pool: sky.ComputePool, heard: Listener) -> None:
    def speak() -> None:
        print("whole")
        print("half", end="")
        os.write(2, b"half an error")

    call(speak) >> pool
    assert heard.lines("stdout") == ["whole", "half"]
    assert heard.lines("stderr") == ["half an error"]
    call(speak) >> pool
    assert heard.lines("stdout") == ["whole", "half"] * 2


def test_output_of_a_body_that_raises_or_dies_arrives_before_its_error(pool: sky.ComputePool, heard: Listener) -> None:
    def fail(how: str) -> None:
        print(f"before {how}", end="")
        if how == "raise":
            raise ValueError
        sys.stdout.flush()
        os._exit(1)

    with pytest.raises(ValueError):
        call(fail, "raise") >> pool
    assert heard.lines() == ["before raise"]
    with pytest.raises(sky.errors.TaskCrashed):
        call(fail, "die") >> pool
    assert heard.lines() == ["before raise", "before die"]


def test_fifty_thousand_lines_arrive_quickly_and_in_order(pool: sky.ComputePool, heard: Listener) -> None:
    """20,000 lines/s; row 41 in small."""

    def flood(count: int) -> None:
        for i in range(count):
            print(i, "x" * 60)

    began = time.monotonic()
    call(flood, 50_000) >> pool
    assert time.monotonic() - began < 90
    assert heard.lines() == [f"{i} {'x' * 60}" for i in range(50_000)]


def test_a_flood_of_bytes_neither_hangs_nor_loses_anything(pool: sky.ComputePool, heard: Listener) -> None:
    """Row 41 in small: 40 MB as fast as the pipe takes it, from every node at once."""

    def flood() -> None:
        line = b"y" * 9_999 + b"\n"
        for _ in range(2_000):
            view = memoryview(line)
            while view:
                view = view[os.write(1, view) :]

    call(flood) @ pool
    for node in (0, 1):
        lines = [e.text for e in heard.output if e.node == node]
        assert len(lines) == 2_000
        assert set(map(len, lines)) == {9_999}


def test_a_line_longer_than_any_buffer_arrives(pool: sky.ComputePool, heard: Listener) -> None:
    """Row 41."""
    call(lambda: print("z" * 3_000_000)) >> pool
    assert sum(map(len, heard.lines())) == 3_000_000


def test_binary_garbage_is_survived(pool: sky.ComputePool, heard: Listener) -> None:
    """Row 41: binary output."""

    def garbage() -> None:
        os.write(1, bytes(range(256)) * 4)
        os.write(1, b"\n\xff\xfe\n")
        sys.stdout.write("\udc80 surrogate\n")
        print("after")

    call(garbage) >> pool
    assert heard.lines()[-1] == "after"
    assert all(isinstance(t, str) for t in heard.lines())
    "".join(heard.lines()).encode()


def test_a_progress_bar_stays_one_line(pool: sky.ComputePool, heard: Listener) -> None:
    """Carriage returns are progress; the last state comes as a line."""

    def bar() -> None:
        for i in range(101):
            sys.stderr.write(f"\r{i}%")
            sys.stderr.flush()
            time.sleep(0.005)
        sys.stderr.write("\n")
        print("done")

    call(bar) >> pool
    assert heard.lines("stderr") == ["100%"]
    assert heard.lines("stdout") == ["done"]
    shown = heard.lines("stderr", progress=True)
    assert 1 <= len(shown) <= 60
    assert all(text.rstrip("%").isdigit() for text in shown)


def test_a_progress_bar_without_an_end_leaves_its_last_state(pool: sky.ComputePool, heard: Listener) -> None:
    def bar() -> None:
        for i in range(5):
            sys.stderr.write(f"\rstep {i}")
            sys.stderr.flush()

    call(bar) >> pool
    assert heard.lines("stderr") == ["step 4"]


def test_windows_line_ends_are_line_ends(pool: sky.ComputePool, heard: Listener) -> None:
    def speak() -> None:
        for i in range(3):
            os.write(1, f"line {i}\r\n".encode())
            time.sleep(0.02)

    call(speak) >> pool
    assert heard.lines() == ["line 0", "line 1", "line 2"]


def test_lines_arrive_while_the_body_runs(pool: sky.ComputePool, heard: Listener, tmp_path: Path) -> None:
    """Live, not at the end."""

    def speak(go: Path) -> None:
        print("live")
        while not go.exists():
            time.sleep(0.01)

    future = call(speak, tmp_path / "go") > pool
    until(lambda: heard.lines() == ["live"])
    assert not future.done()
    (tmp_path / "go").touch()
    future.result(45)


def test_short_calls_that_print_keep_their_lines(pool: sky.ComputePool, heard: Listener) -> None:
    """Attribution with calls sent ahead: each line has the call that printed it, none is lost."""

    def speak(i: int) -> tuple[str | None, int]:
        print(f"python {i}")
        os.write(1, f"raw {i}\n".encode())
        return my_call()

    for _ in range(2):
        calls = sky.gather(*(call(speak, i) for i in range(300))) >> pool
    tasks = {i: task for i, (task, _) in enumerate(calls)}
    last = heard.output[600:]
    assert len(last) == 600
    wrong = [e for e in last if e.call != tasks[int(e.text.split()[1])]]
    assert wrong == []


def test_in_threads_lines_belong_to_their_calls() -> None:
    """T14: several calls at once in one process."""

    def speak(name: str) -> tuple[str, str | None]:
        for i in range(50):
            print(f"{name} ", end="")
            time.sleep(0.001)
            print(i)
        print(f"{name} end", end="")
        return name, my_call()[0]

    with sky.ComputePool(concurrency=4, console=False) as pool:
        listener = Listener(pool)
        done = sky.gather(*(call(speak, f"n{i}") for i in range(4))) >> pool
        for name, task in done:
            lines = [e.text for e in listener.output if e.call == task]
            assert lines == [*(f"{name} {i}" for i in range(50)), f"{name} end"]
        call(lambda: os.write(1, b"half a line of nobody")) >> pool
    assert "half a line of nobody" in listener.lines()


def test_output_of_a_thread_that_the_body_started_belongs_to_the_call(pool: sky.ComputePool, heard: Listener) -> None:
    def speak() -> str | None:
        thread = threading.Thread(target=lambda: print("from a thread"))
        thread.start()
        thread.join()
        return my_call()[0]

    task = call(speak) >> pool
    assert [(e.text, e.call) for e in heard.output] == [("from a thread", task)]


def test_a_listener_that_raises_or_is_slow_costs_no_line(pool: sky.ComputePool, heard: Listener) -> None:
    """Row 41: a slow terminal."""

    def bad(event: Any) -> None:
        if isinstance(event, Output):
            time.sleep(0.0005)
            raise RuntimeError("listener")

    import logging

    logging.getLogger("skyward.callbacks").disabled = True
    stop = pool.on_event(bad)
    try:
        call(lambda: [print(i) for i in range(1000)] and None) >> pool
    finally:
        stop()
        logging.getLogger("skyward.callbacks").disabled = False
    assert heard.lines() == [str(i) for i in range(1000)]


PLAIN = """
import sys
import skyward as sky

@sky.compute
def speak():
    print("hello from", sky.instance_info().node)
    print("an error line", file=sys.stderr)
    return 1

with sky.ComputePool(nodes=2) as pool:
    speak() @ pool
    print("mine")
"""


def test_without_a_terminal_lines_are_printed_plainly(script: Callable[..., subprocess.Popen[str]]) -> None:
    program = script(PLAIN)
    out, err = program.communicate(timeout=120)
    assert program.returncode == 0, err
    assert out.splitlines().count("mine") == 1
    both = out + err
    for node in (0, 1):
        assert both.count(f"hello from {node}") == 1
    assert both.count("an error line") == 2
    assert "\x1b" not in both
    assert "Traceback" not in both
