"""Where an agent lets its client in, whoever else is at the door; and the ports that it gives to frameworks."""

from __future__ import annotations

import errno
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from skyward.node.client_link import ClientListener
from skyward.node.terms import TermsSlot
from skyward.transport import certificates
from skyward.transport.certificates import Authority
from skyward.transport.frames import encode
from skyward.transport.link import greet
from tests.support.waiting import until

IP_LOCAL_PORT_RANGE = 51  # of linux/in.h; since Linux 6.3


@pytest.fixture
def door() -> Iterator[ClientListener]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        made = ClientListener(
            listener, "127.0.0.1", None, "", TermsSlot(bytearray(64), 0), lambda: None, lambda sock, name: None
        )
        yield made
        made.close()


def with_one_port(port: int) -> socket.socket:
    """A socket for which this is the only port that the kernel can choose."""
    made = socket.socket()
    try:
        made.setsockopt(socket.IPPROTO_IP, IP_LOCAL_PORT_RANGE, (port | port << 16).to_bytes(4, "little"))
    except OSError:
        made.close()
        pytest.skip("this kernel cannot narrow the range of free ports")
    return made


def test_a_port_that_was_given_out_is_given_to_nobody_else(door: ClientListener) -> None:
    """Row 25: a framework listens on it seconds or hours later; until then, no other pool may get it."""
    for port in door.free_ports(3):
        with with_one_port(port) as other, pytest.raises(OSError) as caught:
            other.bind(("127.0.0.1", 0))
        assert caught.value.errno == errno.EADDRINUSE


def test_a_port_that_was_given_out_is_not_used_for_a_connection(door: ClientListener) -> None:
    (port,) = door.free_ports(1)
    with socket.create_server(("127.0.0.1", 0)) as server, with_one_port(port) as other:
        with pytest.raises(OSError) as caught:
            other.connect(server.getsockname())
    assert caught.value.errno == errno.EADDRNOTAVAIL


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_a_framework_can_listen_on_a_port_that_was_given_out(door: ClientListener, address: str) -> None:
    """As torch, gRPC and TensorFlow do, with SO_REUSEADDR; again when the first group has ended."""
    (port,) = door.free_ports(1)
    for _ in range(2):
        with socket.create_server((address, port)) as server:
            with socket.create_connection(("127.0.0.1", port), timeout=10), server.accept()[0]:
                pass


@pytest.fixture
def guarded() -> Iterator[tuple[ClientListener, Authority, tuple[str, int]]]:
    """A listener with TLS, as those of nodes on other machines are."""
    authority = Authority("guarded", 3600)
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        context = certificates.context(authority.issue("node-0"), server=True)
        made = ClientListener(
            listener, "127.0.0.1", context, "pool", TermsSlot(bytearray(64), 0), lambda: None, lambda sock, name: None
        )
        made.open()
        yield made, authority, listener.getsockname()
        listener.shutdown(socket.SHUT_RDWR)


def greeted(authority: Authority, end: tuple[str, int], role: str = "client") -> Any:
    """What the listener says to a peer that it refuses; None if it takes it."""
    tls = certificates.context(authority.issue(role), server=False)
    with certificates.secure(socket.create_connection(end, 30), tls, 30, "node-0") as sock:
        for piece in encode({"session": "pool.1", "received": 0}):
            sock.sendall(piece)
        sock.settimeout(0.1 if role == "client" else 30)
        try:
            return sock.recv(1000)
        except TimeoutError:
            return None


def test_thousands_that_say_nothing_take_little_and_shut_nobody_out(
    guarded: tuple[ClientListener, Authority, tuple[str, int]],
) -> None:
    """SEC-3: threads and descriptors stay few, and a member gets in although the crowd stays."""
    listener, authority, end = guarded
    _allow_files(6000)
    own = {thread.ident for thread in threading.enumerate()}
    crowd: list[socket.socket] = []
    most = 0
    try:
        for count in range(400):
            crowd.append(socket.create_connection(end, timeout=30))
            if count % 20 == 0:
                most = max(most, threading.active_count() - len(own))
        until(lambda: len(listener._waiting) <= 64)
        until(lambda: threading.active_count() - len(own) <= 66)
        held = len(os.listdir("/proc/self/fd")) - len(crowd)
        assert greeted(authority, end) is None
        admitted = until(listener.next)
        assert admitted[1] == {"session": "pool.1", "received": 0}
        admitted[0].close()
    finally:
        for sock in crowd:
            sock.close()
    assert held < 64 + 64
    assert most < 300
    until(lambda: not listener._waiting)


def test_a_crowd_at_one_address_pushes_nobody_of_another_out(
    guarded: tuple[ClientListener, Authority, tuple[str, int]],
) -> None:
    """SEC-3: there is a limit for each address, too."""
    listener, _, end = guarded
    with socket.create_connection(end, 30, ("127.0.0.2", 0)) as quiet:
        until(lambda: "127.0.0.2" in listener._waiting.networks())
        crowd = [socket.create_connection(end, timeout=30) for _ in range(200)]
        try:
            until(lambda: sum(sock.recv(1) == b"" for sock in crowd[:1]) == 1)  # the first of them was sent away
            assert "127.0.0.2" in listener._waiting.networks()
            quiet.setblocking(False)
            with pytest.raises(BlockingIOError):
                quiet.recv(1)
        finally:
            for sock in crowd:
                sock.close()


def test_a_greeting_that_trickles_in_is_given_no_more_time_than_others() -> None:
    """SEC-3: a byte now and then does not keep a connection."""
    near, far = socket.socketpair()
    done = threading.Event()

    def trickle() -> None:
        while not done.wait(0.02):
            with suppress(OSError):
                far.send(b"\0")

    threading.Thread(target=trickle, daemon=True).start()
    with near, far, pytest.raises((TimeoutError, ValueError)):
        try:
            greet(near, None, time.monotonic() + 0.3)
        finally:
            done.set()


def test_a_node_that_greets_as_the_client_is_told_why_it_is_refused(
    guarded: tuple[ClientListener, Authority, tuple[str, int]],
) -> None:
    """SEC-4, SEC-7."""
    listener, authority, end = guarded
    assert b"does not allow this greeting" in greeted(authority, end, "node-1")
    assert listener.next() is None


def _allow_files(count: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < count:
        pytest.skip("this process may not open so many files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count), hard))
