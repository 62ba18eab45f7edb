"""Those who want to harm a pool that machines join: strangers of the network, and machines that have joined."""

from __future__ import annotations

import json
import os
import socket
import ssl
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from skyward.errors import BootstrapError
from skyward.node.orders import ClientToJoiner, written
from skyward.setup.joined import arrivals as shell_module
from skyward.setup.joined import members, relay
from skyward.setup.joined.arrivals import Arrivals, Joined, JoinShell, join_file, open_arrivals
from tests.setup.joined.test_arrivals import dial, greet, told
from tests.support.waiting import until


@pytest.fixture
def arrivals(request: pytest.FixtureRequest) -> Iterator[Arrivals]:
    made = open_arrivals(f"attacked-{os.getpid()}-{id(request)}", ttl=3600, lease=60, host="127.0.0.1")
    yield made
    made.close()


def _count_arrivals() -> int:
    return sum(thread.name == "skyward-arrival" for thread in threading.enumerate())


def test_a_crowd_that_begins_a_handshake_and_stops_takes_no_more_than_one_that_says_nothing(
    arrivals: Arrivals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SEC-3, SEC-34."""
    address = told(arrivals)["addresses"][0]
    most = members._PER_NETWORK  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(members, "_HANDSHAKE", 300.0)
    sent: list[socket.socket] = []
    arrivals.expect([0])
    with ExitStack() as crowd:
        for _ in range(400):
            sock = crowd.enter_context(socket.create_connection(address, 30))
            sock.sendall(b"\x16")  # the first byte of a handshake
            sock.setblocking(False)
            sent.append(sock)
        until(lambda: sum(map(_ended, sent)) >= len(sent) - most, 30)
        until(lambda: _count_arrivals() <= most + 10, 30)
        sock, answer = greet(arrivals, 0, "key")
        sock.close()
        assert answer["welcome"]["place"] == 0


def test_nothing_that_a_machine_says_ends_the_connections_of_others(arrivals: Arrivals) -> None:
    """SEC-7, SEC-34."""
    arrivals.expect([0, 1])
    good, _ = greet(arrivals, 0, "good")
    with good:
        for said in (
            b"[[], 0]",
            b"[{}, 0]",
            b"[null, 0]",
            b'["pong", {}]',
            b'["failed", [], {}, 0]',
            b'["failed", "x", 0]',
            b'["failed", "\\ud800", "\\ud800", 0]',
            b'["leaving", ' + b"[" * 60_000,
            b"[" * 60_000 + b"]" * 5_000,
            b"9" * 60_000,
            b"\xff",
            b"x" * 200_000,
        ):
            bad, answer = greet(arrivals, 1, "bad")
            assert answer["welcome"]["place"] == 1
            with bad:
                try:
                    bad.sendall(said + b"\n")
                except OSError:
                    pass  # cut off in the middle of it
                _still_serves(arrivals, good)


def test_a_machine_that_talks_without_end_leaves_time_for_the_others(arrivals: Arrivals) -> None:
    """SEC-7, SEC-34."""
    arrivals.expect([0, 1])
    good, _ = greet(arrivals, 0, "good")
    bad, _ = greet(arrivals, 1, "bad")
    over = threading.Event()

    def talk() -> None:
        said = b'["pong", 0]\n' * 20_000
        try:
            while not over.is_set():
                bad.sendall(said)
        except OSError:
            pass

    talking = threading.Thread(target=talk)
    with good, bad:
        talking.start()
        try:
            for _ in range(3):
                _still_serves(arrivals, good)
        finally:
            over.set()
            talking.join()


def test_a_machine_that_asks_for_nothing_but_sends_orders_back_is_cut_off(arrivals: Arrivals) -> None:
    """SEC-7."""
    arrivals.expect([0])
    sock, _ = greet(arrivals, 0, "key")
    with sock:
        sock.sendall(written(ClientToJoiner.End()) + b"\n")
        assert sock.recv(100) == b""


def test_what_a_machine_says_of_itself_is_shown_as_text_and_not_without_end(arrivals: Arrivals) -> None:
    """SEC-34."""
    arrivals.expect([0])
    first, _ = greet(arrivals, 0, "key", name="\x1b]0;title\x07evil\ud800\n" + "x" * 500)
    with first:
        name = arrivals.member(0).name
        assert name.isprintable()
        assert "evil" in name
        assert len(name) <= 255
        for number in range(60):
            sock, answer = greet(arrivals, 0, "another", name=f"intruder {number}")
            sock.close()
            assert "taken" in answer["refused"]
    assert len(arrivals.warnings) <= 25
    assert "intruder 0" in arrivals.warnings[0]


@pytest.mark.parametrize("code", [b"nonsense", b"", b"9" * 5000, b"\xff"])
def test_an_exit_code_that_is_none_is_a_lost_connection(arrivals: Arrivals, code: bytes) -> None:
    """SEC-7."""
    arrivals.expect([0])
    control, _ = greet(arrivals, 0, "key")
    shell = JoinShell(arrivals.member(0), arrivals.if_we_die)
    with control, tempfile.TemporaryFile() as errors, ExitStack() as ends:
        started: list[Joined] = []
        starting = threading.Thread(target=lambda: started.append(shell.start(["true"], {}, errors)))
        starting.start()
        order = _order(control)
        stream = ends.enter_context(dial(arrivals))
        stream.sendall(json.dumps({"stream": order[1]}).encode() + b"\n")
        starting.join(30)
        stream.sendall(struct.pack("!BI", 3, len(code)) + code)
        assert started[0].wait(20) == Joined.LOST
        started[0].stdin.close()
        started[0].stdout.close()


def test_a_crowd_that_has_a_whole_ipv6_network_takes_no_more_than_one_address(
    arrivals: Arrivals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SEC-3, SEC-34."""
    monkeypatch.setattr(members, "_HANDSHAKE", 300.0)
    most = members._PER_NETWORK  # pyright: ignore[reportPrivateUsage]
    with ExitStack() as crowd:
        near: list[socket.socket] = []
        for number in range(most + 20):
            left, right = socket.socketpair()
            left.setblocking(False)
            near.append(crowd.enter_context(left))
            arrivals._listener.take(right, f"2001:db8:1:2::{number:x}")  # pyright: ignore[reportPrivateUsage]
        left, right = socket.socketpair()
        left.setblocking(False)
        arrivals._listener.take(right, "2001:db8:1:3::1")  # pyright: ignore[reportPrivateUsage]
        with left:
            until(lambda: sum(map(_ended, near)) == 20, 30)
            assert not _ended(left)


def test_a_program_that_writes_without_end_is_ended(arrivals: Arrivals, monkeypatch: pytest.MonkeyPatch) -> None:
    """SEC-7."""
    monkeypatch.setattr(shell_module, "_MOST_OUTPUT", 1 << 20)
    arrivals.expect([0])
    control, _ = greet(arrivals, 0, "key")
    shell = JoinShell(arrivals.member(0), arrivals.if_we_die)
    with control, ExitStack() as ends:
        raised: list[BaseException] = []

        def run() -> None:
            try:
                shell.run(["yes"], timeout=60)
            except BootstrapError as exc:
                raised.append(exc)

        running = threading.Thread(target=run)
        running.start()
        stream = ends.enter_context(dial(arrivals))
        stream.sendall(json.dumps({"stream": _order(control)[1]}).encode() + b"\n")
        piece = struct.pack("!BI", 1, 1 << 16) + bytes(1 << 16)
        with pytest.raises(OSError):
            for _ in range(1000):
                stream.sendall(piece)
        running.join(30)
        assert "it wrote more than 1 MiB" in str(raised[0])


def test_a_stream_id_opens_one_connection_once(arrivals: Arrivals) -> None:
    """SEC-34."""
    arrivals.expect([0])
    control, _ = greet(arrivals, 0, "key")
    shell = JoinShell(arrivals.member(0), arrivals.if_we_die)
    address = told(arrivals)["addresses"][0]
    with control, ExitStack() as ends:
        reached: list[socket.socket] = []
        reaching = threading.Thread(target=lambda: reached.append(shell.reach("127.0.0.1", 1)))
        reaching.start()
        id = _order(control)[1]
        with dial(arrivals) as wrong:  # of the other kind
            wrong.sendall(json.dumps({"stream": id}).encode() + b"\n")
            assert wrong.recv(10) == b""
        for first in (True, False):
            sock = ends.enter_context(socket.create_connection(address, 30))
            sock.sendall(id.encode() + b"hello")
            if first:
                reaching.join(30)
                assert ends.enter_context(reached[0]).recv(5) == b"hello"
            else:
                assert _ended(sock)


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"[]",
        b'{"new": null, "from": ""}',
        b'{"new": Infinity, "from": ""}',
        b'{"new": -1, "from": ""}',
        b'{"new": 100000000, "from": ""}',
        b'{"new": true, "from": ""}',
        b'{"new": 1, "from": 1}',
        b'{"new": 1, "from": "\\u0000"}',
        b'{"new": ' + b"9" * 5000 + b"}",
    ],
)
def test_what_a_login_host_says_is_checked_before_it_is_used(line: bytes) -> None:
    """SEC-7, SEC-34."""
    with pytest.raises(ValueError):
        relay._message(line, {"new": int, "from": str})  # pyright: ignore[reportPrivateUsage]


