"""Which addresses nodes use among each other."""

from __future__ import annotations

import socket

from skyward.node.keeper import probe
from skyward.setup.network import Address, Blocked, Layout, blocked_pairs, candidates


def address(ip: str, interface: str = "eth0") -> Address:
    return Address(interface, ip, "255.255.255.0")


def test_a_network_of_their_own_is_preferred_to_the_one_the_client_came_by() -> None:
    machines = [[address("203.0.113.1"), address("10.0.5.1", "priv0")], [address("203.0.113.2"), address("10.0.5.2")]]
    assert [a.ip for a in candidates(machines)[0]] == ["10.0.5.1", "10.0.5.2"]
    assert [a.ip for a in candidates(machines)[1]] == ["203.0.113.1", "203.0.113.2"]


def test_a_bridge_that_has_the_same_address_everywhere_connects_nobody() -> None:
    machines = [[address("10.1.0.1"), address("172.17.0.1", "docker0")] for _ in range(2)]
    machines[1][0] = address("10.1.0.2")
    assert candidates(machines) == [(machines[0][0], machines[1][0])]


def test_machines_in_different_networks_use_the_addresses_ssh_came_in_on() -> None:
    machines = [[address("10.1.0.1")], [address("10.2.0.1")]]
    assert [[a.ip for a in found] for found in candidates(machines)] == [["10.1.0.1", "10.2.0.1"]]


def test_blocked_pairs_are_named_with_both_machines_and_the_reason() -> None:
    blocked = blocked_pairs({0: {1: ""}, 1: {0: "no answer within 3 s"}})
    assert blocked == (Blocked(1, 0, "no answer within 3 s"),)
    layout = Layout((address("10.1.0.1"), address("10.1.0.2")), blocked)
    assert layout.star
    text = layout.explain(["gpu1", "gpu2"])
    assert text == "node 1 (gpu2) cannot connect to node 0 (gpu1, 10.1.0.1): no answer within 3 s"


def test_many_blocked_pairs_are_counted_not_listed() -> None:
    blocked = tuple(Blocked(i, j, "refused") for i in range(4) for j in range(4) if i != j)
    layout = Layout(tuple(address(f"10.1.0.{i}") for i in range(4)), blocked)
    assert layout.explain("abcd").endswith("and 8 more pairs")


def test_a_probe_tells_who_listens_and_who_does_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
        closed.close()
        found = probe({"1": ("127.0.0.1", listener.getsockname()[1]), "2": ("127.0.0.1", port)}, 3)
    assert found == {"1": "", "2": "Connection refused"}
