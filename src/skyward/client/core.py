"""What the client decides about a pool: `Nodes` and `ClientCalls` together. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, cast

from skyward import events
from skyward.api.spec import Ranks
from skyward.client import outcomes
from skyward.client.actions import Action, Emit, Lose, NodeAction, SharedLost, Stall
from skyward.client.call import Call
from skyward.client.calls import ClientCalls
from skyward.client.connections import Connections, Event, Greeted, NotReached, Unreachable
from skyward.client.connections import Lost as ConnectionLost
from skyward.client.nodes import Nodes
from skyward.client.settings import Machines, PoolSettings
from skyward.client.stalls import StallWatch, Surveys
from skyward.errors import NodeLost, PoolClosed, SkywardError
from skyward.node.protocol import AgentToClient, Lost, Raised, Returned, Verdict
from skyward.transport.codec import handles
from skyward.transport.frames import Malformed

__all__ = ["ConnectionEvents", "Core"]

_NO_PLACE = "node {} has no process {}"
_SAME_NOTE = 60.0
_QUEUE_EVERY = 0.5
_MOST_NOTES = 1000
_LONGEST_NOTE = 10_000
VERDICTS = {kind for kind, message in AgentToClient.messages().items() if issubclass(message, Verdict)}
_AT_ONCE, _A_SECOND = 100.0, 20.0  # what a node may tell of itself; ours say one or two things a second


class Core:
    """Each method is an event at time `now` and returns actions."""

    def __init__(self, plan: PoolSettings, links: Connections, machines: Machines) -> None:
        self._plan, self._links, self._machines = plan, links, machines
        self.calls = ClientCalls(plan.pool, plan.nodes, plan.slots, plan.listening, plan.local)
        self.nodes = Nodes(plan, links, machines)
        self._gpu_notes: dict[str, float] = {}
        self._queue = 0, -math.inf  # its length, and when that was told
        self._allowed = [(_AT_ONCE, 0.0)] * plan.nodes  # with when it was so
        self.surveys = Surveys()
        self._stalls = StallWatch(plan.pool, plan.stall_timeout, self.surveys, self._has_accelerators)

    @property
    def ranks(self) -> Ranks:
        return self.calls.ranks

    def rank(self, number: int, place: int) -> int:
        if place >= self.ranks.counts[number]:
            raise Malformed(_NO_PLACE.format(number, place))
        return self.ranks.rank(number, place)

    def settle_ranks(self) -> None:
        self.calls.set_ranks(self._machines.ranks(self.nodes.greetings()), self._plan.slots)
        self.nodes.gang = self.nodes.gang or (self._plan.gang and len(self.ranks) > 1)

    # from the user

    def submit(self, calls: Sequence[Call], now: float) -> list[Action]:
        return self.calls.submit(calls, now)

    def submit_to(self, calls: Sequence[tuple[int, Call]], now: float) -> list[Action]:
        if len(calls) > 1:
            self._stalls.watch([call for _, call in calls], now)
        return self.calls.submit_to(calls, now)

    def cancel(self, call: Call, why: str, now: float) -> list[Action]:
        return self.calls.cancel(call, why, now)

    def check_nodes_left(self) -> None:
        lost = self.nodes.no_node_left()
        if lost is not None and self.nodes.gang:
            raise NodeLost(lost.number, reason=f"{lost.gone}; the others cannot form a group without it", attempts=0)
        if lost is not None:
            raise NodeLost(0, reason=f"no node of the pool is left: {lost.gone}", attempts=0)

    def missing(self, numbers: Sequence[int], *, late: bool, overdue: bool = False) -> list[int]:
        """Those that take no calls now; raises NodeLost for one that is gone, or if `late` not connected. A node whose
        runners are being made has until `overdue`.
        """
        if not late and self.nodes.joining():
            return list(numbers)  # which rank is where is about to change
        able = self.nodes.takes_calls()
        missing = [n for n in numbers if n not in able]
        for node in (self.nodes.all[n] for n in missing):
            starts = node.state in ("opening", "ready") and self._links.connected(node.number)
            if (late and not starts) or overdue or self.nodes.given_up(node.number):
                why = node.gone or ("its machine is being taken away" if node.leaving else "it is not ready")
                raise NodeLost(node.number, reason=why, attempts=0, broadcast=True)
        return missing

    def close(self, now: float) -> list[Action]:
        self.nodes.closing = self.calls.closing = True
        return self.calls.abandon(
            lambda call: PoolClosed(f"the pool was closed while {call.name} was waiting or running."), now
        )

    def collapse(self, error: BaseException, now: float) -> list[Action]:
        self.nodes.closing = self.calls.closing = True
        text = f"cannot end: the pool's own thread has failed ({error!r}). Close the pool; this is a bug."
        return self.calls.abandon(lambda call: SkywardError(f"{call.name} {text}"), now)

    # from nodes; the engine's `Receiver` calls these

    @handles(AgentToClient.Started)
    def started(self, message: AgentToClient.Started, number: int, now: float) -> list[Action]:
        return self.calls.started(number, message.id, message.place, now)

    @handles(AgentToClient.Recalled)
    def recalled(self, message: AgentToClient.Recalled, number: int, now: float) -> list[Action]:
        return self.calls.recalled(number, message.id, now)

    @handles(AgentToClient.States)
    def states(self, message: AgentToClient.States, number: int, now: float) -> list[Action]:
        return self.calls.states(number, message.states, now)

    @handles(AgentToClient.Ready)
    def ready(self, message: AgentToClient.Ready, number: int, now: float) -> list[Action]:
        return self._routed(self.nodes.on_ready(number, message.generation, now), now)

    @handles(AgentToClient.Failed)
    def failed(self, message: AgentToClient.Failed, number: int, now: float) -> list[Action]:
        failed = self.nodes.on_failed(number, message.error, message.generation, message.buffers, now)
        return self._routed(failed, now)

    @handles(AgentToClient.Replaced)
    def replaced(self, message: AgentToClient.Replaced, number: int, now: float) -> list[Action]:
        rank = self.rank(number, message.place)
        lost = SharedLost(number, rank, "its process has ended")
        shown = rank if self.ranks.many else None
        return [lost, *self._routed(self.nodes.on_replaced(number, shown, message.generation, now), now)]

    @handles(AgentToClient.Ports)
    def ports(self, message: AgentToClient.Ports, number: int, now: float) -> list[Action]:
        if number != 0:
            raise Malformed("ports of a node that was not asked for any")
        return self._routed(self.nodes.on_ports(message.ports, message.generation, now), now)

    @handles(AgentToClient.Notice)
    def notice(self, message: AgentToClient.Notice, number: int, now: float) -> list[Action]:
        return self._routed(self.nodes.on_notice(number, message.seconds, now), now)

    @handles(AgentToClient.Repaired)
    def repaired(self, message: AgentToClient.Repaired, number: int, now: float) -> list[Action]:
        if self._too_often(number, now):
            return []
        text = f"node {number} repaired its own state: {message.text[:_LONGEST_NOTE]}. Nothing is lost; this is a "
        return [Emit(events.Notice(self._plan.pool, text + "bug.", "warning"))]

    @handles(AgentToClient.Warning)
    def warning(self, message: AgentToClient.Warning, number: int, now: float) -> list[Action]:
        if self._too_often(number, now):
            return []
        return [Emit(events.Notice(self._plan.pool, f"node {number}: {message.text[:_LONGEST_NOTE]}", "warning"))]

    @handles(AgentToClient.Standing)
    def standing(self, message: AgentToClient.Standing, number: int, now: float) -> list[Action]:
        self.surveys.answered(number, message.request, message.bodies)
        return []

    @handles(AgentToClient.Sample)
    def sampled(self, message: AgentToClient.Sample, number: int, now: float) -> list[Action]:
        if self._too_often(number, now):
            return []
        cpu, found = message.cpu, tuple(events.GpuSample(*cast(Any, gpu)) for gpu in message.gpus)
        self._stalls.sampled(number, cpu, max((gpu.utilization or 0.0 for gpu in found), default=0.0), now)
        sample = events.NodeSample(self._plan.pool, number, cpu, message.memory, message.running, found)
        return [Emit(sample), *self._queue_length(now)]

    def _queue_length(self, now: float) -> list[Action]:
        before, told = self._queue
        waiting = self.calls.dispatch.queue_length()
        if waiting == before or now - told < _QUEUE_EVERY:
            return []
        self._queue = waiting, now
        return [Emit(events.QueueLength(self._plan.pool, waiting))]

    @handles(AgentToClient.Gpus)
    def gpus(self, message: AgentToClient.Gpus, number: int, now: float) -> list[Action]:
        if self._too_often(number, now):
            return []
        topic, text = message.topic, message.text[:_LONGEST_NOTE]
        # nodes on one computer may share a GPU, and what cannot be shown is mostly the same everywhere
        once = self._plan.local or topic == "missing"
        if once and now - self._gpu_notes.get(text, -math.inf) < _SAME_NOTE:
            return []
        if len(self._gpu_notes) > _MOST_NOTES:
            self._gpu_notes.clear()
        self._gpu_notes[text] = math.inf if topic == "missing" else now
        return [Emit(events.Notice(self._plan.pool, f"node {number}: {text}", "warning"))]

    def _too_often(self, number: int, now: float) -> bool:
        left, at = self._allowed[number]
        left = min(_AT_ONCE, left + max(0.0, now - at) * _A_SECOND)
        self._allowed[number] = max(0.0, left - 1), now
        return left < 1

    def mishandled(self, number: int, message: Sequence[Any], error: BaseException, now: float) -> list[Action]:
        """The call that the message belongs to must not wait for another."""
        call = self.calls.calls.get(message[1]) if len(message) > 1 and isinstance(message[1], str) else None
        if call is None or message[0] not in VERDICTS:
            return []
        text = f"node {number} reported the end of {call.name}, but the report could not be read here: {error!r}."
        return self.calls.failure(number, call.id, (SkywardError(text), "error", 0.0), False, now)

    def verdict(self, verdict: Verdict, number: int, now: float) -> list[Action]:
        actions: list[Action] = []
        call = self.calls.calls.get(verdict.id)
        own = call is not None and call.node == number  # else it has ended, or is with another node
        ranks = self.calls.ranks
        self.nodes.gang = self.nodes.gang or (own and verdict.group and len(ranks) > 1)
        if self.nodes.gang and verdict.replaced and not self.nodes.closing:
            actions = self._routed(self.nodes.on_broken_group(now), now)
        if verdict.place >= ranks.counts[number]:
            raise Malformed(_NO_PLACE.format(number, verdict.place))
        if verdict.seconds is not None and ranks.many:
            self.calls.runs_at(number, verdict.id, verdict.place)
        if isinstance(verdict, Returned):
            return actions + self.calls.result(number, verdict, now)
        if isinstance(verdict, Lost):
            return actions + self.calls.lost(number, verdict.id, verdict.reason, now)
        if call is None or not own:
            return actions
        rank = call.rank if ranks.many else None
        error, outcome = outcomes.failure(self._plan.pool, call, number, verdict, rank)
        preempted = isinstance(verdict, Raised) and verdict.preempted
        if self.nodes.is_leaving(number) and (outcome == "crashed" or preempted):
            return actions + self.calls.lost(number, verdict.id, "its machine is being taken away", now)
        doubtful = outcome == "error" and (self.nodes.gang or not self._plan.local)
        failure = (error, outcome, verdict.seconds or 0.0)
        return actions + self.calls.failure(number, verdict.id, failure, doubtful, now)

    # connections and machines

    def renew(self, now: float) -> list[Action]:
        return self._routed(self.nodes.renew(now), now)

    def attached(self, number: int, *, restarted: bool, now: float) -> list[Action]:
        if self.nodes.all[number].state == "joining":
            try:
                if error := self._machines.refusal(number, self._links.greetings()[number]):
                    raise error
                self.settle_ranks()
            except SkywardError as exc:  # it is not what the pool asked for
                return self.unreachable(number, exc, now)
        return self._routed(self.nodes.attached(number, restarted=restarted, now=now), now)

    def broken(self, number: int, now: float) -> list[Action]:
        return self._routed(self.nodes.broken(number, now), now)

    def retry(self, number: int, error: Exception, now: float) -> tuple[float | None, list[Action]]:
        pause, actions = self.nodes.retry(number, error, now)
        return pause, self._routed(actions, now)

    def unreachable(self, number: int, error: Exception, now: float) -> list[Action]:
        return self._routed(self.nodes.unreachable(number, error, now), now)

    def admit(self, number: int, now: float) -> tuple[bool, list[Action]]:
        """Takes in a missing node; False while that would change the ranks of what runs."""
        if any(call.pinned for call in self.calls.calls.values()):
            return False, []
        if (self.nodes.gang or self._plan.gang) and self._occupied(range(self._plan.nodes)):
            return False, []  # all runners are made again then
        return True, self._routed(self.nodes.join(number, now), now)

    def vacate(self, number: int, now: float) -> tuple[bool, list[Action]]:
        """Takes a node out for another machine; False while that would end a call."""
        vacant, actions = self.nodes.vacate(number, self._occupied, now)
        return vacant, self._routed(actions, now)

    def _occupied(self, numbers: Iterable[int]) -> bool:
        return any(self.calls.dispatch.busy(number) for number in numbers)

    def not_replaced(self, number: int, reason: str, now: float) -> list[Action]:
        return self._routed(self.nodes.not_replaced(number, reason, now), now)

    def machine_ended(self, number: int, reason: str, now: float) -> list[Action]:
        return self._routed(self.nodes.ended(number, reason, now), now)

    # time

    def turn(self, now: float) -> list[Action]:
        actions: list[Action] = [*self.nodes.tell_alone(now)]
        if self.nodes.tainted and not any(call.state == "stopping" for call in self.calls.calls.values()):
            actions += self.renew(now)  # after every process of the old group has had its verdict
        actions += self.calls.turn(lambda n: self.nodes.in_doubt(n, now), self._links.connected, now)
        actions += self._stop_stalled(now)
        return actions + self._fail_unservable(now)

    def _stop_stalled(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for action in self._stalls.turn(self.calls.calls, self.nodes.gang, self._links.connected, now):
            if isinstance(action, Stall):
                action.call.stall = action.error
                actions += self.calls.cancel(action.call, "stalled", now)
            else:
                actions.append(action)
        return actions

    def _has_accelerators(self, number: int) -> bool:
        return bool(self._links.greetings()[number].get("accelerators"))

    def _routed(self, actions: list[NodeAction], now: float) -> list[Action]:
        self.calls.dispatch.set_up(self.nodes.takes_calls())
        left: list[Action] = []
        for action in actions:
            if isinstance(action, Lose):
                left.append(SharedLost(action.node, None, action.reason))
                left += self.calls.lose_node(action.node, action.reason, now)
            else:
                left.append(action)
        return left + self.calls.take_calls(self.nodes.takes_calls(), now) + self._fail_unservable(now)

    def _fail_unservable(self, now: float) -> list[Action]:
        lost = self.nodes.no_node_left()
        return self.calls.fail_waiting(lost.number, lost.gone, now) if lost is not None else []


class ConnectionEvents:
    def __init__(self, core: Core, connections: Connections) -> None:
        self._core, self._connections = core, connections
        self.first: set[int] = set()
        self.closing = False

    def handle(self, event: Event, now: float) -> list[Action]:
        number = event.number
        match event:
            case Greeted():
                restarted = self._connections.attach(event)
                if restarted is not None or event.first:
                    self.first.discard(number)
                if restarted is not None:
                    return self._core.attached(number, restarted=restarted, now=now)
                if number in self.first or event.first:
                    return []
                return self._retry(number, ConnectionError("it was given up during the greeting"), now)
            case NotReached():
                return self._retry(number, event.error, now)
            case ConnectionLost() if self._connections.current(number, event.link):
                return self._core.broken(number, now)
            case Unreachable() if event.link is None or self._connections.current(number, event.link):
                self.first.discard(number)
                return self._core.unreachable(number, event.error, now)
            case _:
                return []

    def _retry(self, number: int, error: Exception, now: float) -> list[Action]:
        if self.closing or self._connections.connected(number):
            return []
        pause, actions = self._core.retry(number, error, now)
        if pause is not None:
            self._connections.reconnect(number, pause)
        return actions
