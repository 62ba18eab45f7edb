"""The ports that a node gives to frameworks: theirs until the pool is closed, although they listen only later."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator

import pytest

from skyward.node.client_listener import ClientListener

IP_LOCAL_PORT_RANGE = 51  # of linux/in.h; since Linux 6.3


@pytest.fixture
def door() -> Iterator[ClientListener]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        made = ClientListener(listener, "127.0.0.1", None, "", lambda: None, lambda sock, name: None)
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
