"""Addresses as people write them, which of them count as one sender, and who is sent away when too many wait."""

from __future__ import annotations

import socket

import pytest

from skyward.node import join_relay
from skyward.node.peers import WaitingPeers, network, plain


@pytest.mark.parametrize(
    ("address", "written"),
    [
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("192.0.2.7", "192.0.2.7"),
        ("2001:db8::7", "2001:db8::7"),
        ("::ffff:c000:207", "::ffff:c000:207"),
        ("", ""),
    ],
)
def test_an_ipv4_address_of_an_ipv6_socket_is_shown_as_ipv4(address: str, written: str) -> None:
    assert plain(address) == written


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("2001:db8:1:2::1", "2001:db8:1:2:ffff::9", True),
        ("2001:db8:1:2::1", "2001:db8:1:3::1", False),
        ("fe80::1%eth0", "fe80::2%eth1", True),
        ("192.0.2.7", "192.0.2.8", False),
        ("::ffff:192.0.2.7", "192.0.2.7", True),
        ("::ffff:192.0.2.7", "::ffff:192.0.2.8", False),
        ("nonsense:", "nonsense:", True),
        ("", "192.0.2.7", False),
    ],
)
def test_addresses_of_one_ipv6_network_count_as_one_sender(one: str, other: str, same: bool) -> None:
    for counted in (network, join_relay._network):  # pyright: ignore[reportPrivateUsage]
        assert (counted(one) == counted(other)) is same


def test_too_many_peers_cost_the_network_with_most_its_oldest() -> None:
    line = WaitingPeers(most=4, per_network=3)
    pairs = [socket.socketpair() for _ in range(6)]
    try:
        added = [line.add(pairs[0][0], "192.0.2.1")]
        added += [line.add(ours, "192.0.2.7") for ours, _ in pairs[1:5]]  # one too many of its network
        assert line.networks() == {"192.0.2.1": 1, "192.0.2.7": 3}
        added.append(line.add(pairs[5][0], "192.0.2.9"))  # one too many in all
        assert line.networks() == {"192.0.2.1": 1, "192.0.2.7": 2, "192.0.2.9": 1}
        for _, theirs in pairs:
            theirs.settimeout(0)
        assert [_ended(theirs) for _, theirs in pairs] == [False, True, True, False, False, False]
        for peer in added:
            line.remove(peer)
        assert len(line) == 0
    finally:
        for pair in pairs:
            for sock in pair:
                sock.close()


def _ended(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except BlockingIOError:
        return False
