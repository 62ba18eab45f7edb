"""What others on this computer can see of a pool, and reach: nothing."""

from __future__ import annotations

import os
import resource
import socket
import ssl
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import skyward as sky
from skyward.transport import certificates
from skyward.transport.frames import encode
from tests.support.processes import family as family_of
from tests.support.processes import seen

CANARIES = {
    "AWS_SECRET_ACCESS_KEY": "canary-aws",
    "HF_TOKEN": "canary-hf",
    "WANDB_API_KEY": "canary-wandb",
    "MY_PASSWORD": "canary-password",
    "SSH_AUTH_SOCK": "canary-agent",
    "SKYWARD_SOMETHING_TOKEN": "canary-own",
    "CUDA_SECRET_THING": "canary-cuda",
    "UNRELATED": "canary-unrelated",
    **{f"CANARY_{i}": f"canary-{i}" for i in range(50)},
}


@sky.compute
def echo(x: int) -> int:
    return x


@pytest.fixture(scope="module")
def pool() -> Iterator[sky.ComputePool]:
    """A pool of two nodes with dask, opened with canaries in the environment and a careless umask."""
    before = os.umask(0)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in CANARIES.items():
            patch.setenv(name, value)
        try:
            with sky.ComputePool(nodes=2, console=False) as opened:
                opened.dask().close()
                yield opened
        finally:
            os.umask(before)


def family(pool: sky.ComputePool) -> list[psutil.Process]:
    return family_of(pool._fleet.by_node[0].keeper.pid)


def listening(pool: sky.ComputePool) -> set[tuple[str, int]]:
    """The ports on which processes of the pool accept connections: dask's, no agents."""
    found: set[tuple[str, int]] = set()
    for _, connections in seen(family(pool), lambda process: process.net_connections("inet")):
        for connection in connections:
            if connection.status == psutil.CONN_LISTEN or connection.type == socket.SOCK_DGRAM:
                found.add((connection.laddr.ip, connection.laddr.port))
    return found


def answer(address: tuple[str, int], data: bytes, context: ssl.SSLContext | None) -> bytes:
    """What a listener says to `data`; nothing when it refuses."""
    try:
        sock = socket.create_connection(address, timeout=5)
        with sock if context is None else context.wrap_socket(sock) as sock:
            sock.settimeout(2)
            sock.sendall(data)
            got = b""
            while piece := sock.recv(4096):
                got += piece
            return got
    except (OSError, ssl.SSLError):
        return b""


def doors(pool: sky.ComputePool) -> list[str]:
    """The socket files on which agents accept connections."""
    return sorted(pool._fleet.by_node[0].keeper.sockets.values())


