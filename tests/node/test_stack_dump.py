"""A stack is taken from outside a process, also while C code holds Python's lock; and what cannot be taken is said."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from skyward.node import runners as standing_file
from skyward.node import stack_dump
from skyward.node.status_page import StatusPage, page_size
from tests.support.waiting import until

PROGRAM = """
import sys
from skyward.node import stack_dump
from skyward.node.status_page import StatusPage

page = StatusPage(int(sys.argv[1]), 1)

def hold_the_lock():
    print("ready", flush=True)
    return sum(range(10**12))

if "deaf" not in sys.argv:
    stack_dump.listen(page.fd)
if "blocked" in sys.argv:
    import signal
    signal.pthread_sigmask(signal.SIG_BLOCK, {stack_dump.SIGNAL})
hold_the_lock()
"""


@pytest.fixture
def memory() -> Iterator[int]:
    fd = os.memfd_create("skyward-test")
    os.ftruncate(fd, page_size(1))
    yield fd
    os.close(fd)


def start(memory: int, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM, str(memory), *options]
    process = subprocess.Popen(command, pass_fds=[memory], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def test_the_stack_of_a_process_whose_c_code_holds_the_lock_is_taken_again_and_again(memory: int) -> None:
    page = StatusPage(memory, 1)
    process = start(memory)
    try:
        for _ in range(3):
            page.clear_dump()
            assert stack_dump.ask(process.pid, process.pid) == ""
            until(lambda: "in <module>" in page.dump())
            assert [function for _, _, function in stack_dump.parse(page.dump())] == ["<module>", "hold_the_lock"]
    finally:
        end(process)


@pytest.mark.parametrize(("option", "words"), [("deaf", "takes no stack samples"), ("blocked", "blocks signal")])
def test_a_process_that_cannot_be_asked_is_left_alone_and_told(memory: int, option: str, words: str) -> None:
    process = start(memory, option)
    try:
        assert words in stack_dump.ask(process.pid, process.pid)
        assert process.poll() is None
    finally:
        end(process)


def test_a_process_that_is_gone_is_told(memory: int) -> None:
    process = start(memory)
    end(process)
    assert stack_dump.ask(process.pid, process.pid)


RUNNER = stack_dump._PACKAGE + "node/runner.py"
BODY = stack_dump._PACKAGE + "node/body.py"
PLUGIN = stack_dump._PACKAGE + "plugins/_ranks.py"
DUMP = f"""Stack (most recent call first):
  File "/env/torch/distributed/distributed_c10d.py", line 3252 in all_reduce
  File "/home/me/my "odd", line 3 in name.py", line 8 in train
  File "{PLUGIN}", line 30 in around
  File "{BODY}", line 99 in run
  File "{RUNNER}", line 250 in _work
"""


def test_only_the_frames_of_the_body_are_kept_with_the_innermost_last() -> None:
    assert stack_dump.parse(DUMP) == [
        ('/home/me/my "odd", line 3 in name.py', 8, "train"),
        ("/env/torch/distributed/distributed_c10d.py", 3252, "all_reduce"),
    ]


def test_a_body_that_waits_in_our_own_code_keeps_that_frame() -> None:
    own = stack_dump._PACKAGE + "transport/streams.py"
    text = f'  File "{own}", line 4 in take\n  File "{BODY}", line 99 in run\n'
    assert stack_dump.parse(text) == [(own, 4, "take")]


def test_a_stack_is_complete_when_the_runner_is_reached_or_it_was_too_deep() -> None:
    lines = DUMP.splitlines(keepends=True)
    assert stack_dump.complete(DUMP)
    assert not any(stack_dump.complete("".join(lines[:count])) for count in range(len(lines)))
    assert not stack_dump.complete(DUMP[:-1])
    assert stack_dump.complete("".join(lines[:3]) + "  ...\n")


def test_the_signal_is_one_that_nothing_else_uses() -> None:
    assert signal.SIGRTMIN < stack_dump.SIGNAL < signal.SIGRTMAX


def dump(*frames: str, head: str = "Stack") -> str:
    return f"{head} (most recent call first):\n" + "".join(f'  File "{frame}\n' for frame in frames)


RUNNER = f'{stack_dump._PACKAGE}node/runner.py", line 9 in _work'
BODY = f'{stack_dump._PACKAGE}node/body.py", line 8 in run'
LINK = f'{stack_dump._PACKAGE}transport/frames.py", line 7 in read'
RUNPY = '<frozen runpy>", line 198 in _run_module_as_main'
TRAIN = '/home/me/train.py", line 3 in train'
FATAL = "Fatal Python error: Segmentation fault\n\n"


def test_what_faulthandler_tells_of_a_crash_is_cut_below_the_frames_of_the_user() -> None:
    told = f"before\n{FATAL}{dump(TRAIN, BODY, RUNNER, RUNPY)}\nExtension modules: numpy, torch (total: 2)\nafter\n"
    assert stack_dump.of_the_user(told) == f"before\n{FATAL}{dump(TRAIN)}after\n"


def test_other_threads_are_told_only_if_they_have_frames_of_the_user() -> None:
    ours = dump(LINK, RUNNER, RUNPY, head="Thread 0x02")
    theirs = dump(TRAIN, '/usr/lib/python3/threading.py", line 5 in run', head="Thread 0x03")
    current = dump(TRAIN, BODY, RUNNER, RUNPY, head="Current thread 0x01")
    cut = dump(TRAIN, head="Current thread 0x01")
    assert stack_dump.of_the_user(f"{FATAL}{ours}\n{theirs}\n{current}") == f"{FATAL}{theirs}\n{cut}"


def test_a_crash_in_code_of_ours_is_told_with_all_its_frames() -> None:
    told = FATAL + dump(LINK, RUNNER, RUNPY)
    assert stack_dump.of_the_user(told) == told
    assert stack_dump.of_the_user("a\nb") == "a\nb"


def test_the_other_threads_of_a_process_are_told_without_the_body_and_without_ours() -> None:
    go = threading.Event()

    def wait_for_go() -> None:
        go.wait(60)

    threads = [threading.Thread(target=wait_for_go, name=name, daemon=True) for name in ("loader", "skyward-reader")]
    for thread in threads:
        thread.start()

    def standing(function: str) -> list[stack_dump.Frames]:
        found = stack_dump.helpers(threading.get_ident()) or []
        return [frames for frames in found if any(frame[2] == function for frame in frames)]

    try:
        until(lambda: [frames[-1][2] for frames in standing("wait_for_go")] == ["wait"])
        file, line, _ = standing("wait_for_go")[0][-1]
        assert (Path(file).name, line > 0) == ("threading.py", True)
        assert standing("standing") == []
    finally:
        go.set()
        for thread in threads:
            thread.join()


def test_an_answer_with_very_many_frames_has_the_innermost_of_each_body(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has to fit into a frame of the link."""
    frames = [("f.py", line, "f") for line in range(8)]

    def answer() -> list[dict[str, Any]]:
        facts = {"collectives": 1, "threads": [frames]}
        return [{"state": "running", "frames": frames}, {"state": "running", "frames": frames, "facts": facts}, {}]

    monkeypatch.setattr(standing_file, "_MOST_FRAMES", 24)
    assert standing_file._shortened(answer()) == answer()
    monkeypatch.setattr(standing_file, "_MOST_FRAMES", 23)
    short = standing_file._shortened(answer())
    assert [body["frames"] for body in short] == [frames[-7:], frames[-7:], []]
    assert short[1]["facts"] == {"collectives": 1}
