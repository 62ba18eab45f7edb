"""The nodes of a pool: which are ready, out of reach, lost or about to be taken away, and what is done about it.

All is called with the hub's lock held, except for what the threads of `replacing` call (`Place`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from skyward import events, failures
from skyward.engine.calls import Call
from skyward.engine.cargo import Cargo
from skyward.engine.dispatch import Dispatch
from skyward.engine.hub import SILENCE, Hub
from skyward.engine.patience import given_up, next_try
from skyward.engine.plan import Plan
from skyward.engine.replacing import Replacing
from skyward.errors import BootstrapError, NodeLost, PluginError, PoolClosed

__all__ = ["Calls", "Muster"]

_PATIENCE = 15.0
_REFUSALS = 3
_PORTS = 3
_LAST_MOMENT = 5.0
_JOIN = 30.0
_ANSWER = 6.0  # a provider knows better than we why a machine is gone, and is asked first


class Calls(Protocol):
    """What becomes of calls when nodes go."""

    def lost(self, call: Call, reason: str) -> None:
        """A call's node is gone."""
        ...

    def forsaken(self, number: int, reason: str) -> None:
        """There is no node for calls that wait, and none is coming."""
        ...


@dataclass(eq=False)
class _Node:
    number: int
    ready: bool = False
    gone: str = ""
    """Why it was given up."""
    away: float = 0.0
    """Since when there is no connection."""
    leaving: float = 0.0
    """When its machine will be taken away."""
    refusals: int = 0
    error: BaseException | None = None