def _ended(sock: socket.socket) -> bool:
    try:
        return sock.recv(10, socket.MSG_PEEK) == b""
    except ConnectionError:
        return True
    except BlockingIOError:
        return False


def _order(control: ssl.SSLSocket) -> list[Any]:
    """The next order that is no question whether the machine is there."""
    control.settimeout(30)
    received = b""
    while True:
        piece = control.recv(1 << 16)
        assert piece
        received += piece
        for line in received.split(b"\n")[:-1]:
            message = json.loads(line)
            if message[0] != "ping":
                return message


def _still_serves(arrivals: Arrivals, good: ssl.SSLSocket) -> None:
    """Whether a machine still gets its orders soon, and is heard."""
    shell = JoinShell(arrivals.member(0), arrivals.if_we_die)
    failures: list[BaseException] = []

    def start() -> None:
        try:
            with tempfile.TemporaryFile() as errors:
                shell.start(["true"], {}, errors)
        except BootstrapError as exc:
            failures.append(exc)

    starting = threading.Thread(target=start, daemon=True)
    starting.start()
    good.settimeout(15)
    order = _order(good)
    good.sendall(json.dumps(["failed", order[1], "it cannot", 0]).encode() + b"\n")
    starting.join(15)
    assert failures
    assert "it cannot" in str(failures[0])


@pytest.mark.parametrize("options", [[], ["-I"]])
def test_the_file_imports_nothing_from_where_it_lies(arrivals: Arrivals, tmp_path: Path, options: list[str]) -> None:
    """Others may write there, as in /tmp (SEC-21, SEC-34)."""
    for name in ("argparse", "hashlib", "ssl", "json", "base64"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'taken')!r}, 'w').close()\n")
    path = tmp_path / "join.py"
    path.write_text(join_file(arrivals.text))
    path.chmod(0o600)
    done = subprocess.run([sys.executable, *options, path, "--help"], capture_output=True, timeout=60, check=False)
    assert b"Makes this machine a node" in done.stdout
    assert not (tmp_path / "taken").exists()
