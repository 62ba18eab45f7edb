"""The calls of one runner: which wait for a thread, which run, which are to end.

No thread, socket or signal here: `RunnerCalls` is told what happens, under its owner's lock, and says what it means.
Whether a call is begun or given back is decided in one place, on the call itself, so that it is never both.
"""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

__all__ = ["CALLS", "RunnerCalls", "RunnerState"]

Row = tuple[str, tuple[str, ...]]

CALLS: dict[tuple[str, str], Row] = {
    # waits for a thread
    ("waiting", "claim"): ("running", ("write status", "start body")),
    ("waiting", "recall"): ("gone", ("tell recalled",)),
    ("waiting", "cancel"): ("gone", ("tell recalled",)),
    ("waiting", "leave"): ("gone", ("tell recalled",)),
    # its body runs
    ("running", "cancel"): ("stopping", ("leave", "interrupt body")),
    ("running", "end"): ("gone", ("tell verdict",)),
    # its body was interrupted: the process begins no other body
    ("stopping", "end"): ("gone", ("tell verdict",)),
}


class RunnerState(Protocol):
    """What a runner keeps of a call."""

    id: str
    state: str


C = TypeVar("C", bound=RunnerState)


class RunnerCalls(Generic[C]):
    """Not thread-safe: its owner holds a lock."""

    def __init__(self) -> None:
        self.calls: dict[str, C] = {}
        self.leaving = False
        """Whether a body was broken off here: no other may begin in this process."""

    def add(self, call: C) -> bool:
        """A call has come; False if none begins here any more, and the agent is told so already."""
        call.state = "waiting"
        if self.leaving:
            return False
        self.calls[call.id] = call
        return True

    def claim(self, call: C) -> bool:
        """A thread wants to begin a call; False if it was given back, or if nothing begins here any more."""
        return self._step(call, "claim") is not None

    def recall(self, call_id: str) -> bool:
        """The agent wants a call back; True if it has not begun, and never will."""
        call = self.calls.get(call_id)
        return call is not None and self._step(call, "recall") is not None

    def cancel(self, call_id: str) -> tuple[C | None, list[str]]:
        """A call is to end: the one to interrupt, if it runs; and the calls that go back to the agent."""
        call = self.calls.get(call_id)
        actions = self._step(call, "cancel") if call is not None else None
        if call is None or actions is None:
            return None, []
        if "leave" not in actions:
            return None, [call.id]
        self.leaving = True
        waiting = [other for other in list(self.calls.values()) if self._step(other, "leave") is not None]
        return call, [other.id for other in waiting]

    def end(self, call: C) -> None:
        """A body has ended."""
        self._step(call, "end")

    def running(self) -> list[C]:
        """The calls whose bodies run."""
        return [call for call in list(self.calls.values()) if call.state != "waiting"]

    def _step(self, call: C, event: str) -> tuple[str, ...] | None:
        """Moves a call along its table; None if the event changes nothing in its state."""
        row = CALLS.get((call.state, event))
        if row is None:
            return None
        call.state = row[0]
        if call.state == "gone" and self.calls.get(call.id) is call:
            del self.calls[call.id]
        return row[1]
