"""What others ask about the nodes of a pool: which take calls, which are missing, silent, or given up."""

from __future__ import annotations

from typing import Any

from skyward.client.connections import Connections
from skyward.client.node_table import Node
from skyward.client.settings import PoolSettings
from skyward.machines.replacement import Requests

__all__ = ["NodeAnswers"]

_LAST_MOMENT = 5.0


class NodeAnswers:
    """The state of all nodes, and what follows from it; `client/nodes.py: Nodes` changes it."""

    def __init__(self, plan: PoolSettings, links: Connections, requests: Requests) -> None:
        self._plan, self._links, self._requests = plan, links, requests
        there = plan.nodes if plan.present is None else plan.present
        self.all = [Node(i, "opening" if i < there else "absent") for i in range(plan.nodes)]
        self.gang = plan.gang
        """Whether runners are part of groups."""
        self.tainted = False
        """Whether all runners are to be made again, since one of a group is gone."""
        self.closing = False

    @property
    def present(self) -> list[Node]:
        """The nodes of the pool, whatever has become of them; not those that were missing and have not joined."""
        return [n for n in self.all if n.state not in ("absent", "joining")]

    def joining(self) -> bool:
        """Whether a node that was missing is being connected to."""
        return any(n.state == "joining" for n in self.all)

    def abouts(self) -> list[dict[str, Any]]:
        """What each node said of itself; nothing of those that are missing."""
        known = zip(self.all, self._links.abouts(), strict=True)
        return [{} if node.state == "absent" else about for node, about in known]

    def takes_calls(self) -> set[int]:
        """The nodes that may get calls: those of a group only together."""
        if self.tainted or (self._plan.gang and self.joining()):
            return set()
        able = {n.number for n in self.all if n.state == "ready" and self._links.connected(n.number)}
        return able if not self.gang or len(able) == len(self.present) else set()

    def all_ready(self) -> bool:
        """Whether every node has its runners."""
        return all(n.state == "ready" for n in self.present)

    def in_doubt(self, number: int, now: float) -> bool:
        """Whether a node may be lost without our knowing it yet."""
        node = self.all[number]
        late = 0 < node.leaving < now + _LAST_MOMENT
        return not self.closing and not node.gone and (node.state == "silent" or late)

    def is_leaving(self, number: int) -> bool:
        """Whether a node's machine is about to be taken away."""
        return self.all[number].leaving > 0

    def given_up(self, number: int) -> bool:
        """Whether a node is gone, or about to be, and nothing comes in its place."""
        node = self.all[number]
        return bool(node.gone or node.leaving) and not self._requests.going(number)

    def no_node_left(self) -> Node | None:
        """A lost node, if no node takes calls any more: none is left, or a group lacks that one; none is coming."""
        lost = [n for n in self.all if n.gone and self.given_up(n.number)]
        return lost[0] if lost and (self.gang or len(lost) == len(self.present)) else None

    def check(self) -> None:
        """Raises what is wrong with a node, while a pool is opened."""
        for node, about in zip(self.all, self.abouts(), strict=True):
            if error := node.error or (self._plan.refusal(node.number, about) if about else None):
                raise error

    def silent(self) -> list[int]:
        """The nodes of which it is not known whether they are lost."""
        return [n.number for n in self.all if n.state == "silent"]
