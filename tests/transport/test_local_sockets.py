"""Sockets of one computer: any length of path, and no other user at the other end."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyward.transport.local_sockets import check_peer, connect, listen

NOBODY = 65534
_BECOME = f"import os, socket, sys; s = socket.socket(socket.AF_UNIX); os.setgroups([]); os.setuid({NOBODY})"
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.fixture
def public() -> Iterator[Path]:
    """A directory that every user may write to."""
    with tempfile.TemporaryDirectory() as made:
        os.chmod(made, 0o777)
        yield Path(made)


@pytest.mark.parametrize("directory", ["short", "a-long-name-of-a-directory/" * 8])
def test_both_sides_meet_at_a_path_of_any_length(tmp_path: Path, directory: str) -> None:
    path = tmp_path / directory / "agent-0"
    path.parent.mkdir(parents=True)
    with listen(str(path)) as server, connect(str(path), 10) as client:
        accepted, _ = server.accept()
        with accepted:
            check_peer(accepted)
            client.sendall(b"hello")
            assert accepted.recv(16) == b"hello"
    assert stat.S_ISSOCK(path.lstat().st_mode)
    assert stat.S_IMODE(path.lstat().st_mode) == 0o600


def test_nothing_stays_open_when_nobody_listens(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(FileNotFoundError):
        connect(str(tmp_path / "agent-0"), 10)
    listen(str(tmp_path / "agent-0")).close()
    with pytest.raises(ConnectionRefusedError):
        connect(str(tmp_path / "agent-0"), 10)
    with pytest.raises(OSError, match="in use"):
        listen(str(tmp_path / "agent-0"))
    assert len(os.listdir("/proc/self/fd")) == len(before)


@as_root
def test_a_process_of_another_user_is_refused(public: Path) -> None:
    """Even where the files' modes would let it in."""
    path = public / "agent-0"
    with listen(str(path)) as server:
        path.chmod(0o666)
        with as_nobody(f"s.connect({str(path)!r})") as other:
            accepted, _ = server.accept()
            with accepted, pytest.raises(PermissionError, match=f"user {NOBODY}"):
                check_peer(accepted)
            assert other.stdin is not None
            other.stdin.close()
            assert other.wait(60) == 0


@as_root
def test_a_listener_of_another_user_is_refused(public: Path) -> None:
    path = public / "agent-0"
    with as_nobody(f"s.bind({str(path)!r}); s.listen(); print(flush=True)") as other:
        assert other.stdout is not None
        assert other.stdin is not None
        other.stdout.readline()
        with pytest.raises(PermissionError, match=f"user {NOBODY}"):
            connect(str(path), 10)
        other.stdin.close()


def as_nobody(program: str) -> subprocess.Popen[str]:
    """A process of another user that does something and waits for the end of its standard input."""
    return subprocess.Popen(
        [sys.executable, "-IS", "-c", f"{_BECOME}; {program}; sys.stdin.read()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_tcp_socket_has_no_user() -> None:
    """The kernel answers for sockets of this computer only: whoever asks for another one is not let in."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), 10) as sock:
        with pytest.raises(OSError):
            check_peer(sock)
