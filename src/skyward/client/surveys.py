"""Questions to nodes where their bodies stand, and the answers as they come in."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from skyward.api.ranks import Ranks
from skyward.api.stacks import Frame, Stack, Stacks
from skyward.node.protocol import ClientToAgent

__all__ = ["Body", "Survey", "Surveys", "stack_of"]

Body = dict[str, Any]
"""Where a body stands, as its node says it (`AgentToClient.standing`)."""


@dataclass
class Survey:
    """One question to some nodes."""

    request: int
    asked: float
    awaited: set[int]
    bodies: dict[int, list[Body]] = field(default_factory=dict[int, list[Body]])

    @property
    def complete(self) -> bool:
        """Whether every node has answered."""
        return not self.awaited

    def stacks(self, ranks: Ranks) -> Stacks:
        """What the nodes have answered so far."""
        found = [
            stack_of(ranks.rank(node, body["place"]), node, body)
            for node, bodies in self.bodies.items()
            for body in bodies
        ]
        return Stacks(sorted(found, key=lambda stack: (stack.rank, stack.call or "")))


class Surveys:
    """The questions that are open; an answer to any other is ignored."""

    def __init__(self) -> None:
        self._open: dict[int, Survey] = {}
        self._count = itertools.count(1)

    def ask(self, nodes: Iterable[int], ids: list[str] | None, now: float) -> tuple[Survey, list[tuple[Any, ...]]]:
        """A question to nodes about certain calls, or all, and what is to be sent."""
        survey = Survey(next(self._count), now, set(nodes))
        self._open[survey.request] = survey
        message = ClientToAgent.where(survey.request, ids)
        return survey, [("post", node, [message], ()) for node in sorted(survey.awaited)]

    def answered(self, number: int, request: int, bodies: list[Body]) -> None:
        """A node has answered."""
        survey = self._open.get(request)
        if survey is not None and number in survey.awaited:
            survey.awaited.discard(number)
            survey.bodies[number] = bodies

    def close(self, survey: Survey) -> None:
        """Nobody waits for the rest of the answers."""
        self._open.pop(survey.request, None)


def stack_of(rank: int, node: int, body: Body) -> Stack:
    """A node's answer about one body, for users."""
    frames = tuple(Frame(str(file), int(line), str(function)) for file, line, function in body.get("frames") or ())
    known = {name: body[name] for name in ("call", "name", "seconds", "problem") if name in body}
    return Stack(rank, node, body["state"], cpu_seconds=body["cpu"], frames=frames, **known)
