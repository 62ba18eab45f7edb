"""The part of `ClientCalls` that tells of calls: that they begin and end, and what the user is warned of."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from skyward import events
from skyward.client import outcomes

if TYPE_CHECKING:
    from skyward.api.ranks import Ranks
    from skyward.client.call import Call

__all__ = ["CallsTold"]


class CallsTold:
    """Makes events for those who listen; a history that alone is kept gets the bare facts of a call that has ended."""

    if TYPE_CHECKING:
        ranks: Ranks
        failed: int
        undone: int
        _now: float
        _pool: str
        _listening: Callable[[], object]
        _out: list[tuple[Any, ...]]

    def _tell_started(self, call: Call) -> None:
        if not call.announced and call.node is not None:
            call.announced = True
            begun = (call.id, call.name, call.node, call.attempt, self._rank(call), call.arguments)
            self._emit(events.CallStarted(self._pool, *begun, *call.sending(self._now)))

    def _tell_end(self, call: Call, end: outcomes.End) -> None:
        ended: Any = outcomes.told(call, self._rank(call), end, self._now)
        if end[0] != "ok":
            event = events.CallEnded(self._pool, *ended)
            self.failed, self.undone = self.failed + event.failed, self.undone + event.items - event.done
        listening = self._listening()
        if not listening:
            return
        if listening is True:
            self._tell_started(call)
            self._emit(events.CallEnded(self._pool, *ended))
        else:
            self._out.append(("record", listening, ended))

    def _rank(self, call: Call) -> int | None:
        return call.rank if self.ranks.many else call.node

    def _warn(self, text: str) -> None:
        self._emit(events.Notice(self._pool, text, "warning"))

    def _emit(self, event: events.Event) -> None:
        self._out.append(("emit", event))
