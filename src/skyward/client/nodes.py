"""The nodes of a pool: which are ready, silent, lost or about to be taken away, and what is done about it.

No clock, socket or thread here: `Nodes` is told what happens, and returns what is to be done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from skyward import events
from skyward.client.connections import SILENCE, Connections
from skyward.client.node_answers import NodeAnswers
from skyward.client.node_table import NODES, Node
from skyward.client.output_lines import output_window
from skyward.client.reconnect import Alone, given_up, next_try
from skyward.client.settings import PoolSettings
from skyward.errors import AcceleratorMismatch, BootstrapError, NodeLost, PluginError
from skyward.machines.replacement import Requests
from skyward.node.protocol import ClientToAgent
from skyward.node.receiver import Malformed
from skyward.transport import exceptions

__all__ = ["NODES", "Action", "Node", "Nodes"]

Action = tuple[Any, ...]
"""What the engine is to do: ("post", node, messages, buffers), ("emit", event), ("reconnect", node),
("renounce", node), ("inquire",), ("forget blobs", node), ("lose", node, reason)."""

_REFUSALS = 3
_PORTS = 3
_ANSWER = 6.0  # a provider knows better than we why a machine is gone, and is asked first


class Nodes(NodeAnswers):
    """Every method says what happened, at the time `now` where it matters, and returns what is to be done.

    Of `links` it only asks which nodes are connected, when they were heard, and what they said of themselves.
    """

    def __init__(self, plan: PoolSettings, links: Connections, requests: Requests) -> None:
        super().__init__(plan, links, requests)
        self._unformed = False
        self._alone = Alone()
        self._generation = 0
        self._ports: list[int] = []
        self._out: list[Action] = []
        self._now = 0.0

    # what nodes say

    def on_ready(self, number: int, generation: int, now: float) -> list[Action]:
        """A node's runners are there."""
        self._now = now
        if generation == self._generation:
            node = self.all[number]
            if node.state == "silent" and node.before == "opening":
                node.before = "ready"
            self._step(node, "ready")
        return self._taken()

    def on_failed(
        self, number: int, described: dict[str, Any], generation: int, buffers: Sequence[Any], now: float
    ) -> list[Action]:
        """A node cannot make runners."""
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

    def on_replaced(self, number: int, rank: int | None, generation: int, now: float) -> list[Action]:
        """A runner has died, and another one is being made; `rank` where nodes have several."""
        self._now = now
        if generation == self._generation and self.gang and not self.closing:
            self.taint("a node" if rank is None else f"rank {rank} (node {number})")
        return self._taken()

    def on_broken_group(self, now: float) -> list[Action]:
        """A process that may belong to a group is gone, as a call's verdict says."""
        self._now = now
        self.taint()
        return self._taken()

    def on_ports(self, ports: list[int], generation: int, now: float) -> list[Action]:
        """The head has free ports for groups; those that were asked for before the last time do not count."""
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

    def on_notice(self, number: int, seconds: float, now: float) -> list[Action]:
        """A node's machine will be taken away."""
        self._now = now
        self.all[number].leaving = now + seconds
        self._step(self.all[number], "notice")
        return self._taken()

    # runners, made and made again

    def taint(self, who: str = "a node") -> None:
        """A runner that may belong to a group is gone: no calls until all of them have been made again."""
        if not self.tainted:
            self.tainted = True
            text = f"{who} lost its runner; all are made again, since a group cannot be mended."
            self._emit(events.Notice(self._plan.pool, text))

    def renew(self, now: float) -> list[Action]:
        """Makes the runners of all nodes (again), over fresh ports of the head."""
        self._now = now
        self._renew()
        return self._taken()

    def _renew(self) -> None:
        self._generation += 1
        self.tainted = self._unformed = False
        for node in self.all:
            self._step(node, "renew")
        if not any(n.gone for n in self.all):  # no group without them; when the last is back we come here again
            self._out.append(("post", 0, [ClientToAgent.ports(_PORTS, self._generation)], ()))

    def _refused(self, node: Node) -> bool:
        """Whether a node is not what was asked for; it is given up then."""
        error = None if node.gone else self._plan.refusal(node.number, self._links.abouts()[node.number])
        if error is not None:
            node.error = error
            self._out += self._lost(node.number, "failed", str(error))
        return error is not None

    def _equip(self, number: int) -> None:
        settings, hooks = self._plan.setup(number, self.abouts(), self._ports)
        message = ClientToAgent.setup(
            {**settings, "generation": self._generation, "output": output_window(self._plan.nodes)}, len(hooks)
        )
        self._out.append(("post", number, [message], hooks))

    def _inform(self, number: int) -> None:
        """Tells the other nodes where a node is now."""
        for other in self.present:
            if other.number != number and not other.gone:
                settings, _ = self._plan.setup(other.number, self.abouts(), self._ports)
                messages = [ClientToAgent.info(settings["info"]), ClientToAgent.head(settings.get("head"))]
                self._out.append(("post", other.number, messages, ()))

    # connections that come and go

    def attached(self, number: int, *, restarted: bool, now: float) -> list[Action]:
        """There is a connection to a node (again); after a restart its agent knows nothing of us."""
        self._now = now
        node = self.all[number]
        self._alone.ended(now)
        node.refusals = 0
        self._step(node, "restarted" if restarted else "attached")
        if self._unformed:
            self._renew()
        return self._taken()

    def broken(self, number: int, now: float) -> list[Action]:
        """The connection to a node is gone; it is tried again for a while."""
        self._now = now
        if self.closing:
            return []
        self._step(self.all[number], "broken")
        if not self._plan.local and not any(self._links.connected(n.number) for n in self.all):
            self._alone.began(now)
        return self._taken()

    def retry(self, number: int, error: Exception, now: float) -> tuple[float | None, list[Action]]:
        """A node could not be reached again: when to try once more; it is given up when it must be gone."""
        self._now = now
        node, local = self.all[number], self._plan.local
        actions: list[Action] = []
        if node.state == "silent":
            silent = now - self._links.heard(number)
            # once may be a tunnel that broke at that moment; the next attempt makes a new one
            node.refusals = node.refusals + 1 if isinstance(error, ConnectionRefusedError) else 0
            refused = node.refusals >= _REFUSALS and (not self._plan.substitutes or now - node.away > _ANSWER)
            if 0 < node.leaving < now:
                actions = self._lost(number, "give up", "its machine was taken away")
            elif given_up(
                None if local else self._plan.lease,
                now - node.away,
                silent,
                refused=refused,
                others_speak=self._others_speak(number),
                rejoined=now - self._alone.over,
            ):
                first = str(error).partition("\n")[0]
                reason = first if refused or local else f"nothing was heard of it for {silent:.0f} s"
                actions = self._lost(number, "give up", reason)
        if node.gone and (local or self._requests.going(number)):
            return None, actions
        return next_try(now - node.away, gone=bool(node.gone)), actions

    def unreachable(self, number: int, error: Exception, now: float) -> list[Action]:
        """A node could not be reached for so long that it is given up."""
        self._now = now
        if self.all[number].state == "joining":
            self.all[number].error = error
            self._step(self.all[number], "unreachable")
            return self._taken()
        reason = f"cannot connect to it: {error}"
        if self.all[number].error is None:
            self.all[number].error = NodeLost(number, reason=reason)
        return self._lost(number, "unreachable", reason)

    def tell_alone(self, now: float) -> list[Action]:
        """Says that no node can be reached: after half a minute, then every minute."""
        if any(node.state == "silent" for node in self.all) and (text := self._alone.told(now, self._plan.lease)):
            self._warn(text)
        return self._taken()

    def _others_speak(self, number: int) -> bool:
        return any(
            n.number != number
            and self._links.connected(n.number)
            and self._now - self._links.heard(n.number) < SILENCE / 2
            for n in self.all
        )

    def _lost(self, number: int, event: str, reason: str) -> list[Action]:
        node = self.all[number]
        if (node.state, event) in NODES:
            node.gone = reason
            self._step(node, event)
        return self._taken()

    # nodes that were missing, and other machines for lost ones

    def join(self, number: int, now: float) -> list[Action]:
        """A node that was missing has come, and is connected to."""
        self._now = now
        self.all[number].error = None
        self._step(self.all[number], "join")
        return self._taken()

    def vacate(self, number: int, occupied: Callable[[Iterable[int]], bool], now: float) -> tuple[bool, list[Action]]:
        """Takes a node out whose place another machine takes; False while that would end a call."""
        self._now = now
        node = self.all[number]
        # of a group, all are made again then
        held = range(len(self.all)) if self.gang else [number]
        if not node.gone and occupied(held):
            return False, []
        node.gone, node.leaving = node.gone or "another machine takes its place", 0.0
        self._step(node, "replace")
        return True, self._taken()

    def not_replaced(self, number: int, reason: str, now: float) -> list[Action]:
        """No machine was found: what waits for one fails."""
        self._now = now
        if self.closing:
            return []
        self._warn(f"node {number} could not be replaced: {reason}. The pool goes on without it.")
        node = self.all[number]
        node.gone = node.gone and f"{node.gone}, and it could not be replaced: {reason}"
        return self._taken()

    def ended(self, number: int, reason: str, now: float) -> list[Action]:
        """Gives a node up whose machine is known to be gone."""
        self._now = now
        if self.all[number].state == "silent" and not self.closing:
            return self._lost(number, "give up", reason)
        return []

    # the machinery

    def _step(self, node: Node, event: str) -> bool:
        """Moves a node along its table; False if the event changes nothing in its state."""
        row = NODES.get((node.state, event))
        if row is None:
            return False
        state, actions = row
        if state == "silent" and node.state != "silent":
            node.before, node.away = node.state, self._now
        node.state = node.before if state == "as before" else state
        for action in actions:
            getattr(self, "_" + action.replace(" ", "_"))(node)
        return True

    def _tell_ready(self, node: Node) -> None:
        self._emit(events.NodePhase(self._plan.pool, node.number, "ready"))

    def _tell_up(self, node: Node) -> None:
        if node.away or node.gone:
            self._emit(events.NodeUp(self._plan.pool, node.number))
        node.away = 0.0

    def _tell_down(self, node: Node) -> None:
        self._emit(events.NodeDown(self._plan.pool, node.number, "its connection broke; trying again"))

    def _tell_leaving(self, node: Node) -> None:
        seconds = node.leaving - self._now
        self._emit(events.NodeLeaving(self._plan.pool, node.number, seconds))
        if not self.closing:
            follows = "; another one takes its place" if self._requests.begin(node.number) else ""
            self._warn(f"node {node.number} gets no new calls: its machine is taken away in {seconds:.0f} s{follows}.")

    def _tell_lost(self, node: Node) -> None:
        if not node.away:  # else it was said when the connection broke
            self._emit(events.NodeDown(self._plan.pool, node.number, node.gone))
        self._out.append(("forget blobs", node.number))
        if not self._plan.local:
            self._out.append(("renounce", node.number))
            text = f"node {node.number} is lost: {node.gone}. Its calls go to other nodes, within their retries."
            # the next one would not be what was asked for either
            mistaken = isinstance(node.error, AcceleratorMismatch)
            replaced = not mistaken and self._requests.begin(node.number)
            self._warn(text + (" Another machine takes its place." if replaced else ""))

    def _lose_calls(self, node: Node) -> None:
        self._out.append(("lose", node.number, node.gone if node.state == "lost" else "its agent was restarted"))

    def _set_up(self, node: Node) -> None:
        node.gone, node.error, node.leaving = "", None, 0.0
        if self.gang or (not self._ports and node.number == 0):
            self._renew()
        elif self._ports and not self._refused(node):
            self._equip(node.number)
            self._inform(node.number)

    def _forget_runners(self, node: Node) -> None:
        node.before = "opening" if node.before == "ready" else node.before

    def _reconnect(self, node: Node) -> None:
        self._out += [("inquire",), ("reconnect", node.number)]

    def _renounce(self, node: Node) -> None:
        self._out += [("forget blobs", node.number), ("renounce", node.number)]

    def _warn(self, text: str) -> None:
        self._emit(events.Notice(self._plan.pool, text, "warning"))

    def _emit(self, event: events.Event) -> None:
        self._out.append(("emit", event))

    def _taken(self) -> list[Action]:
        out, self._out = self._out, []
        return out
