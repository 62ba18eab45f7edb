"""Mistakes that one could make in the logic, each as a patch: the simulation must find every one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from skyward.client import calls, stalls
from skyward.client.calls import ClientCalls
from skyward.client.connections import Connection
from skyward.client.core import ConnectionEvents, Core
from skyward.client.dispatch import Dispatch
from skyward.client.engine import Engine
from skyward.client.kept import Kept
from skyward.client.nodes import Nodes
from skyward.client.stalls import StallWatch, Surveys
from skyward.client.uploads import Uploads
from skyward.node import agent_calls, agent_slots, runner
from skyward.node.agent import Agent
from skyward.node.agent_calls import AgentCalls
from skyward.node.agent_slots import NodeCall, RunnerSlots
from skyward.node.blob_cache import BlobCache
from skyward.node.client_link import ClientLink
from skyward.node.runner import RunnerCalls
from skyward.transport.link import Link
from skyward.transport.streams import Consumer

__all__ = ["MUTATIONS", "PLACES", "Mutation"]

PLACES = {
    "a rank of a broadcast goes to any process": 2,
    "a process takes another place than the one that is gone": 2,
}
"""How many ranks a node needs for a mistake to be one; 1 if it is not listed."""

Mutation = Callable[[Any], None]
"""Applies a mistake with pytest's monkeypatch."""


def _without(table: dict[Any, Any], row: tuple[str, str]) -> Mutation:
    return lambda patch: patch.delitem(table, row)


def _changed(table: dict[Any, Any], row: tuple[str, str], value: Any) -> Mutation:
    return lambda patch: patch.setitem(table, row, value)


def _method(owner: Any, name: str, made: Callable[[Any], Any]) -> Mutation:
    return lambda patch: patch.setattr(owner, name, made(getattr(owner, name)))


def _no_pump_after_a_return(real: Any) -> Any:
    def returned(self: AgentCalls, name: str, call_ids: Any, now: float) -> Any:
        self._now = now
        self._return(name, call_ids)
        return self._taken()

    return returned


def _claim_that_does_not_look(real: Any) -> Any:
    def claim(self: RunnerCalls[Any], call: Any) -> bool:
        real(self, call)
        return True

    return claim


def _attach_without_resending(real: Any) -> Any:
    def attach(self: Link, sock: Any, received: int) -> None:
        kept, self._kept = self._kept, type(self._kept)()
        real(self, sock, received)
        self._kept = kept

    return attach


def _accept_twice(real: Any) -> Any:
    def accept(self: Link, header: Any, buffers: Any, arrived: Any) -> None:
        if header.get("s") is not None:
            self._received = min(self._received, header["s"] - 1)
        real(self, header, buffers, arrived)

    return accept


def _saw_nothing(real: Any) -> Any:
    return lambda self, name, page, now: real(self, name, [], now)


def _last_first(real: Any) -> Any:
    return lambda queue, *rest: real(dict(reversed(queue.items())), *rest)


def _never_restarted(real: Any) -> Any:
    def welcome(self: Connection, sock: Any, answer: Any) -> bool:
        self.incarnation = answer["incarnation"]
        return real(self, sock, answer)

    return welcome


def _fence_nothing(real: Any) -> Any:
    def attach(self: ClientLink, sock: Any, hello: Any) -> None:
        fence, self._fence = self._fence, lambda: None
        real(self, sock, hello)
        self._fence = fence

    return attach


def _nothing(real: Any) -> Any:
    return lambda self, *_, **__: None


def _empty(real: Any) -> Any:
    return lambda self, *_, **__: []


def _takes_calls_always(real: Any) -> Any:
    return lambda self: {n.number for n in self.all if self._links.connected(n.number)}


def _any_place(real: Any) -> Any:
    return property(lambda self: None)


def _first_place(real: Any) -> Any:
    return lambda self: 0 if len(self._serving()) < self.processes else None


def _always_again(real: Any) -> Any:
    return lambda self, *about, again: real(self, *about, again=True)


_CLIENT, _AGENT, _SLOTS, _RUNNER = calls.CALLS, agent_slots.CALLS, agent_slots.SLOTS, runner.CALLS


def _admit_at_once(real: Any) -> Any:
    def admit(self: Core, number: int, now: float) -> Any:
        return True, self._routed(self.nodes.join(number, now), now)

    return admit


def _settle_once(real: Any) -> Any:
    def settle_ranks(self: Core) -> None:
        if not self.nodes.joining():
            real(self)

    return settle_ranks


