"""The calls of a pool on the client: which wait, which node has them, how they ended. Pure."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any, Literal, assert_never

from skyward import events
from skyward.api.spec import Ranks
from skyward.client import outcomes
from skyward.client.actions import (
    Action,
    CallBack,
    Discard,
    Emit,
    Fail,
    Feed,
    KeepFailed,
    Load,
    MakeAgain,
    Post,
    RecordEnd,
    Settle,
    Unblock,
    Unwanted,
)
from skyward.client.dispatch import Dispatch
from skyward.client.kept import Kept
from skyward.errors import FilesLost, InvalidArgument, NodeLost, RefLost, SkywardError
from skyward.node.protocol import Blobs, ClientToAgent, Close, Header, Recall, Returned, Run
from skyward.transport.codec import Message

if TYPE_CHECKING:
    from skyward.client.call import Call
    from skyward.client.kept import KeptResult

__all__ = ["CALLS", "ClientCalls"]


# The states of a call on the client, as a table: (state, event) -> (state, actions).
#
# An event that a state has no row for changes nothing. A row to "done" settles the call or fails it.


Effect = Literal[
    "post call",
    "post recall",
    "post cancel",
    "settle",
    "fail",
    "fail cancelled",
    "hold",
    "count attempt",
    "queue again",
]
Row = tuple[str, tuple[Effect, ...]]

_WITH_NODE: dict[str, Row] = {
    "recalled": ("waiting", ("queue again",)),
    "result": ("done", ("settle",)),
    "failure": ("done", ("fail",)),
    "doubtful failure": ("held", ("hold",)),
    "lost": ("waiting", ("count attempt", "queue again")),
    "lost for good": ("done", ("fail",)),
    "cancel": ("stopping", ("post cancel",)),
    "abandon": ("done", ("fail",)),
}

CALLS: dict[tuple[str, str], Row] = {
    # waits for a node that has room, or for results that it takes
    ("waiting", "send"): ("sent", ("post call",)),
    ("waiting", "cancel"): ("done", ("fail cancelled",)),
    ("waiting", "argument lost"): ("done", ("fail",)),
    ("waiting", "abandon"): ("done", ("fail",)),
    # a node has it
    **{("sent", event): row for event, row in _WITH_NODE.items()},
    ("sent", "recall"): ("recalling", ("post recall",)),
    # a node has it, and was asked to give it back if it has not begun
    **{("recalling", event): row for event, row in _WITH_NODE.items()},
    # a node has it, and was asked to end it
    ("stopping", "recalled"): ("done", ("fail cancelled",)),
    ("stopping", "result"): ("done", ("settle",)),
    ("stopping", "failure"): ("done", ("fail",)),
    ("stopping", "doubtful failure"): ("done", ("fail",)),
    ("stopping", "lost"): ("done", ("fail cancelled",)),
    ("stopping", "lost for good"): ("done", ("fail cancelled",)),
    ("stopping", "abandon"): ("done", ("fail",)),
    # a rank of a broadcast has failed; it may only have lost its peer, whose end is about to be told
    ("held", "release"): ("done", ("fail",)),
    ("held", "cancel"): ("done", ("fail",)),
    ("held", "abandon"): ("done", ("fail",)),
}


_STREAM_WARNING = 5.0
_ASK = 30.0


def unheard_of(calls: Iterable[Call], connected: Callable[[int], bool], now: float) -> dict[int, list[Call]]:
    silent: dict[int, list[Call]] = {}
    for call in calls:
        waited = call.node is not None and call.state != "held" and now - call.heard > _ASK
        if waited and call.node is not None and connected(call.node):
            silent.setdefault(call.node, []).append(call)
    return silent


def held_by_streams(calls: Iterable[Call], now: float) -> str:
    all_calls = list(calls)
    if not any(call.stream for call in all_calls):
        return ""
    busy = [call for call in all_calls if call.announced]
    waiting = [call for call in all_calls if not call.announced and call.stream is None]
    if not waiting or not all(call.stream for call in busy):
        return ""
    if now - min(call.made for call in waiting) <= _STREAM_WARNING:
        return ""
    return (
        f"{waiting[0].name} is waiting for a slot, but streams that have not been read to the end hold all of them "
        f"({busy[0].name if busy else 'a generator'}). Close the stream, or give the pool more slots."
    )


_STOP_GRACE = 3.0
_SUSPICION = 0.5
_LOOK = 1.0  # how often all calls are looked at
_OF_THE_BODY = ("error", "crashed", "timeout")  # ends that come from it, not from its node or the user
_ASKED = 10_000  # calls in one question: the answer has to fit into a frame

Failure = tuple[BaseException, outcomes.Outcome, float]


class ClientCalls:
    """Each method is an event at time `now` and returns actions."""

    def __init__(
        self, pool: str, nodes: int, slots: int, listening: Callable[[], object] = lambda: True, local: bool = True
    ) -> None:
        self._pool, self._listening = pool, listening
        self.kept = Kept(pool, local)
        self.calls: dict[str, Call] = {}
        self.yielding: dict[str, Call] = {}  # those of them that stream, or will
        self.dispatch: Dispatch[Call] = Dispatch(nodes, slots)
        self.ranks = Ranks([1] * nodes)
        self.closing = self._warned = False
        self.settled = self.failed = self.undone = 0  # undone: ended, but not well
        self._timers: list[tuple[float, int, str, Call]] = []
        self._count = itertools.count()
        self._out: list[Action] = []
        self._now = self._looked = 0.0

    # from the user

    def submit(self, calls: Sequence[Call], now: float) -> list[Action]:
        self._now = now
        for call in calls:
            self._take(call)
        for call in calls:
            if call.needs or call.keeps is not None:
                self._enqueue(call)
            else:
                self.dispatch.add(call)
        return self._dispatched()

    def set_ranks(self, ranks: Ranks, slots: int) -> None:
        self.ranks = ranks
        self.dispatch.set_slots([count * slots for count in ranks.counts])

    def submit_to(self, calls: Sequence[tuple[int, Call]], now: float) -> list[Action]:
        """More than one call succeed or fail together."""
        self._now = now
        gang = [call for _, call in calls]
        for rank, call in calls:
            self._take(call)
            call.gang = gang if len(gang) > 1 else ()
            call.header["gang"] = gang[0].id
            call.rank, (number, place) = rank, self.ranks.places[rank]
            if place:
                call.header["place"] = place
            self.dispatch.pin(call, number, now)
            self._step(call, "send")
        return self._taken()

    def cancel(self, call: Call, why: str, now: float) -> list[Action]:
        self._now = now
        self._cancel(call, why)
        return self._dispatched()

    def abandon(self, error: Callable[[Any], BaseException], now: float) -> list[Action]:
        self._now = now
        for call in list(self.calls.values()):
            self._step(call, "abandon", (error(call), "cancelled", 0.0))
        self.kept.abandon(error)
        return self._taken()

    def unfinished(self) -> Iterator[Call]:
        return (call for call in self.calls.values() if call.stream is None and call.stopping is None)

    def streams(self) -> list[Call]:
        """Not stopped ones; those that have not begun come first, so that none starts in another's place."""
        found = [call for call in self.yielding.values() if call.stopping is None]
        return sorted(found, key=lambda call: (call.stream is not None, call.node is not None))

    def stream_closed(self, call: Call, now: float) -> list[Action]:
        self._now = now
        if call.id not in self.calls or call.node is None:
            return []
        self._out.append(Post(call.node, [Close(call.id)]))
        self._after(_STOP_GRACE, "stop", call)
        return self._taken()

    # from nodes; what there is room for then is sent with the next `turn`, many calls in one frame

    def runs_at(self, number: int, call_id: str, place: int) -> None:
        if self.ranks.many and (call := self._at(number, call_id)) is not None:
            call.rank = self.ranks.rank(number, place)

    def started(self, number: int, call_id: str, place: int, now: float) -> list[Action]:
        call = self._at(number, call_id)
        if call is not None:
            self.runs_at(number, call_id, place)
            call.heard = self._now = now
            self.kept.seen(call, number)
            self._tell_started(call)
        return self._taken()

    def recalled(self, number: int, call_id: str, now: float) -> list[Action]:
        self._now = now
        call = self._at(number, call_id)
        if call is not None:
            self._step(call, "recalled")
        return self._taken()

    def result(self, number: int, result: Returned, now: float) -> list[Action]:
        self._now = now
        call = self.calls.get(result.id)
        if call is not None and call.node != number:
            call = None  # as in `_at`
        if call is not None and (call.keeps is not None or result.kept is not None):
            self.kept.check(call, result)
        if call is None or not self._step(call, "result", None, result):
            self._out.append(Discard(self.kept.leftover(result)))
        return self._taken()

    def failure(self, number: int, call_id: str, failure: Failure, doubtful: bool, now: float) -> list[Action]:
        self._now = now
        call = self._at(number, call_id)
        if call is not None:
            others = any(c is not call and c.id in self.calls for c in call.gang)
            self._step(call, "doubtful failure" if doubtful and others else "failure", failure)
        return self._taken()

    def too_large(self, number: int, call_id: str, error: Exception, now: float) -> list[Action]:
        call = self._at(number, call_id)
        text = f"{call.name if call else call_id} was not sent: with its arguments it is {error} Send less per "
        text += "call, and join many small arrays into a few large ones."
        return self.failure(number, call_id, (InvalidArgument(text), "error", 0.0), False, now)

    def unsendable(self, number: int, blob: str, error: Exception, now: float) -> list[Action]:
        self._now = now
        for call in self.dispatch.at(number):
            if not call.announced and (blob in call.uploads or any(blob.startswith(r.key) for r in call.needs)):
                failure = SkywardError(f"an argument of {call.name} cannot be sent to node {number}: {error}.")
                if isinstance(error, FileNotFoundError):
                    failure = FilesLost(f"an argument of {call.name}", str(error.filename))
                self._post_cancel(call)
                self._step(call, "failure", (failure, "error", 0.0))
        return self._taken()

    def lost(self, number: int, call_id: str, reason: str, now: float) -> list[Action]:
        """Its state is unknown: it is restarted elsewhere if allowed."""
        self._now = now
        call = self._at(number, call_id)
        if call is not None:
            self._lose(call, reason)
        return self._taken()

    def states(self, number: int, states: dict[str, str], now: float) -> list[Action]:
        self._now = now
        for call_id, state in states.items():
            call = self._at(number, call_id)
            if call is None or not call.asked:
                continue  # it ended, or was sent again, after the question
            call.heard, call.asked = now, False
            if state == "unknown":
                self._warn(f"node {number} has no record of {call.name}, which was sent to it. This is a bug.")
                self._lose(call, "its node knew nothing of it")
            elif call.state == "stopping" and state in ("queued", "sent", "running"):
                self._warn(f"node {number} did not know that {call.name} was cancelled; told it again. This is a bug.")
                self._post_cancel(call)
        return self._taken()

    # from what is known of nodes

    def take_calls(self, numbers: Iterable[int], now: float) -> list[Action]:
        self._now = now
        self.dispatch.set_up(set(numbers))
        return self._dispatched()

    def lose_node(self, number: int, reason: str, now: float) -> list[Action]:
        self._now = now
        self._lose_kept(number, reason)
        for call in self.dispatch.at(number):
            self._lose(call, reason)
        return self._dispatched()

    def fail_waiting(self, number: int, reason: str, now: float) -> list[Action]:
        self._now = now
        for call in self.dispatch.waiting():
            self._step(call, "abandon", (NodeLost(number, call.name, reason, call.attempt), "lost", 0.0))
        return self._taken()

    # time

    def turn(self, in_doubt: Callable[[int], bool], connected: Callable[[int], bool], now: float) -> list[Action]:
        """Recalls queued calls, asks about silent ones, applies timeouts."""
        self._now = now
        for call in self.dispatch.recallable(now):
            self._step(call, "recall")
        while self._timers and self._timers[0][0] <= now:
            _, _, event, call = heapq.heappop(self._timers)
            if call.id not in self.calls:
                continue
            if event == "stop":
                self._cancel(call, "cancelled")
            elif any(other is not call and self._doubted(other, in_doubt) for other in call.gang):
                self._after(_SUSPICION, event, call)  # is that node lost, or only our connection? It tells the cause
            else:
                self._step(call, event)
        if now - self._looked > _LOOK:
            self._looked = now
            self._ask(connected)
            if not self._warned and (text := held_by_streams(self.calls.values(), now)):
                self._warned = True
                self._warn(text)
        return self._dispatched()

    def soon(self) -> bool:
        return bool(self._timers) or self.dispatch.has_backlog() or self.dispatch.has_pinned_waiters()

    # the machinery: one place for each thing that happens to a call

    def _step(self, call: Call, event: str, failure: Failure | None = None, result: Returned | None = None) -> bool:
        """Applies the state table; False if the event changes nothing."""
        row = CALLS.get((call.state, event))
        if row is None or call.id not in self.calls:
            return False
        call.state, actions = row
        if failure is not None:
            call.failure = failure
        if call.state == "done":
            self._leave(call, result)
        for action in actions:
            match action:
                case "post call":
                    self._post_call(call)
                case "settle":
                    self._settle(call, result)
                case "fail":
                    self._fail(call)
                case "fail cancelled":
                    self._fail_cancelled(call)
                case "hold":
                    self._after(_SUSPICION, "release", call)
                case "post cancel":
                    self._post_cancel(call)
                case "post recall":
                    self._post_recall(call)
                case "count attempt":
                    self._count_attempt(call)
                case "queue again":
                    self._queue_again(call)
                case _:
                    assert_never(action)
        return True

    def _leave(self, call: Call, result: Returned | None) -> None:
        del self.calls[call.id]
        self.yielding.pop(call.id, None)
        self.dispatch.remove(call, result.seconds if result is not None else None)
        self.settled += 1 if call.chunk is None else call.chunk.items
        if call.needs:
            self.kept.left(call)

    def _cancel(self, call: Call, why: str) -> None:
        if (call.state, "cancel") in CALLS and call.id in self.calls:
            call.stopping = why
            self._step(call, "cancel")

    def _lose(self, call: Call, reason: str) -> None:
        again = call.attempt < call.retries and call.stream is None and not call.pinned and not self.closing
        node = -1 if call.node is None else call.node
        lost = NodeLost(node, call.name, reason, call.attempt + 1, call.pinned)
        if again and call.state != "stopping":
            text = f"{call.name} was lost with node {node} ({reason}); "
            self._warn(text + f"retry {call.attempt + 1} of {call.retries} follows.")
        self._step(call, "lost" if again else "lost for good", (lost, "lost", 0.0))

    def _at(self, number: int, call_id: str) -> Call | None:
        """None unless that node has it: a lost node may report calls that others have."""
        call = self.calls.get(call_id)
        return call if call is not None and call.node == number else None

    def _doubted(self, call: Call, in_doubt: Callable[[int], bool]) -> bool:
        return call.node is not None and call.id in self.calls and in_doubt(call.node)

    def _after(self, seconds: float, event: str, call: Call) -> None:
        heapq.heappush(self._timers, (self._now + seconds, next(self._count), event, call))

    def _ask(self, connected: Callable[[int], bool]) -> None:
        for number, calls in unheard_of(self.calls.values(), connected, self._now).items():
            for call in calls:
                call.asked, call.heard = True, self._now
            ids = [call.id for call in calls]
            asks: list[Message] = [ClientToAgent.Ask(ids[at : at + _ASKED]) for at in range(0, len(ids), _ASKED)]
            self._out.append(Post(number, asks))

    def _dispatched(self) -> list[Action]:
        if self.kept.out:
            self._follow()
        batches: dict[int, list[Call]] = {}
        for number, call in self.dispatch.next(self._now):
            batches.setdefault(number, []).append(call)
        for batch in batches.values():
            for call in batch:
                self._step(call, "send")
        return self._taken()

    def _taken(self) -> list[Action]:
        if self.kept.out:
            self._follow()
        out, self._out = self._out, []
        return out

    # what the table's actions are

    def _post_call(self, call: Call) -> None:
        call.header["attempt"] = call.attempt
        call.future.sent = True
        call.heard, call.asked = self._now, False
        number = call.node
        assert number is not None
        if call.uploads:
            self._out.append(Load(number, call.uploads))
        header, pieces = self._given(call) if call.needs or call.keeps else (call.header, call.pieces)
        message = Run(call.id, header, pieces)
        last = self._out[-1] if self._out else None
        if isinstance(last, Post) and last.node == number and isinstance(last.messages[-1], Run):
            last.messages.append(message)  # calls for one node share a frame
        else:
            self._out.append(Post(number, [message]))
        if call.inputs:
            self._out.append(Feed(call, number))

    def _post_recall(self, call: Call) -> None:
        assert call.node is not None
        self._out.append(Post(call.node, [Recall(call.id)]))

    def _post_cancel(self, call: Call) -> None:
        assert call.node is not None
        self.dispatch.stop(call)
        call.heard, call.asked = self._now, False  # an answer that is on its way was given before this
        message = ClientToAgent.Cancel(call.id, call.stopping or "cancelled", _STOP_GRACE)
        self._out.append(Post(call.node, [message]))

    def _count_attempt(self, call: Call) -> None:
        call.attempt, call.made = call.attempt + 1, self._now
        call.announced = False

    def _queue_again(self, call: Call) -> None:
        self.dispatch.remove(call)
        call.node = call.rank = None
        self._enqueue(call, first=True)

    def _settle(self, call: Call, result: Returned | None) -> None:
        assert result is not None
        self._tell_end(call, outcomes.returned(call, result))
        if call.needs or call.keeps:
            self._ended_well(call, result.blobs)
        self._out.append(Settle(call, result))

    def _fail_cancelled(self, call: Call) -> None:
        call.failure = (CancelledError(), "cancelled", 0.0)
        self._fail(call)

    def _fail(self, call: Call) -> None:
        error, outcome, seconds = call.failure or (SkywardError(f"{call.name} has failed."), "error", 0.0)
        call.failure = None
        others = [c for c in call.gang if c.id in self.calls]
        if call.gang and call.stopping is None:
            error.add_note(outcomes.gang_note(call, others, self.ranks.many))
        for other in others:
            other.cause = other.cause or (error if call.stopping is None else None)
            self._cancel(other, "gang")
        self._tell_end(call, outcomes.failed(call, outcome, seconds, error), error)
        self.kept.failed(call, error)
        self._out.append(Fail(call, error))

    def follow_kept(self, now: float) -> list[Action]:
        """What follows from a change to `kept`."""
        self._now = now
        return self._dispatched()

    def _take(self, call: Call) -> None:
        self.calls[call.id] = call
        if call.yields:
            self.yielding[call.id] = call
        if call.needs or call.keeps is not None:
            self.kept.submitted(call)

    def _enqueue(self, call: Call, *, first: bool = False) -> None:
        if call.id not in self.calls:
            return  # it has ended meanwhile
        if call.needs:
            if (lacking := self.kept.trouble(call)) is not None and lacking.error is not None:
                self._step(call, "argument lost", (outcomes.of_argument(call, lacking), "error", 0.0))
                return
            if self.kept.block(call):
                return
            call.prefers, patience = self.kept.preference(call)
            call.until = call.until or self._now + patience
        self.dispatch.add(call, first=first)

    def _lose_kept(self, number: int, reason: str) -> None:
        self.kept.lose_node(number, reason)
        for call in self.dispatch.waiting():
            if call.needs:
                self.dispatch.remove(call)
                self._enqueue(call)

    def _given(self, call: Call) -> tuple[Header, list[Any]]:
        if call.keeps is not None and call.node is not None:
            call.keeps.told.add(call.node)
        if not call.needs:
            return call.header, call.pieces
        header, pieces, fetches = self.kept.filled(call)
        self._out += fetches
        return header, pieces

    def _ended_well(self, call: Call, blobs: Blobs) -> None:
        if call.node is not None:
            self.kept.seen(call, call.node)
            if call.keeps is not None:
                again = call.attempt < call.retries and not call.pinned
                self.kept.made(call, call.node, blobs, again=again)

    def _call_back(self, number: int, result: KeptResult) -> None:
        for call in self.dispatch.at(number):
            if call.announced or result not in call.needs:
                continue
            if call.movable:
                self._step(call, "recall")
            else:
                self._post_cancel(call)
                lost = result.error or RefLost(result.name, result.node, "its node was lost")
                self._step(call, "failure", (lost, "lost", 0.0))

    def _follow(self) -> None:
        while actions := self.kept.take():
            for action in actions:
                match action:
                    case Unblock():
                        self._enqueue(action.call)
                    case MakeAgain():
                        self.calls[action.call.id] = action.call
                        self._enqueue(action.call, first=True)
                    case Unwanted():
                        self._cancel(action.call, "cancelled")
                    case CallBack():
                        self._call_back(action.node, action.result)
                    case _:
                        self._out.append(action)

    def _tell_started(self, call: Call) -> None:
        if not call.announced and call.node is not None:
            call.announced = True
            begun = (call.id, call.name, call.node, call.attempt, self._rank(call), call.arguments)
            self._emit(events.CallStarted(self._pool, *begun, *call.sending(self._now)))

    def _tell_end(self, call: Call, end: outcomes.End, error: BaseException | None = None) -> None:
        ended: Any = outcomes.told(call, self._rank(call), end, self._now)
        if end[0] != "ok":
            if end[0] in _OF_THE_BODY and call.stopping in (None, "stalled"):
                self._out.append(KeepFailed(call, ended, error))
            event = events.CallEnded(self._pool, *ended)
            self.failed, self.undone = self.failed + event.failed, self.undone + event.items - event.done
        listening: Any = self._listening()
        if not listening:
            return
        if listening is True:
            self._tell_started(call)
            self._emit(events.CallEnded(self._pool, *ended))
        else:
            self._out.append(RecordEnd(listening, ended))

    def _rank(self, call: Call) -> int | None:
        return call.rank if self.ranks.many else call.node

    def _warn(self, text: str) -> None:
        self._emit(events.Notice(self._pool, text, "warning"))

    def _emit(self, event: events.Event) -> None:
        self._out.append(Emit(event))