class Muster:
    """Knows the state of every node, and has runners made, and made anew."""

    def __init__(self, plan: Plan, hub: Hub, dispatch: Dispatch[Call], cargo: Cargo, calls: Calls) -> None:
        self._plan, self._hub, self._dispatch, self._cargo, self._calls = plan, hub, dispatch, cargo, calls
        self._changed = hub.changed
        self._nodes = [_Node(i) for i in range(plan.nodes)]
        self._replacing = Replacing(plan.substitutes, self)
        self.gang = plan.gang
        """Whether runners are part of groups."""
        self.tainted = False
        """Whether all runners are to be made anew, since one of a group is gone."""
        self._unformed = False
        self._alone, self._alone_told = 0.0, 0  # since when no node has been connected, and how often that was said
        self._generation = 0
        self._ports: list[int] = []

    def await_ready(self, deadline: float) -> None:
        """Has runners made on every node, and waits until they are there."""
        self._check_nodes()
        self.renew()
        while not all(n.ready for n in self._nodes):
            if time.monotonic() > deadline:
                late = [n.number for n in self._nodes if not n.ready]
                raise BootstrapError("starting runners", f"nodes {late} were not ready in time.")
            self._changed.wait(0.5)
            self._check_nodes()

    def await_up(self, numbers: Sequence[int]) -> None:
        """Waits for nodes that are being restarted, replaced or out of reach; a node that is gone is an error."""
        deadline = time.monotonic() + max(_PATIENCE, self._plan.lease)
        while True:
            self.check_open()
            missing = [n for n in numbers if not self._dispatch.is_up(n)]
            if not missing:
                return
            for node in (self._nodes[n] for n in missing):
                if self._given_up(node) or time.monotonic() > deadline:
                    why = node.gone or ("its machine is being taken away" if node.leaving else "it is not ready")
                    raise NodeLost(node.number, reason=why, attempts=0)
            self._changed.wait(0.2)

    def check_open(self) -> None:
        """Refuses calls when there is no node, or no pool."""
        if self._hub.closing:
            raise PoolClosed("the pool is closed; open it again with `with sky.ComputePool(...) as pool:`.")
        if all(n.gone and self._given_up(n) for n in self._nodes):
            raise NodeLost(0, reason=f"no node of the pool is left: {self._nodes[0].gone}", attempts=0)

    def check_group(self) -> None:
        """Where runners form groups, none of them works while a node is gone."""
        gone = next((n for n in self._nodes if n.gone and self._given_up(n)), None)
        if self.gang and gone is not None:
            raise NodeLost(gone.number, reason=f"{gone.gone}; the others form no group without it", attempts=0)

    def in_doubt(self, number: int) -> bool:
        """Whether a node may be lost without our knowing it yet."""
        node = self._nodes[number]
        late = 0 < node.leaving < time.monotonic() + _LAST_MOMENT
        return not self._hub.closing and not node.gone and (node.away > 0 or late)

    def is_leaving(self, number: int) -> bool:
        """Whether a node's machine is about to be taken away."""
        return self._nodes[number].leaving > 0

    def close(self, seconds: float) -> None:
        """Asks for no more machines, and waits for those that have been asked for; without the lock."""
        self._replacing.close(seconds)

    # what nodes say

    def on_member(self, number: int, about: dict[str, Any]) -> None:
        """A node has joined the dask cluster."""
        self._emit(events.NodePhase(self._plan.pool, number, "joined"))

    def on_ready(self, number: int, about: dict[str, Any]) -> None:
        """A node's runners are there."""
        if about["generation"] != self._generation:
            return
        self._nodes[number].ready = True
        self._emit(events.NodePhase(self._plan.pool, number, "ready"))
        self._raise_nodes()

    def on_failed(self, number: int, about: dict[str, Any], buffers: list[Any]) -> None:
        """A node cannot make runners."""
        if about.get("generation", self._generation) != self._generation:
            return
        if self.gang and any(n.gone or n.away or n.leaving for n in self._nodes if n.number != number):
            self._unformed = True  # it could form no group without them; all is made anew when they are back
            return
        error = failures.rebuild(about, buffers[0])
        if not isinstance(error, PluginError):
            error = BootstrapError("runner", about["message"], number)
        self._nodes[number].error = error
        self._down(number, str(error))
        self._give_up(number, str(error))

    def on_replaced(self, number: int, about: dict[str, Any]) -> None:
        """A runner has died, and another one is being made."""
        if about["generation"] == self._generation and self.gang and not self._hub.closing:
            self.taint()

    def on_ports(self, number: int, ports: list[int]) -> None:
        """The head has free ports for groups."""
        self._ports = ports
        for node in self._nodes:
            if not node.gone:
                self._equip(node.number)

    def on_notice(self, number: int, about: dict[str, Any]) -> None:
        """A node's machine will be taken away."""
        self._nodes[number].leaving = time.monotonic() + about["seconds"]
        self._dispatch.up(number, False)
        self._emit(events.NodeLeaving(self._plan.pool, number, about["seconds"]))
        if not self._hub.closing:
            follows = "; another one takes its place" if self._replacing.begin(number) else ""
            self._warn(
                f"node {number} gets no new calls: its machine is taken away in {about['seconds']:.0f} s{follows}."
            )
        self._changed.notify_all()

    # runners, made and made anew

    def taint(self) -> None:
        """A runner that may belong to a group is gone: no calls until all of them have been made anew."""
        if not self.tainted:
            self.tainted = True
            text = "a node lost its runner; all are made anew, since a group cannot be mended."
            self._emit(events.Notice(self._plan.pool, text))
        self._lower_nodes()

    def renew(self) -> None:
        """Makes the runners of all nodes (again), over fresh ports of the head."""
        self._generation += 1
        self.tainted = self._unformed = False
        for node in self._nodes:
            node.ready = False
        self._lower_nodes()
        if not any(n.gone for n in self._nodes):  # no group without them; when the last is back we come here again
            self._hub.post(0, [["ports", _PORTS, 0]])

    def _equip(self, number: int) -> None:
        settings, hooks = self._plan.setup(number, self._hub.abouts(), self._ports)
        self._hub.post(number, [["setup", {**settings, "generation": self._generation}, len(hooks)]], hooks)

    def _inform(self, number: int) -> None:
        """Tells the other nodes where a node is now, and the scheduler with it."""
        for other in self._nodes:
            if other.number != number and not other.gone:
                settings, _ = self._plan.setup(other.number, self._hub.abouts(), self._ports)
                news = {name: settings[name] for name in ("info", "scheduler")}
                self._hub.post(other.number, [["info", news, 0]])

    def _raise_nodes(self) -> None:
        """Lets nodes that are ready and connected take calls; those of a group only together."""
        if self.tainted:
            return
        able = [n.number for n in self._nodes if n.ready and not n.leaving and self._hub.connected(n.number)]
        if not self.gang or len(able) == len(self._nodes):
            for number in able:
                self._dispatch.up(number, True)
        self._changed.notify_all()

    def _lower_nodes(self) -> None:
        for node in self._nodes:
            self._dispatch.up(node.number, False)

    # connections that come and go

    def attached(self, number: int, *, restarted: bool) -> None:
        """There is a connection to a node (again); after a restart its agent knows nothing of us."""
        node = self._nodes[number]
        if node.away or node.gone:
            self._emit(events.NodeUp(self._plan.pool, number))
        self._alone, self._alone_told, node.away, node.refusals = 0.0, 0, 0.0, 0
        if restarted or node.gone:
            node.ready, node.gone, node.error = False, "", None
            for call in self._dispatch.drain(number):
                self._calls.lost(call, "its agent was restarted")
            if self.gang:
                self.renew()
            elif self._ports:
                self._equip(number)
                self._inform(number)
        elif self._unformed:
            self.renew()
        self._raise_nodes()

    def broken(self, number: int) -> None:
        """The connection to a node is gone; it is tried again for a while."""
        if self._hub.closing:
            return
        node = self._nodes[number]
        node.away = time.monotonic()
        if self._plan.lease and not any(self._hub.connected(n.number) for n in self._nodes):
            self._alone = node.away
        self._down(number, "its connection broke; trying again")
        self._replacing.inquire()
        threading.Thread(target=self._hub.reconnect, args=(number,), daemon=True).start()

    def pause(self, number: int, error: Exception) -> float | None:
        """A node was tried again in vain: says when to try once more, and gives it up when it must be gone."""
        node, lease, now = self._nodes[number], self._plan.lease, time.monotonic()
        if not node.gone:
            silent = now - self._hub.peers[number].link.heard
            # once may be a tunnel that broke at that moment; the next attempt makes a new one
            node.refusals = node.refusals + 1 if isinstance(error, ConnectionRefusedError) else 0
            refused = node.refusals >= _REFUSALS and (not self._plan.substitutes or now - node.away > _ANSWER)
            if 0 < node.leaving < now:
                self._give_up(number, "its machine was taken away")
            elif given_up(lease, now - node.away, silent, refused=refused, others_speak=self._others_speak(number)):
                first = str(error).partition("\n")[0]
                self._give_up(number, first if refused or not lease else f"nothing was heard of it for {silent:.0f} s")
        if node.gone and (not lease or self._replacing.going(number)):
            return None
        return next_try(now - node.away, gone=bool(node.gone))

    def unreachable(self, number: int, error: Exception) -> None:
        """A node could not be reached for so long that it is given up."""
        reason = f"cannot connect to it: {error}"
        if self._nodes[number].error is None:
            self._nodes[number].error = NodeLost(number, reason=reason)
        self._down(number, reason)
        self._give_up(number, reason)

    def tell_alone(self) -> None:
        """Says that no node can be reached: after half a minute, then every minute."""
        away = time.monotonic() - self._alone
        doubtful = any(node.away and not node.gone for node in self._nodes)
        if self._alone and doubtful and away > 30 + 60 * self._alone_told:
            self._alone_told += 1
            self._warn(
                f"no connection to any node for {away:.0f} s. What runs there goes on; we try again until the lease "
                f"ends, {self._plan.lease - away:.0f} s from now."
            )

    def _others_speak(self, number: int) -> bool:
        now = time.monotonic()
        return any(
            p.number != number and p.link.sock is not None and now - p.link.heard < SILENCE / 2 for p in self._hub.peers
        )

    def _down(self, number: int, reason: str) -> None:
        self._dispatch.up(number, False)
        self._emit(events.NodeDown(self._plan.pool, number, reason))

    def _give_up(self, number: int, reason: str) -> None:
        self._nodes[number].gone = reason
        self._cargo.forget(number)
        if self._plan.lease:
            self._hub.renounce(number)
            text = f"node {number} is lost: {reason}. Its calls go to other nodes, within their retries."
            self._warn(text + (" Another machine takes its place." if self._replacing.begin(number) else ""))
        for call in self._dispatch.drain(number):
            self._calls.lost(call, reason)
        if self.gang:
            self._lower_nodes()  # none of them works without the others
        self._despair(number, reason)
        self._changed.notify_all()

    def _given_up(self, node: _Node) -> bool:
        """Whether a node is gone, or about to be, and nothing comes in its place."""
        return bool(node.gone or node.leaving) and not self._replacing.going(node.number)

    def _despair(self, number: int, reason: str) -> None:
        """Fails what waits for a node, if none can take it and none is on its way."""
        lost = [n for n in self._nodes if n.gone and self._given_up(n)]
        if len(lost) == len(self._nodes) or (self.gang and lost):
            self._calls.forsaken(number, reason)

    def _check_nodes(self) -> None:
        for node in self._nodes:
            if node.error is not None:
                raise node.error

    # other machines for lost nodes; called by the threads of `replacing`, without the lock

    def await_vacant(self, node: int) -> bool:
        """Waits until a node has nothing to do or is lost, and takes it out; False if the pool is closed."""
        state = self._nodes[node]
        with self._changed:
            while not self._hub.closing and not state.gone and self._occupied(node):
                self._changed.wait(0.2)
            if self._hub.closing:
                return False
            state.gone, state.leaving, state.ready = state.gone or "another machine takes its place", 0.0, False
            self._dispatch.up(node, False)
            self._cargo.forget(node)
            self._hub.renounce(node)
            return True

    def _occupied(self, number: int) -> bool:
        """Whether taking a node out would end a call; of a group, all are made anew then."""
        if not self.gang:
            return self._dispatch.busy(number)
        self._lower_nodes()
        return any(self._dispatch.busy(node.number) for node in self._nodes)

    def connect(self, node: int) -> None:
        """Connects to the machine that stands in for a node's old one."""
        self._hub.connect(node, time.monotonic() + _JOIN)
        if not self._hub.connected(node):
            raise BootstrapError("connecting", "the machine that was to take its place cannot be reached.", node)

    def not_replaced(self, node: int, reason: str) -> None:
        """No machine could be had: what waits for one fails."""
        with self._changed:
            if not self._hub.closing:
                self._warn(f"node {node} could not be replaced: {reason}. The pool goes on without it.")
                state = self._nodes[node]
                state.gone = state.gone and f"{state.gone}, and it could not be replaced: {reason}"
                self._despair(node, state.gone or f"it could not be replaced: {reason}")
                self._changed.notify_all()

    def missing(self) -> list[int]:
        """The nodes of which it is not known whether they are lost."""
        with self._changed:
            return [n.number for n in self._nodes if n.away and not n.gone]

    def ended(self, node: int, reason: str) -> None:
        """Gives a node up whose machine is known to be gone."""
        with self._changed:
            if self._nodes[node].away and not self._nodes[node].gone and not self._hub.closing:
                self._give_up(node, reason)

    def pause_for(self, seconds: float) -> bool:
        """Waits; False if the pool is closed meanwhile."""
        return self._hub.pause(seconds)

    def tell(self, node: int, text: str) -> None:
        """Says how far it is with a node."""
        self._emit(events.NodePhase(self._plan.pool, node, text))

    def _warn(self, text: str) -> None:
        self._emit(events.Notice(self._plan.pool, text, "warning"))

    def _emit(self, event: events.Event) -> None:
        self._hub.defer(self._plan.emit, event)
