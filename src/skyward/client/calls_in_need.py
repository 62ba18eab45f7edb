"""The part of `ClientCalls` that has calls wait for results of others: kept ones, and calls that are arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from skyward.client import outcomes
from skyward.errors import RefLost

if TYPE_CHECKING:
    from skyward.client.call import Call
    from skyward.client.dispatch import Dispatch
    from skyward.client.kept import Kept, KeptResult

__all__ = ["CallsInNeed"]

Action = tuple[Any, ...]


class CallsInNeed:
    """Tells `Kept` what happens to calls, and does with calls what it says."""

    if TYPE_CHECKING:
        calls: dict[str, Call]
        dispatch: Dispatch[Call]
        kept: Kept
        _now: float
        _out: list[Action]

        def _step(self, call: Call, event: str, failure: Any = None, result: Any = None) -> bool: ...
        def _cancel(self, call: Call, why: str) -> None: ...
        def _post_cancel(self, call: Call, _: Any = None) -> None: ...
        def _settled(self) -> list[Action]: ...

    def keep(self, event: str, *about: Any, now: float) -> list[Action]:
        """Something has happened to a kept result: an event of `Kept`, with what it takes."""
        self._now = now
        getattr(self.kept, event)(*about)
        return self._settled()

    def _take(self, call: Call) -> None:
        self.calls[call.id] = call
        if call.needs or call.keeps is not None:
            self.kept.submitted(call)

    def _enqueue(self, call: Call, *, first: bool = False) -> None:
        """A call waits for a node, once all results that it takes are there."""
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
        """A node is gone with what it kept: calls that no node has got wait for it, if it is made again."""
        self.kept.lose_node(number, reason)
        for call in self.dispatch.waiting():
            if call.needs:
                self.dispatch.settle(call)
                self._enqueue(call)

    def _given(self, call: Call) -> tuple[dict[str, Any], list[Any]]:
        """What a call is sent with: what it takes is known only now."""
        if call.keeps is not None and call.node is not None:
            call.keeps.told.add(call.node)
        if not call.needs:
            return call.about, call.pieces
        about, pieces, fetches = self.kept.filled(call)
        self._out += fetches
        return about, pieces

    def _ended_well(self, call: Call, about: dict[str, Any]) -> None:
        """A call that takes kept results, or makes one, has returned."""
        if call.node is not None:
            self.kept.seen(call, call.node)
            if call.keeps is not None:
                again = call.attempt < call.retries and not call.pinned
                self.kept.made(call, call.node, about, again=again)

    def _call_back(self, number: int, result: KeptResult) -> None:
        """Calls that wait on a node for a result that does not come there begin when it was made again, if it is."""
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
        """Does what follows from what has happened to kept results."""
        while actions := self.kept.take():
            for action in actions:
                if action[0] == "unblock":
                    self._enqueue(action[1])
                elif action[0] == "make again":
                    self.calls[action[1].id] = action[1]
                    self._enqueue(action[1], first=True)
                elif action[0] == "unwanted":
                    self._cancel(action[1], "cancelled")
                elif action[0] == "call back":
                    self._call_back(*action[1:])
                else:
                    self._out.append(action)
