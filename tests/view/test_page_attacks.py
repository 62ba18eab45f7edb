"""The page on loopback, and other users and sites that reach the same loopback."""

from __future__ import annotations

import os
import socket
import stat
import threading
import time
import urllib.request
import webbrowser
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import skyward as sky
from skyward.cli import view
from skyward.history.recorder import Recorder
from skyward.history.store import find
from skyward.view.page.server import PageServer
from tests.support.waiting import until


@pytest.fixture
def page(tmp_path: Path) -> Iterator[PageServer]:
    recorder = Recorder("attacked", tmp_path)
    recorder.record(sky.events.PoolOpening("attacked", 1, "Local"))
    recorder.flush()
    server = PageServer(find("attacked", tmp_path))
    yield server
    server.close()
    recorder.close()


def test_a_crowd_that_asks_for_nothing_takes_little_and_shuts_nobody_out(page: PageServer) -> None:
    """SEC-3, SEC-23."""
    before = threading.active_count()
    with ExitStack() as crowd:
        for number in range(500):
            sock = crowd.enter_context(socket.create_connection(("127.0.0.1", page.port), 30))
            if number % 2:
                sock.sendall(b"GET / HTTP/1.1\r\nX: ")
        with urllib.request.urlopen(page.address(), timeout=30) as answer:
            assert answer.status == 200
        until(lambda: threading.active_count() - before < 140, 20)
        assert len(os.listdir("/proc/self/fd")) < 500 + 250


def test_what_follows_a_refused_request_is_not_taken_for_another(page: PageServer) -> None:
    """SEC-23."""
    inner = b"GET /app.js HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    with socket.create_connection(("127.0.0.1", page.port), 30) as sock:
        sock.sendall(b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n" % len(inner) + inner)
        answer = b""
        try:
            while piece := sock.recv(1 << 16):
                answer += piece
        except ConnectionError:
            pass  # what was sent and not read
    assert answer.count(b"HTTP/1.1 ") <= 1
    assert b"HTTP/1.1 200" not in answer


def test_no_command_line_of_a_browser_holds_the_address(
    page: PageServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SEC-10, SEC-21, SEC-23."""
    opened: list[str] = []
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(webbrowser, "open", opened.append)
    address = page.address()
    view._open(address)  # pyright: ignore[reportPrivateUsage]
    assert "token" not in opened[0]
    path = Path(unquote(urlsplit(opened[0]).path))
    assert address in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_other_files_than_those_of_the_page_are_not_served(page: PageServer) -> None:
    """SEC-23."""
    for path in (
        "/../server.py",
        "/..%2fserver.py",
        "/static/app.js",
        "/app.js%00",
        "/model.py",
        "/%2e%2e/x",
    ):
        with socket.create_connection(("127.0.0.1", page.port), 30) as sock:
            sock.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode())
            answer = b"".join(iter(lambda sock=sock: sock.recv(1 << 16), b""))
            assert b" 404 " in answer.partition(b"\r\n")[0], path


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"x" * 200_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n" + b"X: y\r\n" * 5_000 + b"\r\n",
        b"GET /" + b"x" * 200_000 + b" HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /data/summary?key=%ff%00%ed%a0%80 HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n",
    ],
)
def test_nonsense_and_endless_heads_are_refused_and_the_next_request_is_served(page: PageServer, head: bytes) -> None:
    """SEC-3, SEC-23."""
    with socket.create_connection(("127.0.0.1", page.port), 30) as sock:
        answer = b""
        try:
            sock.sendall(head)
            while piece := sock.recv(1 << 16):
                answer += piece
        except ConnectionError:
            pass  # it was closed while we spoke
    assert b" 200 " not in answer.partition(b"\r\n")[0]
    with urllib.request.urlopen(page.address(), timeout=30) as found:
        assert found.status == 200


def test_a_reader_that_never_reads_holds_nobody_up(page: PageServer) -> None:
    """SEC-3, SEC-23."""
    with urllib.request.urlopen(page.address(), timeout=30) as answer:
        key = answer.read().decode().partition('data-key="')[2].partition('"')[0]
    with ExitStack() as slow:
        for _ in range(40):
            sock = slow.enter_context(socket.create_connection(("127.0.0.1", page.port), 30))
            sock.sendall(f"GET /data/live?key={key} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
        for _ in range(20):
            with urllib.request.urlopen(f"http://127.0.0.1:{page.port}/data/summary?key={key}", timeout=30) as answer:
                assert answer.status == 200


@pytest.mark.parametrize("query", ["start=nan&end=1", "start=2&end=1", "start=0&end=inf", "start=0&end=1e300", "end=x"])
def test_windows_that_make_no_sense_are_refused(page: PageServer, query: str) -> None:
    words = dict(pair.split("=") for pair in query.split("&"))
    with pytest.raises(ValueError, match=r"."):
        page.answer("lanes", words)


def test_between_two_visits_the_server_does_not_wake_up(page: PageServer) -> None:
    """It costs nothing while nobody looks: its thread waits, without looking at a clock."""
    (thread,) = [each for each in threading.enumerate() if each.name == f"skyward-page-{page.port}"]
    task = Path(f"/proc/self/task/{thread.native_id}")

    def switches() -> int:
        words = dict(text.split(":", 1) for text in (task / "status").read_text().splitlines())
        return int(words["voluntary_ctxt_switches"])

    def quiet() -> bool:
        before = switches()
        time.sleep(0.2)
        return switches() == before

    with urllib.request.urlopen(page.address(), timeout=30) as answer:
        assert answer.status == 200
    until(quiet)  # it has answered
    before = switches()
    time.sleep(2.5)
    assert switches() - before <= 1
