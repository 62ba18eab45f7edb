"""The nodes of a pool: every row of their table, and when they are given up, set up again and replaced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from skyward import events
from skyward.client.actions import Emit, ForgetBlobs, Inquire, Lose, NodeAction, Post, Reconnect, Renounce
from skyward.client.connections import NodeEnded
from skyward.client.nodes import NODES, Node, Nodes
from skyward.errors import AcceleratorMismatch, BootstrapError
from skyward.node.protocol import ClientToAgent, Info
from tests.support.plans import StillMachines, plan_of_two

STATES = sorted({state for state, _ in NODES})
EVENTS = sorted({event for _, event in NODES})
PORTS = [7001, 7002, 7003]


class Links:
    """What is known of the connections, as a test has it."""

    def __init__(self, nodes: int) -> None:
        self.linked = set(range(nodes))
        self.heard_at = dict.fromkeys(range(nodes), 100.0)

    def connected(self, number: int) -> bool:
        return number in self.linked

    def heard(self, number: int) -> float:
        return self.heard_at[number]

    def greetings(self) -> list[dict[str, Any]]:
        return [{} for _ in self.heard_at]


class Replacements(StillMachines):
    """Other machines, as a test has them."""

    def __init__(self, wanted: bool, refusal: Any) -> None:
        super().__init__(refusal)
        self.wanted, self.begun = wanted, set[int]()

    def replace(self, node: int) -> bool:
        if self.wanted:
            self.begun.add(node)
        return self.wanted

    def replacing(self, node: int) -> bool:
        return node in self.begun


class Bench:
    """Two nodes on other machines, of which the tests look at number 1."""

    def __init__(
        self,
        gang: bool = False,
        local: bool = False,
        replaces: bool = False,
        refusal: Any = lambda node, about: None,
        **plan: Any,
    ) -> None:
        self.links, self.replacements, self.now = Links(2), Replacements(replaces, refusal), 100.0
        settings = plan_of_two(gang=gang, local=local, replaces=replaces, **plan)
        self.nodes = Nodes(settings, self.links, self.replacements)
        self.generation = 0
        self.renew()

    def renew(self) -> list[NodeAction]:
        self.generation += 1
        return self.nodes.renew(self.now) + self.nodes.on_ports(PORTS, self.generation, self.now)

    @property
    def node(self) -> Node:
        return self.nodes.all[1]

    def ready(self, number: int = 1) -> list[NodeAction]:
        return self.nodes.on_ready(number, self.generation, self.now)

    def failed(self) -> list[NodeAction]:
        error = {"type": "", "message": "no runner", "traceback": ""}
        return self.nodes.on_failed(1, error, self.generation, [b""], self.now)

    def broken(self) -> list[NodeAction]:
        self.links.linked.discard(1)
        return self.nodes.broken(1, self.now)

    def attached(self, restarted: bool = False) -> list[NodeAction]:
        self.links.linked.add(1)
        return self.nodes.attached(1, restarted=restarted, now=self.now)

    def replace(self, busy: bool = False) -> list[NodeAction]:
        vacant, actions = self.nodes.vacate(1, lambda numbers: busy, self.now)
        assert vacant
        return actions


def reach(state: str, replaces: bool = False) -> Bench:
    bench = Bench(replaces=replaces, present=1 if state in ("absent", "joining") else None)
    if state == "joining":
        bench.nodes.join(1, bench.now)
    if state in ("ready", "leaving", "silent"):
        bench.ready()
    if state == "leaving":
        bench.nodes.on_notice(1, 120.0, bench.now)
    elif state == "silent":
        bench.broken()
    elif state == "lost":
        bench.failed()
    elif state == "replaced":
        bench.replace()
    assert bench.node.state == state
    return bench


def apply(bench: Bench, event: str) -> list[NodeAction]:
    apply_it: dict[str, Callable[[], list[NodeAction]]] = {
        "ready": bench.ready,
        "renew": lambda: bench.nodes.renew(bench.now),
        "broken": bench.broken,
        "failed": bench.failed,
        "unreachable": lambda: bench.nodes.unreachable(1, TimeoutError("no answer"), bench.now),
        "notice": lambda: bench.nodes.on_notice(1, 120.0, bench.now),
        "attached": bench.attached,
        "restarted": lambda: bench.attached(restarted=True),
        "give up": lambda: bench.nodes.ended(1, "its machine is gone", bench.now),
        "replace": bench.replace,
        "join": lambda: bench.nodes.join(1, bench.now),
    }
    return apply_it[event]()


def effects(bench: Bench, actions: list[NodeAction]) -> set[str]:
    """What the engine is to do about node 1, in the words of the table."""
    found: set[str] = set()
    for action in actions:
        match action:
            case Emit(events.NodePhase(phase="ready")):
                found.add("tell ready")
            case Emit(events.NodeUp()):
                found.add("tell up")
            case Emit(events.NodeDown()):
                found.add("tell down")
            case Emit(events.NodeLeaving()):
                found.add("tell leaving")
            case Emit(events.Notice(text=text)) if "is lost" in text:
                found.add("tell lost")
            case Reconnect(1):
                assert Inquire() in actions
                found.add("reconnect")
            case Renounce(1):
                assert ForgetBlobs(1) in actions
                found.add("renounce")
            case Lose(1, _):
                found.add("lose calls")
            case Post(1, [ClientToAgent.Setup(settings, [_])]):
                assert settings["generation"] == bench.generation
                told = [action.messages[0] for action in actions if isinstance(action, Post) and action.node == 0]
                assert [type(message) for message in told] == [Info]
                found.add("set up")
            case _:
                pass
    return found


@pytest.mark.parametrize(("state", "event"), NODES, ids=str)
def test_a_node_does_what_its_table_says(state: str, event: str) -> None:
    bench = reach(state)
    expected, actions = NODES[state, event]

    did = apply(bench, event)

    assert bench.node.state == (bench.node.before if expected == "as before" else expected)
    told = set(actions) - {"forget runners"}
    if "tell lost" in actions:  # a node that is lost is renounced, and its end is told unless it was silent before
        told |= {"renounce"} | ({"tell down"} if state != "silent" else set())
    if state not in ("silent", "lost", "replaced"):
        told -= {"tell up"}  # it was never said that it was down
    assert effects(bench, did) == told
    if expected == "as before":
        assert bench.node.state == "ready"
    if "forget runners" in actions:
        bench.attached()
        assert bench.node.state == "opening"


@pytest.mark.parametrize("state", STATES)
def test_an_event_without_a_row_changes_nothing(state: str) -> None:
    bench = reach(state)
    for event in EVENTS:
        if (state, event) not in NODES:
            assert not bench.nodes._step(bench.node, event), event  # the one place that all events go through
            assert bench.node.state == state
            assert bench.nodes._taken() == []


# behaviour


def test_calls_go_to_nodes_that_are_ready_and_connected() -> None:
    bench = Bench()
    assert bench.nodes.takes_calls() == set()
    bench.ready(0)
    bench.ready(1)
    assert bench.nodes.takes_calls() == {0, 1}
    bench.broken()
    assert bench.nodes.takes_calls() == {0}
    bench.attached()
    assert bench.nodes.takes_calls() == {0, 1}


def test_nodes_of_a_group_take_calls_only_together() -> None:
    bench = Bench(gang=True)
    bench.ready(0)
    assert bench.nodes.takes_calls() == set()
    bench.ready(1)
    assert bench.nodes.takes_calls() == {0, 1}
    bench.nodes.on_replaced(0, None, bench.generation, bench.now)
    assert bench.nodes.tainted
    assert bench.nodes.takes_calls() == set()
    bench.renew()
    bench.ready(0)
    bench.ready(1)
    assert bench.nodes.takes_calls() == {0, 1}


def test_what_is_said_of_runners_of_an_earlier_generation_counts_for_nothing() -> None:
    bench = Bench()
    bench.renew()
    assert bench.nodes.on_ready(1, 1, bench.now) == []
    assert bench.node.state == "opening"
    assert bench.nodes.on_replaced(0, None, 1, bench.now) == []


def test_runners_that_become_ready_while_the_connection_breaks_are_ready_when_it_is_back() -> None:
    bench = Bench()
    bench.broken()
    bench.ready()
    assert bench.node.state == "silent"
    bench.attached()
    assert bench.node.state == "ready"


def test_a_node_that_is_silent_while_others_speak_is_given_up_after_a_while() -> None:
    bench = reach("silent")
    pause, actions = bench.nodes.retry(1, TimeoutError("no answer"), bench.now + 10)
    assert pause is not None
    assert actions == []
    bench.links.heard_at[0] = bench.now + 16
    pause, actions = bench.nodes.retry(1, TimeoutError("no answer"), bench.now + 16)
    assert "lose calls" in effects(bench, actions)
    assert bench.node.gone == "nothing was heard from it for 16 s"


def test_a_node_whose_peers_are_silent_as_well_is_waited_for_until_the_lease_ends() -> None:
    bench = reach("silent")
    assert bench.nodes.retry(1, TimeoutError("no answer"), bench.now + 59)[1] == []
    assert bench.nodes.retry(1, TimeoutError("no answer"), bench.now + 61)[1] != []
    assert bench.node.state == "lost"


def test_a_lost_node_of_this_computer_is_not_tried_again() -> None:
    bench = Bench(local=True)
    bench.broken()
    pause, actions = bench.nodes.retry(1, ConnectionRefusedError("refused"), bench.now + 16)
    assert pause is None
    assert Lose(1, "refused") in actions


def test_a_leaving_node_is_replaced_only_when_it_has_nothing_to_do() -> None:
    bench = reach("leaving", replaces=True)
    assert bench.replacements.begun == {1}
    assert bench.nodes.vacate(1, lambda numbers: True, bench.now) == (False, [])
    assert bench.node.state == "leaving"
    bench.replace()
    assert bench.node.state == "replaced"
    assert not bench.nodes.is_leaving(1)


def test_a_lost_node_is_replaced_whatever_it_had() -> None:
    bench = reach("lost")
    bench.replace(busy=True)
    assert bench.node.state == "replaced"


def test_a_pool_is_not_given_up_while_another_machine_is_on_its_way() -> None:
    bench = Bench(gang=True, replaces=True)
    bench.failed()
    assert bench.nodes.no_node_left() is None
    bench.replacements.begun.clear()
    assert bench.nodes.no_node_left() is bench.node


def test_a_node_that_cannot_be_reached_when_the_pool_opens_says_why() -> None:
    bench = Bench()
    bench.nodes.unreachable(1, TimeoutError("no answer"), bench.now)
    assert isinstance(bench.node.error, BootstrapError)
    assert "no answer" in str(bench.node.error)


@pytest.mark.parametrize("local", [True, False])
def test_a_node_that_has_ended_for_good_is_not_waited_for(local: bool) -> None:
    bench = Bench(local=local)
    bench.ready()
    bench.broken()
    _, actions = bench.nodes.retry(1, NodeEnded("the pool's ttl of 4 s is over"), bench.now + 0.1)
    assert Lose(1, "the pool's ttl of 4 s is over") in actions
    emitted = [action.event for action in actions if isinstance(action, Emit)]
    told = [event.text for event in emitted if isinstance(event, events.Notice)]
    assert "node 1 is lost: the pool's ttl of 4 s is over" in told[0]
    assert isinstance(bench.node.error, BootstrapError), "if the pool is being opened, that ends at once, too"


def test_calls_that_wait_are_kept_for_a_while_when_all_hosts_boot_at_once() -> None:
    bench = Bench(reboots=True)
    refused = ConnectionRefusedError("nothing listens there any more")
    for number in (0, 1):
        bench.ready(number)
    bench.links.linked.clear()
    for number in (0, 1):
        bench.nodes.broken(number, bench.now)
        for _ in range(3):
            _, actions = bench.nodes.retry(number, refused, bench.now + 3)
    assert [node.state for node in bench.nodes.all] == ["lost", "lost"], "what ran there is lost in seconds"
    assert any("waiting calls are kept for 120 s" in str(action) for action in actions)
    assert bench.nodes.no_node_left() is None
    bench.nodes.tell_alone(bench.now + 122)
    assert bench.nodes.no_node_left() is None
    bench.nodes.tell_alone(bench.now + 124)
    assert bench.nodes.no_node_left() is not None
    bench.nodes.attached(1, restarted=True, now=bench.now + 130)
    assert bench.nodes.no_node_left() is None


def test_nobody_waits_for_a_host_that_is_lost_while_others_are_there() -> None:
    bench = Bench(reboots=True)
    for number in (0, 1):
        bench.ready(number)
    bench.broken()
    for _ in range(3):
        bench.nodes.retry(1, ConnectionRefusedError("refused"), bench.now + 3)
    assert bench.nodes.given_up(1)


def test_the_user_hears_once_in_a_while_that_no_node_can_be_reached() -> None:
    bench = reach("silent")
    bench.links.linked.clear()
    bench.nodes.broken(0, bench.now)
    assert bench.nodes.tell_alone(bench.now + 29) == []
    assert len(bench.nodes.tell_alone(bench.now + 31)) == 1
    assert bench.nodes.tell_alone(bench.now + 32) == []
    assert len(bench.nodes.tell_alone(bench.now + 91)) == 1


def test_ports_that_were_asked_for_before_the_last_time_make_no_runners() -> None:
    """Found by the simulation, seed 53600: all runners were made twice in one generation."""
    bench = Bench()
    bench.nodes.renew(bench.now)
    bench.nodes.renew(bench.now)
    last = bench.generation + 2
    assert bench.nodes.on_ports(PORTS, last - 1, bench.now) == []
    posted = [action for action in bench.nodes.on_ports(PORTS, last, bench.now) if isinstance(action, Post)]
    assert [type(action.messages[0]) for action in posted] == [ClientToAgent.Setup] * 2


@pytest.mark.parametrize("gang", [False, True])
def test_a_machine_that_is_not_what_was_asked_for_gets_no_runner_and_no_successor(gang: bool) -> None:
    """A replacement that has another GPU: no body begins there, and no more machines are bought."""
    wrong: list[int] = []
    error = AcceleratorMismatch("accelerator", "h1 has 1 x NVIDIA H200; 1 x A100 was asked for", 1)
    bench = Bench(gang=gang, replaces=True, refusal=lambda node, about: error if node in wrong else None)
    bench.ready(0)
    bench.ready(1)
    bench.nodes.check()
    bench.replace()
    wrong.append(1)
    actions = bench.attached(restarted=True)
    if gang:
        bench.generation += 1
        actions += bench.nodes.on_ports(PORTS, bench.generation, bench.now)
    setups = [a for a in actions if isinstance(a, Post) and isinstance(a.messages[0], ClientToAgent.Setup)]
    assert not setups
    told = [type(action.event) for action in actions if isinstance(action, Emit)]
    assert told == [events.NodeUp, events.NodeDown, events.Notice]  # once, and in this order
    assert (bench.node.state, bench.node.gone) == ("lost", str(error))
    assert bench.replacements.begun == set()
    with pytest.raises(AcceleratorMismatch):
        bench.nodes.check()


def test_a_pool_is_not_opened_with_a_node_that_is_not_what_was_asked_for() -> None:
    error = AcceleratorMismatch("accelerator", "this computer has no GPU; 1 x A100 was asked for", 0)
    bench = Bench(refusal=lambda node, about: error if about else None)
    bench.nodes.check()
    bench.links.greetings = lambda: [{}, {"gpus": []}]  # type: ignore[method-assign]
    with pytest.raises(AcceleratorMismatch, match="has no GPU"):
        bench.nodes.check()
