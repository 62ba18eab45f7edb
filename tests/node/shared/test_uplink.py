"""The link from a node's agent to that of node 0: what node 0 could not read is not sent again."""

from __future__ import annotations

import selectors
import socket
import threading
import time

import pytest

from skyward.node.protocol import Share
from skyward.node.shared.agent_side import Uplink
from skyward.transport.frames import encode
from skyward.transport.link import greet


@pytest.mark.parametrize("unread", [0, 3])
def test_what_node_0_cannot_read_is_given_up_in_the_end_and_those_who_wait_are_told(unread: int) -> None:
    near, far = socket.socketpair()
    woken = threading.Event()
    lost: list[str] = []
    with selectors.DefaultSelector() as selector, far:
        uplink = Uplink(1, selector, time.monotonic, woken.set, lambda: near, lambda *_: None, lost.append)
        uplink.post(Share("1/token/runner", ["gone", "why", 0], []))
        hello = greet(far, None, time.monotonic() + 30)
        for piece in encode({"incarnation": "x", "session": hello["session"], "received": 0, "unread": unread}):
            far.sendall(piece)
        assert woken.wait(30)
        uplink.poll()
        far.settimeout(30)
        assert (far.recv(1) == b"") is bool(unread)
        assert ["cannot read what they send" in text for text in lost] == [True] * bool(unread)
        uplink.renounce("the end")