def said_at(path: str, data: bytes) -> bytes:
    """What an agent answers to `data`; nothing when it refuses."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(2)
        sock.connect(path)
        try:
            sock.sendall(data)
            return sock.recv(4096)
        except OSError:
            return b""


def stranger() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def test_every_listener_is_on_loopback(pool: sky.ComputePool) -> None:
    """SEC-2: two dask workers, one scheduler, and nothing else (no agent, no HTTP port)."""
    found = listening(pool)
    assert {ip for ip, _ in found} == {"127.0.0.1"}
    assert len(found) == 3
    mine = psutil.Process().net_connections("inet")
    assert not [c for c in mine if c.status == psutil.CONN_LISTEN]


def test_no_listener_answers_plain_tcp_or_http(pool: sky.ComputePool) -> None:
    """SEC-3, SEC-7."""
    for address in listening(pool):
        for data in (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", b"\x00" * 64, b"\x80\x05" + b"N." * 100):
            got = answer(address, data, None)
            assert len(got) < 16, (address, got)  # a TLS alert at most
    assert echo(1) @ pool == [1, 1]


def test_no_listener_talks_to_a_client_without_certificate(pool: sky.ComputePool) -> None:
    """SEC-3: TLS 1.3 refuses after the handshake; nothing is said before that."""
    for address in listening(pool):
        assert answer(address, b"hello" * 20, stranger()) == b""
    assert echo(1) @ pool == [1, 1]


def test_no_listener_talks_to_a_member_of_another_pool(pool: sky.ComputePool) -> None:
    """SEC-3, SEC-4, row 39: every pool has its own authority."""
    other = certificates.Authority("other", 3600).issue("client")
    context = certificates.context(other, server=False)
    context.verify_mode = ssl.CERT_NONE
    for address in listening(pool):
        assert answer(address, b"hello" * 20, context) == b""
    assert echo(1) @ pool == [1, 1]


def test_a_pool_of_this_computer_opens_no_port_and_loads_no_tls() -> None:
    """SEC-2: what is not there cannot be reached. Neither is asyncio, which brings TLS with it."""
    with sky.ComputePool(nodes=2, console=False) as opened:
        assert echo(1) @ opened == [1, 1]
        assert listening(opened) == set()
        for process, maps in seen(family(opened), lambda process: Path(f"/proc/{process.pid}/maps").read_text()):
            assert "/_ssl." not in maps, process


def test_agents_listen_on_private_files_only(pool: sky.ComputePool) -> None:
    """SEC-2, SEC-3: no port, and nobody but this user can open the directory or the file."""
    assert len(doors(pool)) == 2
    for path in map(Path, doors(pool)):
        assert stat.S_ISSOCK(path.lstat().st_mode)
        for each in (path, path.parent):
            assert stat.S_IMODE(each.lstat().st_mode) & 0o077 == 0
            assert each.lstat().st_uid == os.geteuid()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_no_agent_talks_to_another_user(pool: sky.ComputePool) -> None:
    """SEC-3: even with the file in hand, as if its modes had let it in."""
    hello = b"".join(map(bytes, encode({"session": "other", "received": 0})))
    for path in doors(pool):
        directory = os.open(os.path.dirname(path), os.O_PATH)
        os.chmod(path, 0o666)
        program = (
            f"import os, socket; s = socket.socket(socket.AF_UNIX); os.setgroups([]); os.setuid(65534)\n"
            f"s.connect('/proc/self/fd/{directory}/{os.path.basename(path)}'); s.settimeout(60)\n"
            f"s.sendall(bytes.fromhex('{hello.hex()}')); print(s.recv(100))"
        )
        try:
            os.chmod(os.path.dirname(path), 0o711)
            done = subprocess.run(
                [sys.executable, "-IS", "-c", program],
                pass_fds=[directory],
                capture_output=True,
                text=True,
                check=False,
            )
        finally:
            os.chmod(os.path.dirname(path), 0o700)
            os.chmod(path, 0o600)
            os.close(directory)
        assert done.stdout.strip() in ("", "b''"), done
        assert "Permission" not in done.stderr
    assert echo(1) @ pool == [1, 1]


def test_no_agent_answers_what_is_no_greeting(pool: sky.ComputePool) -> None:
    """SEC-3, SEC-7."""
    for path in doors(pool):
        for data in (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", b"\x00" * 64, b"\x80\x05" + b"N." * 100):
            assert said_at(path, data) == b""
    assert echo(1) @ pool == [1, 1]


def test_peers_that_say_nothing_delay_nobody(pool: sky.ComputePool) -> None:
    """SEC-3: half-open connections do not block a node."""
    idle = [socket.create_connection(a, timeout=5) for a in listening(pool) for _ in range(10)]
    for path in doors(pool) * 10:
        idle.append(socket.socket(socket.AF_UNIX))
        idle[-1].connect(path)
    try:
        assert [f.result(45) for f in [echo(i) > pool for i in range(20)]] == list(range(20))
        assert echo(1) @ pool == [1, 1]
    finally:
        for sock in idle:
            sock.close()


def test_files_of_a_pool_are_private_whatever_the_umask(pool: sky.ComputePool) -> None:
    """SEC-21."""

    @sky.compute
    def large() -> bytearray:
        return bytearray(4 << 20)

    @sky.compute
    def size(data: bytearray) -> int:
        return len(data)

    assert size(bytearray(4 << 20)) >> pool == 4 << 20
    kept = large() > pool
    kept.exception(45)
    places = {"/dev/shm", tempfile.gettempdir()}
    tops = [p for d in places for p in Path(d).glob("skyward-*") if _ours(p) and p.owner() == Path(__file__).owner()]
    assert tops
    for top in tops:
        for path in (top, *top.rglob("*")):
            if path.is_symlink():
                continue
            mode = stat.S_IMODE(path.lstat().st_mode)
            assert mode & 0o077 == 0, (path, oct(mode))
    assert len(kept.result()) == 4 << 20


def _ours(path: Path) -> bool:
    return path.name.startswith(f"skyward-{os.getpid()}-")


def test_no_secret_stands_in_a_command_line(pool: sky.ComputePool) -> None:
    """SEC-10."""
    for _, argv in seen(family(pool), lambda process: process.cmdline()):
        line = " ".join(argv)
        assert "canary" not in line
        assert "PRIVATE" not in line
        assert "CERTIFICATE" not in line


def test_the_clients_environment_stays_at_home(pool: sky.ComputePool) -> None:
    """SEC-13, SEC-12: neither in bodies nor in any process of the pool."""

    @sky.compute
    def environment() -> dict[str, str]:
        return dict(os.environ)

    for variables in environment() @ pool:
        assert not [name for name, value in variables.items() if "canary" in value]
    for process, text in seen(family(pool), lambda process: Path(f"/proc/{process.pid}/environ").read_bytes()):
        assert b"canary" not in text, process


def test_the_topology_holds_no_secret(pool: sky.ComputePool) -> None:
    """SEC-14."""

    @sky.compute
    def topology() -> str:
        return os.environ["COMPUTE_POOL"]

    for text in topology() @ pool:
        assert "PRIVATE" not in text
        assert "CERTIFICATE" not in text
        assert "canary" not in text


def test_core_dumps_are_off(pool: sky.ComputePool) -> None:
    """SEC-15: in runners, and in the processes that hold keys."""

    @sky.compute
    def limit() -> int:
        return resource.getrlimit(resource.RLIMIT_CORE)[0]

    assert limit() @ pool == [0, 0]
    for process, limits in seen(family(pool), lambda process: process.rlimit(psutil.RLIMIT_CORE)):
        assert limits[0] == 0, process


def test_no_key_lies_on_disk(pool: sky.ComputePool) -> None:
    """SEC-4: the authority's key never leaves the client's memory; nodes' keys are in memory too."""
    for directory in {"/dev/shm", tempfile.gettempdir()}:
        for path in [p for p in Path(directory).glob("skyward-*") if _ours(p)]:
            for file in [path] if path.is_file() else [f for f in path.rglob("*") if f.is_file()]:
                assert b"PRIVATE KEY" not in file.read_bytes(), file
    for _, files in seen(family(pool), lambda process: process.open_files()):
        for file in files:
            if Path(file.path).exists() and Path(file.path).stat().st_size < 1 << 20:
                assert b"PRIVATE KEY" not in Path(file.path).read_bytes(), file


def test_bodies_cannot_read_the_keys_of_their_node(pool: sky.ComputePool) -> None:
    """SEC-4: neither environment nor memory of the runner hold one."""

    @sky.compute
    def search() -> list[str]:
        import gc

        found = [n for n, v in os.environ.items() if "PRIVATE KEY" in v]
        needle = "-----BEGIN PRIVATE" + " KEY"
        found += [
            f"object {type(o)}" for o in gc.get_objects() if isinstance(o, dict) and needle in map(str, o.values())
        ]
        return found

    assert search() @ pool == [[], []]


def test_bodies_do_not_inherit_sockets_of_the_pool(pool: sky.ComputePool) -> None:
    """SEC-7: a runner has its own socket and pipes, and no connection of an agent, scheduler or neighbour."""

    @sky.compute
    def sockets() -> tuple[int, int]:
        me = psutil.Process()
        return len(me.net_connections("inet")), len(os.listdir("/proc/self/fd"))

    for internet, descriptors in sockets() @ pool:
        assert internet == 0
        assert descriptors < 16
