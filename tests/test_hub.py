"""The client's connections, as sockets come and go."""

from __future__ import annotations

import socket
import ssl
from contextlib import ExitStack

from skyward.engine.hub import Hub


def test_a_new_connection_may_have_the_file_number_of_one_that_was_lost() -> None:
    """As happens when two nodes are replaced at once: the lost one is taken out before the new one is let in."""
    with ExitStack() as stack:
        hub = Hub(2, lambda number: socket.socket(), ssl.create_default_context())
        lost, peer = socket.socketpair()
        stack.callback(peer.close)
        hub.peers[1].link.sock = lost  # type: ignore[assignment] - any socket does
        hub._register()  # pyright: ignore[reportPrivateUsage]
        number = lost.fileno()
        lost.close()
        hub.peers[1].link.sock = None
        new, peer = socket.socketpair()
        stack.callback(peer.close)
        stack.callback(new.close)
        assert new.fileno() == number
        hub.peers[0].link.sock = new  # type: ignore[assignment] - as above
        hub._register()  # pyright: ignore[reportPrivateUsage]
        peer.send(b"x")
        assert [key.data for key, _ in hub._selector.select(1)] == [0]  # pyright: ignore[reportPrivateUsage]
        hub._selector.close()  # pyright: ignore[reportPrivateUsage]
        hub._wake_read.close()  # pyright: ignore[reportPrivateUsage]
        hub._wake_write.close()  # pyright: ignore[reportPrivateUsage]
