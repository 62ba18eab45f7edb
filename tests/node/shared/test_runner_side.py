"""A body's own connection to the server of shared collections: whatever becomes of it, nobody waits for ever."""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skyward.errors import SharedLost, SharedTimeout
from skyward.node.shared import channel, runner_side
from skyward.node.shared.runner_side import RunnerShared
from skyward.transport import local_sockets
from skyward.transport.frames import encode
from skyward.transport.link import greet
from tests.support.waiting import until


class Head:
    """A server that listens, and greets whoever connects unless it is stopped."""

    def __init__(self, path: str) -> None:
        self.listener = local_sockets.listen(path)
        self.socks: list[socket.socket] = []
        self.stopped = False
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self.listener.accept()
            except OSError:
                return
            if not self.stopped:
                greet(sock, None, time.monotonic() + 30)
                for piece in encode({"shared": True}):
                    sock.sendall(piece)
            self.socks.append(sock)

    def close(self) -> None:
        with suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)  # its thread ends
        self.listener.close()
        for sock in self.socks:
            sock.close()


@pytest.fixture
def head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Head]:
    monkeypatch.setattr(runner_side, "instance_info", lambda: SimpleNamespace(rank=0, node=0))
    monkeypatch.setattr(runner_side, "_TIMEOUT", 1.0)
    monkeypatch.setattr(channel, "LATE", 0.05)
    made = Head(str(tmp_path / "s"))
    yield made
    made.close()


@pytest.fixture
def runner(head: Head, tmp_path: Path) -> RunnerShared:
    def write(sock: socket.socket, lock: threading.Lock, pieces: list[Any]) -> None:
        with lock:
            for piece in pieces:
                sock.sendall(piece)

    nothing: Any = None
    made = RunnerShared(nothing, write, list)
    made._settings = {"shared": str(tmp_path / "s"), "paths": []}  # pyright: ignore[reportPrivateUsage]
    return made


def test_who_waits_is_told_when_what_comes_cannot_be_read(
    head: Head, runner: RunnerShared, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_side, "_TIMEOUT", 30.0)  # the greeting may take a while on a busy machine

    def speak() -> None:
        until(lambda: head.socks)
        heard = b""
        while b'"ask"' not in heard:
            heard += head.socks[0].recv(1 << 16)
        head.socks[0].sendall(b"\xff" * 64)

    threading.Thread(target=speak, daemon=True).start()
    with pytest.raises(SharedLost, match="cannot be read"):
        runner.channel().ask("event", "e", "wait", [])


def test_a_server_that_reads_nothing_does_not_hold_a_body_up_for_ever(head: Head, runner: RunnerShared) -> None:
    with pytest.raises(SharedLost):
        runner.channel().ask("queue", "q", "put", [None], [bytes(8 << 20)])


def test_a_time_out_holds_for_a_server_that_does_not_even_greet(head: Head, runner: RunnerShared) -> None:
    head.stopped = True
    with pytest.raises(SharedTimeout, match="has not answered"):
        runner.channel().ask("queue", "q", "get", [None], timeout=0.1)


def test_a_server_that_is_gone_is_told_at_once(head: Head, runner: RunnerShared) -> None:
    head.close()
    with pytest.raises(SharedLost, match="cannot be reached"):
        runner.channel().ask("queue", "q", "get", [None], timeout=60)


def no_thread(**_: Any) -> None:
    raise RuntimeError("can't start new thread")


def no_write(*_: Any) -> None:
    raise BrokenPipeError(errno.EPIPE, "Broken pipe")


@pytest.mark.parametrize("failing", ["thread", "write"])
def test_a_connection_that_fails_after_its_greeting_is_closed_and_told_as_any_other(
    head: Head, runner: RunnerShared, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    monkeypatch.setattr(runner_side, "_TIMEOUT", 30.0)
    asked = runner.channel()
    if failing == "thread":
        monkeypatch.setattr(runner_side, "threading", SimpleNamespace(Thread=no_thread))
    else:
        monkeypatch.setattr(runner, "_write", no_write)
    with pytest.raises(SharedLost, match=r"cannot be reached: .*(new thread|Broken pipe)"):
        asked.ask("queue", "q", "get", [None], timeout=60)
    assert runner._sock is None, "the next question makes another one"  # pyright: ignore[reportPrivateUsage]
    until(lambda: head.socks)
    head.socks[0].settimeout(60)
    with suppress(ConnectionResetError):
        while head.socks[0].recv(1 << 16):  # until our end is closed
            pass
