"""Whom a member of the pool can speak for: itself. A node that was taken over is not the client, and no other node."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

import skyward as sky
from skyward.transport import certificates
from skyward.transport.link import greet
from tests.ssh.places import reached
from tests.support.hosts import Network


@sky.compute
def add(a: int, b: int) -> int:
    return a + b


@pytest.fixture(scope="module")
def pool(net: Network) -> Iterator[sky.ComputePool]:
    with sky.ComputePool(provider=reached(net, 2), console=False) as pool:
        yield pool


def told(pool: sky.ComputePool, role: str, hello: dict[str, Any], node: int = 0) -> Any:
    """What a node's agent answers to somebody who has this role's certificate and key."""
    own, keeper = pool._fleet.certificates, pool._fleet.by_node[node].keeper
    assert own is not None
    tls = certificates.context(own.authority.issue(role), server=False)
    with tls.wrap_socket(keeper.shell.reach(*keeper.ports[node])) as sock:
        return greet(sock, hello, time.monotonic() + 30)


def session(pool: sky.ComputePool, node: int = 0) -> str:
    """The client's own session with a node."""
    return pool._fleet.engine._connections.peers[node].session


@pytest.mark.parametrize("role", ["node-0", "node-1", "scheduler"])
def test_a_nodes_certificate_does_not_speak_for_the_client(pool: sky.ComputePool, role: str) -> None:
    """SEC-4, SEC-7: it would give node 0 other calls to run, and end those of the client."""
    call = add(1, 2) > pool
    answer = told(pool, role, {"session": session(pool), "received": 0})
    assert set(answer) == {"refused"}
    assert role in answer["refused"]
    assert call.result(60) == 3
    assert add(1, 2) @ pool == [3, 3]


def test_a_nodes_certificate_does_not_speak_for_another_node(pool: sky.ComputePool) -> None:
    """SEC-4: locks and barriers of other nodes are theirs."""
    hello = {"share": 2, "session": "x", "received": 0}
    assert set(told(pool, "node-1", hello)) == {"refused"}
    assert set(told(pool, "client", hello)) == {"refused"}
    assert set(told(pool, "node-2", hello)) == {"incarnation", "session", "received", "unread"}


def test_a_strange_session_is_refused_and_harms_nobody(pool: sky.ComputePool) -> None:
    """SEC-4: it would end the calls of the pool's own client, which would wait for them for ever."""
    before = session(pool)
    call = add(1, 2) > pool
    answer = told(pool, "client", {"session": "another", "received": 0})
    assert "another pool" in answer["refused"]
    assert call.result(60) == 3
    assert add(1, 2) @ pool == [3, 3]
    assert session(pool) == before


def test_the_client_talks_to_the_node_that_it_called(pool: sky.ComputePool) -> None:
    """SEC-4: a node that answers in place of another is not given its calls."""
    keepers = [pool._fleet.by_node[node].keeper for node in range(2)]
    places = [keeper.ports for keeper in keepers]
    shells = [keeper.shell for keeper in keepers]
    with shells[1].reach(*places[1][1]):
        pass
    keepers[0].ports, keepers[0].shell = {0: places[1][1]}, shells[1]  # as if node 1 had got hold of its address
    try:
        with pytest.raises(certificates.WrongPeer, match=r"'node-1'.*not 'node-0'"):
            pool._fleet.reach(0)
    finally:
        keepers[0].ports, keepers[0].shell = places[0], shells[0]
    assert add(1, 2) @ pool == [3, 3]
