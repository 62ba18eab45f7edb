"""The nodes of a group find each other, or each of them names the one that is missing."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from skyward.api.info import InstanceInfo, NetworkInfo, Peer
from skyward.errors import SkywardError
from skyward.plugins._rendezvous import Rendezvous

HOST = "127.0.0.1"


@pytest.fixture
def port() -> int:
    with socket.create_server((HOST, 0)) as found:
        return found.getsockname()[1]


def at(
    port: int, node: int, nodes: int, seconds: float = 20, *, job: str = "test", group: str = "JAX's group"
) -> Rendezvous:
    peers = tuple(Peer(number, HOST) for number in range(nodes))
    info = InstanceInfo(
        node=node, total_nodes=nodes, head_addr=HOST, head_port=port, job_id=job, peers=peers, network=NetworkInfo("lo")
    )
    return Rendezvous(group, info, port, seconds)


def together(*acts: Callable[[], Any]) -> list[Future[Any]]:
    with ThreadPoolExecutor(len(acts)) as threads:
        return [threads.submit(act) for act in acts]


def connected(port: int) -> socket.socket:
    deadline = time.monotonic() + 20
    while True:
        try:
            return socket.create_connection((HOST, port), timeout=20)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline, "node 0 does not listen"
            time.sleep(0.01)


def test_nodes_meet_when_all_are_there_and_get_the_answer_of_node_0(port: int) -> None:
    asked: list[int] = []

    def answer() -> int:
        asked.append(1)
        return 4711

    acts = [lambda node=node: at(port, node, 3).meet(answer) for node in (2, 1, 0)]
    assert [each.result() for each in together(*acts)] == [4711] * 3
    assert asked == [1]


def test_one_node_meets_nobody_and_waits_for_nobody(port: int) -> None:
    assert at(port, 0, 1).meet(lambda: "alone") == "alone"


def test_every_node_is_told_which_ones_did_not_come(port: int) -> None:
    """Rows 16 to 18 of the faults: a rank that never arrives is named, in time."""
    for each in together(*(at(port, node, 4, 1.5).meet for node in (0, 2))):
        with pytest.raises(SkywardError, match=r"all 4 nodes.*nodes 1 and 3 did not come within 1.5 s.*@ pool"):
            each.result()


def test_a_node_whose_head_does_not_come_is_told_so(port: int) -> None:
    with pytest.raises(SkywardError, match=r"node 1 waits for node 0.*node 0 did not come"):
        at(port, 1, 2, 0.2).meet()
    with pytest.raises(SkywardError, match=r"node 1 waits for node 0.*node 0 did not come"):
        at(port, 1, 2, 0.2).await_listener()


def test_a_limit_is_called_as_the_user_calls_it(port: int) -> None:
    info = at(port, 0, 2).info
    with pytest.raises(SkywardError, match=r"node 0 waits for node 1 to form the torch group.*within timeout=0\.1 s"):
        Rendezvous("the torch group", info, port, 0.1, "timeout").meet()


def test_nodes_of_another_pool_do_not_count(port: int) -> None:
    for each in together(at(port, 0, 2, 1).meet, at(port, 1, 2, 1, job="another").meet):
        with pytest.raises(SkywardError, match="did not come"):
            each.result()


@pytest.mark.parametrize(
    "words", [b"", b"[", b"GET / HTTP/1.1\r\n\r\n\n", b"[]\n", b"7\n", b'["test", 9]\n', b"\xff\n"]
)
def test_strangers_keep_nobody_waiting_and_count_as_no_node(port: int, words: bytes) -> None:
    with ThreadPoolExecutor(2) as threads:
        head = threads.submit(at(port, 0, 2, 20).meet)
        with connected(port) as stranger:
            stranger.sendall(words)
            assert threads.submit(at(port, 1, 2, 20).meet).result() is None
            assert head.result() is None


def test_a_node_that_leaves_before_all_are_there_must_come_again(port: int) -> None:
    with ThreadPoolExecutor(2) as threads:
        head = threads.submit(at(port, 0, 3, 20).meet)
        with connected(port) as first:
            first.sendall(json.dumps(["test", 1]).encode() + b"\n")
        other = threads.submit(at(port, 2, 3, 20).meet)
        with connected(port) as again:
            again.sendall(json.dumps(["test", 1]).encode() + b"\n")
            assert again.makefile().readline() == '{"answer": null}\n'
        assert head.result() is other.result() is None


def test_a_port_in_use_is_named(port: int) -> None:
    with socket.create_server((HOST, port)), pytest.raises(SkywardError, match=f"port {port}.*not free"):
        at(port, 0, 2, 1).meet()


def test_a_listener_is_awaited(port: int) -> None:
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(at(port, 1, 2).await_listener)
        with socket.create_server((HOST, port)):
            assert waiting.result() is None


def test_nodes_that_cannot_reach_each_other_do_not_try(port: int) -> None:
    info = replace(at(port, 0, 2).info, network=NetworkInfo(blocked="a wall"))
    with pytest.raises(SkywardError, match="a wall"):
        Rendezvous("the group", info, port, 20).meet()
