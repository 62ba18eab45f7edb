"""Addresses as people write them, and which of them count as one sender."""

from __future__ import annotations

import pytest

from skyward.node import join_relay
from skyward.node.addresses import network, plain


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
