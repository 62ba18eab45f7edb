"""The page on loopback, and other users and sites that reach the same loopback."""

from __future__ import annotations

import os
import socket
import stat
import threading
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
