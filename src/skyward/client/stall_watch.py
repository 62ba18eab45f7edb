"""Watches broadcasts that seem to get nowhere: when nodes are asked, when the user is told, when one is stopped.

No clock and no connection here: it is told what happens, and returns what is to be done. It costs nothing as long as
ranks use CPU, which nodes say anyway once a second, print, or yield: nodes are asked only when all of that has stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from skyward import events
from skyward.api.stacks import Stack
from skyward.client import stalls
from skyward.client.call import Call
from skyward.client.stalls import Rank
from skyward.client.surveys import Body, Survey, Surveys, stack_of
from skyward.errors import Stalled

__all__ = ["StallWatch"]

Action = tuple[Any, ...]
"""What is to be done: ("post", node, messages, buffers), ("emit", event), ("stall", call, error)."""

_QUIET = 10.0  # seconds without any sign of life after which nodes are asked
_ALONE = 60.0  # and after which more is said than about ranks that wait in collectives
_SELDOM, _STUCK = 60.0, 20.0  # at most so many seconds between questions, also about ranks that are stuck
_ANSWER = 5.0
_BUSY = 5.0  # per cent of a core, or of a GPU
_NOISE = 0.05  # seconds of CPU that answering costs


class _Seen(NamedTuple):
    at: float
    stack: Stack
    collectives: int | None


@dataclass(eq=False)
class _Watch:
    """One broadcast, or one call in a pool whose nodes form a group."""

    calls: Sequence[Call]
    began: float
    returned: int = 0
    """How many ranks had returned when it was looked at last."""
    changed: float = 0.0
    """When a rank returned or spoke last."""
    survey: Survey | None = None
    looked: float = 0.0
    pause: float = 0.0
    before: dict[str, _Seen] = field(default_factory=dict[str, "_Seen"])
    """What was seen of each call when it was looked at before."""
    stuck: int = 0
    """How many times in a row it was found stuck."""
    told: bool = False


class StallWatch:
    """Every method says what happened, at the time `now`, and returns what is to be done."""

    def __init__(self, pool: str, timeout: float | None, surveys: Surveys, accelerators: Callable[[int], bool]) -> None:
        self._pool, self._timeout, self._surveys, self._accelerators = pool, timeout, surveys, accelerators
        self._quiet = _QUIET if timeout is None else min(_QUIET, timeout)
        self._watches: list[_Watch] = []
        self._watched: set[str] = set()
        self._busy: dict[int, float] = {}

    def watch(self, calls: Sequence[Call], now: float) -> None:
        """Ranks of a broadcast, or a call to one node, are on their way."""
        if calls[0].id not in self._watched:
            self._watches.append(_Watch(calls, now, changed=now))
            self._watched.add(calls[0].id)

    def sampled(self, number: int, cpu: float, gpu: float, now: float) -> None:
        """A node says how busy it is: its CPU in per cent of a core, and the busiest of its GPUs in per cent."""
        if cpu >= _BUSY or gpu >= _BUSY:
            self._busy[number] = now

    def turn(
        self, still: Mapping[str, Call], groups: bool, connected: Callable[[int], bool], now: float
    ) -> list[Action]:
        """Does what is due; `still` are the calls that have not ended."""
        if groups:
            for call in still.values():
                if call.announced and not call.gang and call.stream is None:
                    self.watch([call], now)
        actions: list[Action] = []
        for watch in list(self._watches):
            left = [call for call in watch.calls if call.id in still]
            if not left:
                self._drop(watch)
            elif all(call.announced and call.state == "sent" and call.node is not None for call in left):
                actions += self._look(watch, left, connected, now)
        return actions

    def _drop(self, watch: _Watch) -> None:
        self._watches.remove(watch)
        self._watched.discard(watch.calls[0].id)
        if watch.survey is not None:
            self._surveys.close(watch.survey)

    def _look(self, watch: _Watch, left: list[Call], connected: Callable[[int], bool], now: float) -> list[Action]:
        returned = len(watch.calls) - len(left)
        spoke = max(call.spoke for call in left)
        if returned != watch.returned or spoke > watch.changed:
            watch.changed = now if returned != watch.returned else spoke
            watch.returned, watch.stuck = returned, 0
        survey = watch.survey
        if survey is not None:
            if not survey.complete and now - survey.asked < _ANSWER:
                return []
            watch.survey = None
            self._surveys.close(survey)
            return self._judge(watch, left, survey, now)
        still = self._still_since(watch, left)
        idle = now - still >= self._quiet
        lonely = returned > 0 and now - watch.changed >= _ALONE
        if not (idle or lonely) or now - watch.looked < watch.pause:
            return []
        nodes = {call.node for call in watch.calls if call.node is not None}
        ids = [call.id for call in left]
        watch.looked = now
        watch.survey, actions = self._surveys.ask([node for node in nodes if connected(node)], ids, now)
        return actions

    def _still_since(self, watch: _Watch, left: list[Call]) -> float:
        """Since when none of the ranks has given a sign of life."""
        return max(watch.changed, *(self._busy.get(call.node or 0, 0.0) for call in left))

    def _judge(self, watch: _Watch, left: list[Call], survey: Survey, now: float) -> list[Action]:
        idle_before = now - self._still_since(watch, left) >= self._quiet
        ranks, moved = self._ranks(watch, left, survey, idle_before, now)
        finding = stalls.judge(ranks)
        watch.stuck = watch.stuck + 1 if finding == "stuck" else 0
        watch.pause = min(_STUCK if watch.stuck else _SELDOM, max(self._quiet, 2 * watch.pause))
        quiet = now - self._still_since(watch, left)
        name = watch.calls[0].name
        if self._timeout is not None and watch.stuck > 1 and quiet >= self._timeout:
            why, where = stalls.sentence(name, ranks), stalls.stacks(ranks)
            return [("stall", call, Stalled(name, why, self._timeout, where)) for call in left]
        if self._timeout is not None and watch.stuck:
            watch.pause = min(watch.pause, max(0.5, self._timeout - quiet))
        lonely = len(left) < len(watch.calls) and now - watch.changed >= _ALONE
        speaks = finding == "stuck" or (lonely and not any(call.stream for call in left) and not moved)
        if watch.told or not speaks:
            return []
        watch.told = True
        text = stalls.sentence(name, ranks)
        if finding == "stuck" and self._timeout is not None:
            text += f" It is stopped after {self._timeout:g} s (stall_timeout)."
        waiting = tuple(rank.rank for rank in ranks if not rank.returned)
        return [("emit", events.BroadcastStalled(self._pool, name, waiting, text, stalls.stacks(ranks)))]

    def _ranks(
        self, watch: _Watch, left: list[Call], survey: Survey, idle: bool, now: float
    ) -> tuple[list[Rank], bool]:
        """What is known of each rank, and whether any of them has moved since the last time."""
        ranks: list[Rank] = []
        moved = False
        gang = watch.calls[0].about.get("gang", "")
        for number, call in enumerate(watch.calls):
            node = call.node if call.node is not None else -1
            rank = number if len(watch.calls) > 1 else node if call.rank is None else call.rank
            body, facts = _found(survey.bodies.get(node, []), call)
            part = facts.get("shards", {}).get(gang)
            collectives: int | None = facts.get("collectives")
            known = Rank(rank, node, call not in left, collectives=collectives, shard=tuple(part) if part else None)
            if body is not None and call in left:
                stack = stack_of(rank, node, body)
                before, watch.before[call.id] = watch.before.get(call.id), _Seen(now, stack, collectives)
                cpu, entered = 0.0 if idle else None, False
                if before is not None:
                    cpu = max(0.0, stack.cpu_seconds - before.stack.cpu_seconds - _NOISE) / max(now - before.at, 1e-3)
                    entered = collectives != before.collectives
                moved = moved or before is None or stack.frames != before.stack.frames
                gpus = self._accelerators(node)
                known = replace(known, stack=stack, cpu=cpu, entered=entered, accelerators=gpus)
            ranks.append(known)
        return ranks, moved


def _found(bodies: list[Body], call: Call) -> tuple[Body | None, dict[str, Any]]:
    """Where a call stands, and the facts of its process, which one that has returned has left behind."""
    body = next((body for body in bodies if body.get("call") == call.id), None)
    place = call.about.get("place", 0)
    own = [body] if body is not None else [each for each in bodies if each["place"] == place]
    facts: list[dict[str, Any]] = [each["facts"] for each in own if each.get("facts")]
    return body, facts[0] if facts else {}
