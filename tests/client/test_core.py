"""The client's decisions on calls and nodes together, where one of them alone could not be wrong."""

from __future__ import annotations

from typing import Any

import pytest

from skyward.api.compute import PendingCompute
from skyward.client.actions import Fail, Post
from skyward.client.call import Call
from skyward.client.core import VERDICTS, Core
from skyward.errors import NodeLost
from skyward.node.protocol import AgentToClient, ClientToAgent
from tests.support.agent_calls import Bench
from tests.support.plans import StillMachines, plan_of_two


class _Links:
    """Connections as a test has them; no node is to be replaced."""

    def __init__(self) -> None:
        self.linked = {0, 1}

    def connected(self, number: int) -> bool:
        return number in self.linked

    def heard(self, number: int) -> float:
        return 100.0

    def greetings(self) -> list[dict[str, Any]]:
        return [{}, {}]


def _core(links: _Links, gang: bool = False) -> Core:
    return Core(plan_of_two(gang=gang), links, StillMachines())


def _call(retries: int = 0) -> Call:
    pending = PendingCompute[Any](abs, label="f")
    return Call(pending, {"name": "f", "attempt": 0}, [b""], {}, {}, retries)


def test_a_call_whose_argument_cannot_be_sent_is_cancelled_with_a_reason_that_the_node_can_tell() -> None:
    """The reason becomes the kind of the node's last word: without one that would be no message of ours."""
    core, call = _core(_Links()), _call()
    core.nodes.renew(100.0)
    core.ports(AgentToClient.Ports([1, 2, 3], 1), 0, 100.0)
    core.ready(AgentToClient.Ready(1), 0, 100.0)
    call.uploads["blob"] = ("/nowhere", 10)
    core.submit([call], 100.0)
    did = core.calls.unsendable(0, "blob", OSError("gone"), 101.0)
    (cancel,) = [message for action in did if isinstance(action, Post) for message in action.messages]
    assert isinstance(cancel, ClientToAgent.Cancel)

    bench = Bench()
    waiting = bench.take(call.id, {"blob"})
    bench.did = bench.calls.cancel(waiting.id, cancel.reason, cancel.grace, bench.now)
    assert [message[0] in VERDICTS for message in bench.messages()] == [True]


def test_the_calls_of_a_node_that_sends_nonsense_for_the_third_time_end() -> None:
    """The connection is then dropped for good, with the event `unreachable`, of a node that was ready or leaving."""
    for notice in (False, True):
        links = _Links()
        core, call = _core(links), _call()
        core.nodes.renew(100.0)
        core.ports(AgentToClient.Ports([1, 2, 3], 1), 0, 100.0)
        core.ready(AgentToClient.Ready(1), 0, 100.0)
        core.submit([call], 100.0)
        assert call.state == "sent"
        if notice:
            core.notice(AgentToClient.Notice(120.0), 0, 100.0)
        links.linked.discard(0)
        did = core.unreachable(0, ConnectionError("what it sends is not a message of ours"), 101.0)
        assert [action.call for action in did if isinstance(action, Fail)] == [call]


def test_a_head_whose_agent_was_restarted_before_it_had_named_ports_is_asked_again() -> None:
    """Also without a group; the pool would be opening until its deadline."""
    core = _core(_Links())
    core.nodes.renew(100.0)
    core.broken(0, 100.1)
    did = core.attached(0, restarted=True, now=100.2)
    posted = [action.messages for action in did if isinstance(action, Post) and action.node == 0]
    assert [type(message) for messages in posted for message in messages] == [ClientToAgent.Ports]


def test_a_broadcast_waits_longer_for_nodes_that_start_their_runners_again_than_for_one_without_a_connection() -> None:
    """Runners that were stopped import their frameworks again, which takes longer than a connection may be away."""
    links = _Links()
    core = _core(links, gang=True)
    core.nodes.renew(100.0)
    core.ports(AgentToClient.Ports([1, 2, 3], 1), 0, 100.0)
    assert core.missing([0, 1], late=True) == [0, 1]
    for node in (0, 1):
        core.ready(AgentToClient.Ready(1), node, 130.0)
    assert core.missing([0, 1], late=True) == []
    core.nodes.taint()
    assert core.missing([0, 1], late=True) == [0, 1]
    with pytest.raises(NodeLost, match="it is not ready"):
        core.missing([0, 1], late=True, overdue=True)
    links.linked.discard(1)
    with pytest.raises(NodeLost, match="node 1"):
        core.missing([0, 1], late=True)
