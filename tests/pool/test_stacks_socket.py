"""Where `sky stacks` and `sky ps` look for pools, and what others can plant there (SEC-21)."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from skyward.api.stacks import Stacks
from skyward.pool import inspect_socket
from tests.support.waiting import read_until


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The place for temporary files; other pools of this computer are not asked."""
    every = inspect_socket._paths
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(inspect_socket, "_paths", lambda: [path for path in every() if path.startswith(f"{tmp_path}/")])
    return tmp_path


def test_only_directories_of_this_user_alone_are_searched(temporary: Path) -> None:
    """SEC-21: links in a directory of another user kept both commands busy without end; that attack worked."""
    planted = temporary / "skyward-evil"
    (planted / "x\x1b]0;PWNED\x07").mkdir(parents=True)
    (planted / "x\x1b]0;PWNED\x07" / "stacks").touch()
    own = temporary / "skyward-1-own"
    own.mkdir(mode=0o700)
    (own / "skyward-2-inner").mkdir(mode=0o700)
    (own / "skyward-2-inner" / "stacks").touch()
    (own / "stacks").touch()
    for directory in (planted, own):
        for name in ("a", "b"):
            (directory / name).symlink_to(".")
    (temporary / "skyward-link").symlink_to(planted)
    planted.chmod(0o755)

    searched: list[list[str]] = []
    thread = threading.Thread(target=lambda: searched.append(inspect_socket._paths()), daemon=True)
    thread.start()
    thread.join(60)
    assert searched == [[f"{own}/stacks", f"{own}/skyward-2-inner/stacks"]]


def test_names_of_directories_are_shown_without_control_characters(temporary: Path) -> None:
    """SEC-21."""
    odd = temporary / "skyward-\x1b[2J"
    odd.mkdir(mode=0o700)
    listener = inspect_socket.local_sockets.listen(str(odd / "stacks"))

    def refuse() -> None:
        listener.accept()[0].close()

    thread = threading.Thread(target=refuse, daemon=True)
    thread.start()
    try:
        shown = [answer.pool for answer in inspect_socket.ask_all()]
    finally:
        listener.close()
        thread.join(10)
    assert shown == ["'skyward-\\x1b[2J'"]


def _unasked() -> Any:
    pytest.fail("not asked for")


def test_a_pool_is_found_and_answers(temporary: Path) -> None:
    directory = temporary / "skyward-7-pool"
    directory.mkdir(mode=0o700)
    with inspect_socket.StacksSocket(str(directory), "lab", Stacks, _unasked, _unasked):
        answers = inspect_socket.ask_all()
    assert [(answer.pool, answer.stacks) for answer in answers] == [("lab", [])]


def test_whoever_closes_a_pool_waits_until_it_is_closed_and_learns_what_went_wrong(temporary: Path) -> None:
    closing, closed, told = threading.Event(), threading.Event(), list[str]()
    path = f"{temporary}/stacks"

    def close() -> None:
        closing.set()
        assert closed.wait(60)
        raise OSError("the cloud is down")

    with inspect_socket.StacksSocket(str(temporary), "lab", Stacks, _unasked, close):
        thread = threading.Thread(target=lambda: told.append(inspect_socket.close(path, 60, told.append)), daemon=True)
        thread.start()
        assert closing.wait(60)
        assert thread.is_alive()
    closed.set()  # the socket itself is gone by now, as it is when a pool is closed
    thread.join(60)
    assert told == ["the cloud is down"]
    assert inspect_socket.close(path, 60, told.append) == "", "there is nothing to close any more"


@contextmanager
def _program(directory: Path, first: str = "") -> Generator[subprocess.Popen[str]]:
    """A program whose pool takes for ever to close."""
    source = f"""
import signal, threading
from skyward.pool.inspect_socket import StacksSocket
{first}
with StacksSocket({str(directory)!r}, "lab", None, None, threading.Event().wait):
    print("ready", flush=True)
    threading.Event().wait()
"""
    with subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True) as program:
        try:
            read_until(program, "ready")
            yield program
        finally:
            program.kill()


def test_a_program_that_does_not_close_its_pool_in_time_is_ended(temporary: Path) -> None:
    with _program(temporary) as program:
        told: list[str] = []
        assert inspect_socket.close(f"{temporary}/stacks", 0.1, told.append) == ""
        assert program.wait(60) == -signal.SIGTERM
    assert told == [f"process {program.pid} has not closed it in time, so it gets SIGTERM"]


def test_a_program_that_does_not_end_by_itself_is_killed(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspect_socket, "_TERM_PATIENCE", 0.1)
    with _program(temporary, "signal.signal(signal.SIGTERM, signal.SIG_IGN)") as program:
        told: list[str] = []
        assert inspect_socket.close(f"{temporary}/stacks", 0.1, told.append) == ""
        assert program.wait(60) == -signal.SIGKILL
    assert [line.rpartition(" ")[2] for line in told] == ["SIGTERM", "SIGKILL"]
