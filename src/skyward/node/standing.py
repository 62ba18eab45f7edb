"""Where the bodies of a node stand: asked for by the client, found out from outside their processes.

    client --where--> Standing --signal, then `facts`--> runners --stacks, facts--> Standing --standing--> client

Nothing happens here until somebody asks. Questions are answered one after the other, and each of them soon: a runner
that does not answer is told as such.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from skyward.node import stack_dump
from skyward.node.agent_calls import AgentCalls
from skyward.node.agent_tables import Slot
from skyward.node.protocol import AgentToClient, AgentToRunner
from skyward.node.receiver import Message
from skyward.node.runners import Runners
from skyward.node.timers import Timers
from skyward.node.usage import UsageMeter

__all__ = ["Standing"]

_LOOK = 0.02
_PATIENCE = 1.0  # for one stack, and for what runners say of themselves

Body = dict[str, Any]


class Standing:
    """Answers the client's question where bodies stand; the agent's `Receiver`s call it."""

    def __init__(
        self,
        calls: AgentCalls,
        runners: Runners,
        usage: UsageMeter,
        timers: Timers,
        tell: Callable[[Message], None],
    ) -> None:
        self._calls, self._runners, self._usage, self._tell = calls, runners, usage, tell
        self._timers, self._clock = timers, timers.clock
        self._questions: deque[tuple[int, list[str] | None]] = deque()
        self._request = 0
        self._answer: list[Body] = []
        self._waiting: dict[str, deque[Body]] = {}  # by runner: bodies whose stacks are still to be taken, in turn
        self._silent: set[str] = set()  # runners that have not said their facts
        self._since: dict[str, float] = {}
        self._busy = False

    def _from_client_where(self, request: int, ids: list[str] | None) -> None:
        self._questions.append((request, ids))
        if not self._busy:
            self._begin()

    def _from_runner_facts(self, runner: Any, facts: dict[str, Any]) -> None:
        self._silent.discard(runner.name)
        for body in self._answer:
            if body["runner"] == runner.name:
                body["facts"] = facts

    def _begin(self) -> None:
        self._busy = True
        self._request, ids = self._questions.popleft()
        self._answer, self._waiting, self._since = [], {}, {}
        for slot in self._calls.slots.values():
            if slot.state == "ready" and ids is not None:  # a person who looks does not wait for what bodies know
                self._silent.add(slot.name)
                self._runners.send(slot.name, AgentToRunner.facts())
            bodies = self._bodies(slot, ids)
            self._answer += bodies
            asked = deque(body for body in bodies if body["state"] != "idle")
            if asked:
                self._waiting[slot.name] = asked
                self._ask(slot.name)
        self._since["facts"] = self._clock()
        self._go_on()

    def _bodies(self, slot: Slot, ids: list[str] | None) -> list[Body]:
        now, pid = self._clock(), self._runners.pid(slot.name)
        cpu = self._usage.cpu_seconds(pid) if pid is not None else 0.0
        runner: Body = {"runner": slot.name, "place": slot.place, "cpu": cpu}
        if slot.state in ("starting", "failed"):
            return [{**runner, "state": "starting", "seconds": now - slot.since}] if ids is None else []
        found: list[Body] = [
            {**runner, "state": call.state, "call": call.id, "name": call.about["name"], "seconds": now - call.began}
            for call in slot.calls.values()
            if call.began is not None and (ids is None or call.id in ids)
        ]
        return found or [{**runner, "state": "idle"}]

    def _ask(self, name: str) -> None:
        """Has the next thread of a runner write its stack, after the last one has."""
        waiting = self._waiting[name]
        while waiting:
            problem = self._runners.ask_stack(name, waiting[0].get("call"))
            if not problem:
                self._since[name] = self._clock()
                return
            waiting.popleft()["problem"] = problem
        del self._waiting[name]

    def _go_on(self) -> None:
        now = self._clock()
        for name in list(self._waiting):
            text = self._runners.stack(name)
            late = now - self._since[name] > _PATIENCE
            if stack_dump.complete(text) or late:
                body = self._waiting[name].popleft()
                body["frames"] = stack_dump.parse(text)
                if not body["frames"] and late:
                    body["problem"] = "its thread does not answer: it is stopped, or waits in the kernel"
                self._ask(name)
        self._silent &= self._calls.slots.keys()
        if self._waiting or (self._silent and now - self._since["facts"] < _PATIENCE):
            self._timers.after(_LOOK, self._go_on)
            return
        self._tell(AgentToClient.standing(self._request, self._answer))
        self._answer, self._busy = [], False
        self._silent.clear()
        if self._questions:
            self._begin()