def _settle_keeping(books: str) -> Callable[[Any], Any]:
    """A call that leaves its node stays in one of the node's books."""

    def made(real: Any) -> Any:
        def settle(self: Any, call: Any, seconds: float | None = None) -> None:
            kept = getattr(self._nodes[call.node], books) if call.node is not None else set()
            noted = call.id in kept
            real(self, call, seconds)
            if noted:
                kept.add(call.id)

        return settle

    return made


def _renew_at_once(real: Any) -> Any:
    def turn(self: Core, now: float) -> Any:
        return (self.renew(now) if self.nodes.tainted else []) + real(self, now)

    return turn


def _granting(change: Callable[[int], int]) -> Callable[[Any], Any]:
    def made(real: Any) -> Any:
        def init(self: Consumer, grant: Any, *rest: Any, **named: Any) -> None:
            real(self, lambda count: change(count) and grant(change(count)), *rest, **named)

        return init

    return made


def _no_timer(event: str) -> Callable[[Any], Any]:
    return lambda real: lambda self, seconds, what, call: None if what == event else real(self, seconds, what, call)


def _blame_neighbours(real: Any) -> Any:
    return lambda self, slot, reason: None if reason.startswith("another call") else real(self, slot, reason)


def _saw_no_doom(real: Any) -> Any:
    def saw(self: AgentCalls, name: str, page: Any, now: float) -> Any:
        if name in self.slots:
            self.slots[name].doom = ""
        return real(self, name, page, now)

    return saw


def _take_over_always(real: Any) -> Any:
    def init(self: BlobCache, directory: str, context: Any) -> None:
        real(self, directory, context)
        self._take_over()

    return init


def _no_retry_after_a_late_greeting(real: Any) -> Any:
    return lambda self, number, error, now: [] if "greeting" in str(error) else real(self, number, error, now)


