"""The nodes of a pool: which are ready, silent, lost or about to be taken away. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, assert_never

from skyward import events
from skyward.client.actions import Emit, ForgetBlobs, Inquire, Lose, NodeAction, Post, Reconnect, Renounce
from skyward.client.connections import SILENCE, ClientOffline, Connections, NodeEnded, given_up, next_try
from skyward.client.output import output_window
from skyward.client.settings import Machines, PoolSettings
from skyward.errors import AcceleratorMismatch, BootstrapError, PluginError, SkywardError
from skyward.node.protocol import ClientToAgent, Info
from skyward.node.settings import Greeting, SetupSettings
from skyward.transport import exceptions
from skyward.transport.codec import Described, Message
from skyward.transport.frames import Malformed

__all__ = ["NODES", "Node", "Nodes"]


_LAST_MOMENT = 5.0


_REFUSALS = 3
_PORTS = 3
_BOOTING = 120.0
_ANSWER = 6.0  # a provider knows better than we why a machine is gone, and is asked first


class Nodes:
    """Each method is an event at time `now` and returns actions. `links` is only queried."""

    def __init__(self, plan: PoolSettings, links: Connections, machines: Machines) -> None:
        self._plan, self._links, self._machines = plan, links, machines
        there = plan.nodes if plan.present is None else plan.present
        self.all = [Node(i, "opening" if i < there else "absent") for i in range(plan.nodes)]
        self.gang = plan.gang
        self.tainted = False
        """Whether all runners are to be restarted, since one of a group is gone."""
        self.closing = False
        self._now = 0.0
        self._unformed = False
        self._offline = ClientOffline()
        self._generation = 0
        self._ports: list[int] = []
        self._out: list[NodeAction] = []

    # what nodes say

    def on_ready(self, number: int, generation: int, now: float) -> list[NodeAction]:
        self._now = now
        if generation == self._generation:
            node = self.all[number]
            if node.state == "silent" and node.before == "opening":
                node.before = "ready"
            self._step(node, "ready")
        return self._taken()

    def on_failed(
        self, number: int, described: Described, generation: int, buffers: Sequence[Any], now: float
    ) -> list[NodeAction]:
        self._now = now
        if generation != self._generation:
            return []
        others = (n for n in self.all if n.number != number)
        if self.gang and any(n.gone or n.state == "silent" or n.leaving for n in others):
            self._unformed = True  # it could form no group without them; all is made again when they are back
            return []
        error: Exception = BootstrapError("runner", described["message"], number)
        reason = str(error)
        if described["type"].rpartition(".")[2] == PluginError.__name__:  # rebuilt by whoever opens the pool
            error, reason = exceptions.packed(described, buffers[0]), described["message"]
        self.all[number].error = error
        return self._lost(number, "failed", reason)

    def on_replaced(self, number: int, rank: int | None, generation: int, now: float) -> list[NodeAction]:
        self._now = now
        if generation == self._generation and self.gang and not self.closing:
            self.taint(f"the process of node {number}" if rank is None else f"rank {rank} (node {number})")
        return self._taken()

    def on_broken_group(self, now: float) -> list[NodeAction]:
        self._now = now
        self.taint()
        return self._taken()

    def on_ports(self, ports: list[int], generation: int, now: float) -> list[NodeAction]:
        """Ports of earlier requests are ignored."""
        self._now = now
        if generation != self._generation:
            return []
        if len(ports) != _PORTS:
            raise Malformed(f"{len(ports)} ports instead of {_PORTS}")
        self._ports = ports
        if not [node for node in self.present if self._refused(node)] or not self.gang:
            for node in self.present:
                if not node.gone:
                    self._equip(node.number)
        return self._taken()

    def on_notice(self, number: int, seconds: float, now: float) -> list[NodeAction]:
        self._now = now
        self.all[number].leaving = now + seconds
        self._step(self.all[number], "notice")
        return self._taken()

    # runners, made and made again

    def taint(self, who: str = "a process") -> None:
        """No calls until all runners of the group were restarted."""
        if not self.tainted:
            self.tainted = True
            text = f"{who} died; all of them are restarted, because a process group cannot be repaired."
            self._emit(events.Notice(self._plan.pool, text))

    def renew(self, now: float) -> list[NodeAction]:
        self._now = now
        self._renew()
        return self._taken()

    def _renew(self) -> None:
        self._generation += 1
        self.tainted = self._unformed = False
        for node in self.all:
            self._step(node, "renew")
        if not any(n.gone for n in self.all):  # no group without them; when the last is back we come here again
            self._out.append(Post(0, [ClientToAgent.Ports(_PORTS, self._generation)]))

    def _refused(self, node: Node) -> bool:
        error = None if node.gone else self._machines.refusal(node.number, self._links.greetings()[node.number])
        if error is not None:
            node.error = error
            lost = self._lost(node.number, "failed", str(error))  # takes what `_out` holds
            self._out += lost
        return error is not None

    def _equip(self, number: int) -> None:
        made, hooks = self._machines.setup(number, self.greetings(), self._ports)
        window = output_window(self._plan.nodes)
        settings: SetupSettings = {**made, "generation": self._generation, "output": window}
        self._out.append(Post(number, [ClientToAgent.Setup(settings, hooks)]))

    def _inform(self, number: int) -> None:
        for other in self.present:
            if other.number != number and not other.gone:
                settings, _ = self._machines.setup(other.number, self.greetings(), self._ports)
                messages: list[Message] = [Info(settings["info"]), ClientToAgent.Head(settings.get("head"))]
                self._out.append(Post(other.number, messages))

    # connections that come and go

    def attached(self, number: int, *, restarted: bool, now: float) -> list[NodeAction]:
        """A restarted agent knows nothing of us."""
        self._now = now
        node = self.all[number]
        self._offline.ended(now)
        node.refusals = 0
        self._step(node, "restarted" if restarted else "attached")
        if self._unformed:
            self._renew()
        return self._taken()

    def broken(self, number: int, now: float) -> list[NodeAction]:
        self._now = now
        if self.closing:
            return []
        self._step(self.all[number], "broken")
        if not self._plan.local and not any(self._links.connected(n.number) for n in self.all):
            self._offline.began(now)
        return self._taken()

    def retry(self, number: int, error: Exception, now: float) -> tuple[float | None, list[NodeAction]]:
        self._now = now
        node, local = self.all[number], self._plan.local
        actions: list[NodeAction] = []
        if node.state == "silent":
            silent = now - self._links.heard(number)
            # once may be a tunnel that broke at that moment; the next attempt makes a new one
            node.refusals = node.refusals + 1 if isinstance(error, ConnectionRefusedError) else 0
            refused = node.refusals >= _REFUSALS and (not self._plan.replaces or now - node.away > _ANSWER)
            if 0 < node.leaving < now:
                actions = self._lost(number, "give up", "its machine was taken away")
            elif isinstance(error, NodeEnded):
                node.error = BootstrapError("starting runners", f"{error}.", number)  # if the pool is being opened
                actions = self._lost(number, "give up", str(error))
            elif given_up(
                None if local else self._plan.lease,
                now - node.away,
                silent,
                refused=refused,
                others_speak=self._others_speak(number),
                rejoined=now - self._offline.over,
            ):
                first = str(error).partition("\n")[0]
                reason = first if refused or local else f"nothing was heard from it for {silent:.0f} s"
                node.awaited = now + _BOOTING if refused and self._plan.reboots else 0.0
                actions = self._lost(number, "give up", reason)
        if node.gone and (local or self._machines.replacing(number)):
            return None, actions
        return next_try(now - node.away, gone=bool(node.gone)), actions

    def unreachable(self, number: int, error: Exception, now: float) -> list[NodeAction]:
        self._now = now
        if self.all[number].state == "joining":
            self.all[number].error = error
            self._step(self.all[number], "unreachable")
            return self._taken()
        reason = f"cannot connect to it: {error}"
        if self.all[number].error is None:
            known = isinstance(error, SkywardError)
            self.all[number].error = error if known else BootstrapError("connecting", f"{reason}.", number)
        return self._lost(number, "unreachable", reason)

    def tell_alone(self, now: float) -> list[Emit]:
        self._now = now
        if any(node.state == "silent" for node in self.all) and (text := self._offline.told(now, self._plan.lease)):
            return [Emit(events.Notice(self._plan.pool, text, "warning"))]
        return []

    def _others_speak(self, number: int) -> bool:
        return any(
            n.number != number
            and self._links.connected(n.number)
            and self._now - self._links.heard(n.number) < SILENCE / 2
            for n in self.all
        )

    def _lost(self, number: int, event: str, reason: str) -> list[NodeAction]:
        node = self.all[number]
        if (node.state, event) in NODES:
            node.gone = reason
            self._step(node, event)
        return self._taken()

    # nodes that were missing, and other machines for lost ones

    def join(self, number: int, now: float) -> list[NodeAction]:
        self._now = now
        self.all[number].error = None
        self._step(self.all[number], "join")
        return self._taken()

    def vacate(
        self, number: int, occupied: Callable[[Iterable[int]], bool], now: float
    ) -> tuple[bool, list[NodeAction]]:
        self._now = now
        node = self.all[number]
        # of a group, all are made again then
        held = range(len(self.all)) if self.gang else [number]
        if not node.gone and occupied(held):
            return False, []
        node.gone, node.leaving = node.gone or "another machine takes its place", 0.0
        self._step(node, "replace")
        return True, self._taken()

    def not_replaced(self, number: int, reason: str, now: float) -> list[NodeAction]:
        self._now = now
        if self.closing:
            return []
        self._warn(f"node {number} could not be replaced: {reason}. The pool continues without it.")
        node = self.all[number]
        node.gone = node.gone and f"{node.gone}, and it could not be replaced: {reason}"
        return self._taken()

    def ended(self, number: int, reason: str, now: float) -> list[NodeAction]:
        self._now = now
        if self.all[number].state == "silent" and not self.closing:
            return self._lost(number, "give up", reason)
        return []

    # the machinery

    def _step(self, node: Node, event: str) -> bool:
        row = NODES.get((node.state, event))
        if row is None:
            return False
        state, actions = row
        if state == "silent" and node.state != "silent":
            node.before, node.away = node.state, self._now
        node.state = node.before if state == "as before" else state
        for action in actions:
            match action:
                case "tell ready":
                    self._emit(events.NodePhase(self._plan.pool, node.number, "ready"))
                case "tell up":
                    self._tell_up(node)
                case "tell down":
                    self._emit(events.NodeDown(self._plan.pool, node.number, "its connection broke; trying again"))
                case "tell leaving":
                    self._tell_leaving(node)
                case "tell lost":
                    self._tell_lost(node)
                case "lose calls":
                    reason = node.gone if node.state == "lost" else "its agent was restarted"
                    self._out.append(Lose(node.number, reason))
                case "set up":
                    self._set_up(node)
                case "forget runners":
                    node.before = "opening" if node.before == "ready" else node.before
                case "reconnect":
                    self._out += [Inquire(), Reconnect(node.number)]
                case "renounce":
                    self._out += [ForgetBlobs(node.number), Renounce(node.number)]
                case _:
                    assert_never(action)
        return True

    def _tell_up(self, node: Node) -> None:
        if node.away or node.gone:
            self._emit(events.NodeUp(self._plan.pool, node.number))
        node.away = 0.0

    def _tell_leaving(self, node: Node) -> None:
        seconds = node.leaving - self._now
        self._emit(events.NodeLeaving(self._plan.pool, node.number, seconds))
        if not self.closing:
            follows = "; a replacement is requested" if self._machines.replace(node.number) else ""
            self._warn(f"node {node.number} gets no new calls: its machine goes away in {seconds:.0f} s{follows}.")

    def _tell_lost(self, node: Node) -> None:
        if not node.away:  # else it was said when the connection broke
            self._emit(events.NodeDown(self._plan.pool, node.number, node.gone))
        self._out.append(ForgetBlobs(node.number))
        if self._plan.local:
            if not any(other.gone == node.gone for other in self.all if other is not node):
                self._warn(f"node {node.number} is lost: {node.gone}.")
        else:
            self._out.append(Renounce(node.number))
            text = f"node {node.number} is lost: {node.gone}. Its calls go to other nodes, within their retries."
            # the next one would not be what was asked for either
            mistaken = isinstance(node.error, AcceleratorMismatch)
            replaced = not mistaken and self._machines.replace(node.number)
            text += " A replacement is requested." if replaced else ""
            if self.may_return():
                text += f" No node is left; waiting calls are kept for {_BOOTING:.0f} s, in case one comes back."
            self._warn(text)

    def _set_up(self, node: Node) -> None:
        node.gone, node.error, node.leaving = "", None, 0.0
        if self.gang or (not self._ports and node.number == 0):
            self._renew()
        elif self._ports and not self._refused(node):
            self._equip(node.number)
            self._inform(node.number)

    def _warn(self, text: str) -> None:
        self._emit(events.Notice(self._plan.pool, text, "warning"))

    def _emit(self, event: events.Event) -> None:
        self._out.append(Emit(event))

    def _taken(self) -> list[NodeAction]:
        out, self._out = self._out, []
        return out

    @property
    def present(self) -> list[Node]:
        return [n for n in self.all if n.state not in ("absent", "joining")]

    def joining(self) -> bool:
        return any(n.state == "joining" for n in self.all)

    def greetings(self) -> list[Greeting]:
        known = zip(self.all, self._links.greetings(), strict=True)
        return [{} if node.state == "absent" else greeting for node, greeting in known]

    def takes_calls(self) -> set[int]:
        """Nodes of a group take calls only together."""
        if self.tainted or (self._plan.gang and self.joining()):
            return set()
        able = {n.number for n in self.all if n.state == "ready" and self._links.connected(n.number)}
        return able if not self.gang or len(able) == len(self.present) else set()

    def all_ready(self) -> bool:
        return all(n.state == "ready" for n in self.present)

    def in_doubt(self, number: int, now: float) -> bool:
        """Whether a node may be lost without our knowledge."""
        node = self.all[number]
        late = 0 < node.leaving < now + _LAST_MOMENT
        return not self.closing and not node.gone and (node.state == "silent" or late)

    def is_leaving(self, number: int) -> bool:
        return self.all[number].leaving > 0

    def given_up(self, number: int) -> bool:
        node = self.all[number]
        return bool(node.gone or node.leaving) and not self._machines.replacing(number) and not self.may_return()

    def may_return(self) -> bool:
        """Whether no node is left, but one may be back soon: calls are kept so long."""
        return all(n.gone for n in self.present) and any(self._now < n.awaited for n in self.present)

    def no_node_left(self) -> Node | None:
        """A lost node, if no node takes calls and none is coming."""
        lost = [n for n in self.all if n.gone and self.given_up(n.number)]
        return lost[0] if lost and (self.gang or len(lost) == len(self.present)) else None

    def check(self) -> None:
        for node, greeting in zip(self.all, self.greetings(), strict=True):
            if error := node.error or (self._machines.refusal(node.number, greeting) if greeting else None):
                raise error

    def silent(self) -> list[int]:
        return [n.number for n in self.all if n.state == "silent"]


# The states of a node, as a table: (state, event) -> (state, actions).
#
# An event that a state has no row for changes nothing. "as before" is the state that the connection's loss
# interrupted.


Effect = Literal[
    "tell ready",
    "tell up",
    "tell down",
    "tell leaving",
    "tell lost",
    "lose calls",
    "set up",
    "forget runners",
    "reconnect",
    "renounce",
]
Row = tuple[str, tuple[Effect, ...]]

_BROKEN: Row = ("silent", ("tell down", "reconnect"))
_LOST: Row = ("lost", ("tell lost", "lose calls"))
_RETURNED: Row = ("opening", ("tell up", "lose calls", "set up"))
_REPLACED: Row = ("replaced", ("renounce",))

NODES: dict[tuple[str, str], Row] = {
    # its runners are being made
    ("opening", "ready"): ("ready", ("tell ready",)),
    ("opening", "broken"): _BROKEN,
    ("opening", "failed"): _LOST,
    ("opening", "unreachable"): _LOST,
    ("opening", "notice"): ("leaving", ("tell leaving",)),
    ("opening", "restarted"): _RETURNED,
    ("opening", "replace"): _REPLACED,
    # it takes calls
    ("ready", "ready"): ("ready", ("tell ready",)),
    ("ready", "renew"): ("opening", ()),
    ("ready", "broken"): _BROKEN,
    ("ready", "failed"): _LOST,
    ("ready", "unreachable"): _LOST,
    ("ready", "notice"): ("leaving", ("tell leaving",)),
    ("ready", "restarted"): _RETURNED,
    ("ready", "replace"): _REPLACED,
    # its machine will be taken away: no new calls
    ("leaving", "notice"): ("leaving", ("tell leaving",)),
    ("leaving", "broken"): _BROKEN,
    ("leaving", "failed"): _LOST,
    ("leaving", "unreachable"): _LOST,
    ("leaving", "restarted"): _RETURNED,
    ("leaving", "replace"): _REPLACED,
    # there is no connection, and it is tried again
    ("silent", "attached"): ("as before", ("tell up",)),
    ("silent", "restarted"): _RETURNED,
    ("silent", "renew"): ("silent", ("forget runners",)),
    ("silent", "give up"): _LOST,
    ("silent", "unreachable"): _LOST,
    ("silent", "replace"): _REPLACED,
    # it was given up
    ("lost", "attached"): _RETURNED,
    ("lost", "restarted"): _RETURNED,
    ("lost", "replace"): _REPLACED,
    # it was missing when the pool opened
    ("absent", "join"): ("joining", ("renounce",)),
    # it has come, and is connected to; who is which rank changes when it answers
    ("joining", "attached"): _RETURNED,
    ("joining", "restarted"): _RETURNED,
    ("joining", "unreachable"): ("absent", ("renounce",)),
    # another machine takes its place
    ("replaced", "attached"): _RETURNED,
    ("replaced", "restarted"): _RETURNED,
    ("replaced", "unreachable"): _LOST,
    ("replaced", "replace"): _REPLACED,
}


@dataclass(eq=False)
class Node:
    number: int
    state: str = "opening"
    before: str = "opening"
    gone: str = ""
    away: float = 0.0
    leaving: float = 0.0
    awaited: float = 0.0
    """Until when it may be back after it was given up: its machine may be booting."""
    refusals: int = 0
    error: BaseException | None = None