MUTATIONS: dict[str, Mutation] = {
    # on the agent
    "nothing is sent after a runner has given a call back": _method(AgentCalls, "returned", _no_pump_after_a_return),
    "a call of a process that ended is forgotten": _changed(_AGENT, ("sent", "exited"), ("gone", ())),
    "a call that had begun is started again after a crash": _changed(
        _AGENT, ("running", "exited"), ("queued", ("queue",))
    ),
    "the status page is not read": _method(AgentCalls, "saw", _saw_nothing),
    "a cancelled call that waits in a runner is left there": _without(_AGENT, ("sent", "cancel")),
    "a call that a runner gave back after its cancel is kept": _without(_AGENT, ("withdrawn", "returned")),
    "a cancel while the client's recall is under way is ignored": _without(_AGENT, ("returning", "cancel")),
    "a body that ignores its stop is not killed": _changed(_AGENT, ("stopping", "grace"), ("stopping", ())),
    "a time limit is not watched": _without(_AGENT, ("running", "limit")),
    "that a function is called is not noticed": _without(_AGENT, ("running", "entered")),
    "a recalled call is not told": _changed(_AGENT, ("queued", "recall"), ("gone", ())),
    "a call that its runner returns to the client is kept": _changed(_AGENT, ("returning", "returned"), ("gone", ())),
    "a shifted call is not queued": _changed(_AGENT, ("shifting", "returned"), ("gone", ())),
    "a neighbour of a killed call is forgotten": _changed(_AGENT, ("doomed", "exited"), ("gone", ())),
    "a process that ended is not replaced": _changed(_SLOTS, ("ready", "exited"), ("gone", ("tell replaced",))),
    "a process that leaves is given calls": _changed(_SLOTS, ("ready", "leaving"), ("ready", ())),
    "broadcasts overtake each other": _method(agent_calls, "next_pair", _last_first),
    "large buffers of ended calls are kept": _method(AgentCalls, "_leave", lambda real: _leave_keeping(real)),
    "a session that was given up goes on": _method(ClientLink, "attach", _fence_nothing),
    "whoever shares a process with a killed call has crashed": _method(AgentCalls, "_doom", _blame_neighbours),
    "a call that begins while its process is being killed has crashed": _method(AgentCalls, "saw", _saw_no_doom),
    "an agent that starts again removes the results of all nodes": _method(BlobCache, "__init__", _take_over_always),
    "a rank of a broadcast goes to any process": _method(NodeCall, "place", _any_place),
    "a process takes another place than the one that is gone": _method(RunnerSlots, "_vacancy", _first_place),
    # in the runner
    "a claim is not atomic": _method(RunnerCalls, "claim", _claim_that_does_not_look),
    "a process begins bodies after it has broken one off": _without(_RUNNER, ("waiting", "leave")),
    "a call that waits is not given back when cancelled": _without(_RUNNER, ("waiting", "cancel")),
    # on the link
    "nothing is acknowledged": _method(Link, "_forget", _nothing),
    "what was not acknowledged is not sent again": _method(Link, "attach", _attach_without_resending),
    "what comes twice is taken twice": lambda patch: (
        patch.setattr(Link, "_accept", _accept_twice(Link._accept)),
        patch.setattr(Link, "received", property(lambda self: 0)),
    )[0],
    "a restarted agent is taken for the old one": _method(Connection, "welcome", _never_restarted),
    # on the client
    "a recalled call is not queued again": _changed(_CLIENT, ("sent", "recalled"), ("waiting", ())),
    "a call that came back while being recalled is not queued": _changed(
        _CLIENT, ("recalling", "recalled"), ("waiting", ())
    ),
    "attempts are not counted": _method(ClientCalls, "_count_attempt", _nothing),
    "the calls of a lost node are forgotten": _method(ClientCalls, "lose_node", _empty),
    "a cancel is not sent to the node": _changed(_CLIENT, ("sent", "cancel"), ("stopping", ())),
    "a cancelled call that came back is kept": _without(_CLIENT, ("stopping", "recalled")),
    "a failure that was held back is never told": _without(_CLIENT, ("held", "release")),
    "calls that wait for no node are not told": _method(ClientCalls, "fail_waiting", _empty),
    "a node joins while a broadcast runs": _method(Core, "admit", _admit_at_once),
    "a node that has joined is no rank": _method(Core, "settle_ranks", _settle_once),
    "a broken group gets calls": _method(Nodes, "takes_calls", _takes_calls_always),
    "a node that came back is not set up": _method(Nodes, "_set_up", _nothing),
    "runners of a broken group are not made again": _method(Nodes, "taint", _nothing),
    "a broadcast that is stuck is not stopped": _method(StallWatch, "_judge", _empty),
    "whoever is idle counts as stuck": _method(stalls, "judge", lambda real: lambda ranks: "stuck"),
    "an answer about stacks is not heard": _method(Surveys, "answered", _nothing),
    "a buffer that a node lacks is not sent": _method(Uploads, "need", _nothing),
    "what is to be done is done last first": _method(Engine, "_do", lambda real: lambda self, do: real(self, do[::-1])),
    "a call that has left its node counts as being stopped there": _method(
        Dispatch, "remove", _settle_keeping("stopping")
    ),
    "a call that was recalled once is never recalled again": _method(Dispatch, "remove", _settle_keeping("recalled")),
    "nothing is recalled from a busy node": _method(Dispatch, "recallable", _empty),
    "a group is made again before its stopped ranks have ended": _method(Core, "turn", _renew_at_once),
    "a node that was given up while it greeted is not tried again": _method(
        ConnectionEvents, "_retry", _no_retry_after_a_late_greeting
    ),
    # when the pool is closed
    "a call that waits is forgotten when the pool closes": _without(_CLIENT, ("waiting", "abandon")),
    "a call that runs is forgotten when the pool closes": _without(_CLIENT, ("sent", "abandon")),
    "an agent stays when the pool has closed": _method(Agent, "_leave", _nothing),
    # streams
    "no more items are asked for": _method(Consumer, "__init__", _granting(lambda count: 0)),
    "more items are asked for than there is room for": _method(
        Consumer, "__init__", _granting(lambda count: count + 1)
    ),
    "the body of a closed stream is not stopped": _method(ClientCalls, "_after", _no_timer("stop")),
    # results that stay on nodes
    "a result that was kept on a lost node is thought to be there": _method(Kept, "lose_node", _nothing),
    "calls are not told that what they wait for was made": _method(Kept, "_unblock", _nothing),
    "a result that a node cannot get from others is not sent to it": _method(Kept, "need", _nothing),
    "a lost node is waited for that was asked for a result": _method(Kept, "_ask_again", _nothing),
    "who takes a result that was not made waits for ever": _without(_CLIENT, ("waiting", "argument lost")),
    "a result that nobody wants any more is kept": _method(Kept, "release", _nothing),
    "nodes are not told of results that nobody wants": _method(Engine, "_do_free", _nothing),
    "calls that lack a result stay where it does not come": _method(ClientCalls, "_call_back", _nothing),
    "a result is made again without end": _method(Kept, "made", _always_again),
}


def _leave_keeping(real: Any) -> Any:
    def leave(self: AgentCalls, call: Any, state: str) -> None:
        digests, call.digests = call.digests, []
        real(self, call, state)
        call.digests = digests

    return leave
