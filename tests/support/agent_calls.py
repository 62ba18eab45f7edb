"""Drives a real AgentCalls through real events, for the tests of its tables and of its behaviour."""

from __future__ import annotations

from typing import Any

from skyward.node.agent_calls import AgentCalls
from skyward.node.agent_slots import Action, Kill, NodeCall, Send, Tell
from skyward.node.protocol import Exited, Raised, Returned, Stopped, Verdict
from skyward.transport.exceptions import Described

__all__ = ["GRACE", "LIMIT", "Bench", "effects_on"]

GRACE, LIMIT = 3.0, 5.0
ERROR: Described = {"type": "ValueError", "message": "no", "traceback": "ValueError: no\n"}

_SENT = {"call": "send call", "recall": "send recall", "cancel": "send cancel"}
_TOLD = {
    "started": "tell started",
    "recalled": "tell recalled",
    "crashed": "tell crashed",
    "lost": "tell lost",
    **dict.fromkeys(("cancelled", "timeout", "gang"), "tell stopped"),
    **dict.fromkeys(("done", "error", "exited", "noroom"), "tell verdict"),
}


def effects_on(call: NodeCall, actions: list[Action]) -> set[str]:
    """What the agent is to do about a call, in the words of the table."""
    found: set[str] = set()
    for action in actions:
        match action:
            case Send(_, message) if (raw := message.encoded()[0])[1:2] == [call.id]:
                found.add(_SENT[raw[0]])
            case Tell(message) if (raw := message.encoded()[0])[1] == call.id:
                found.add(_TOLD[raw[0]])
            case Kill():
                found.add("kill process")
            case _:
                pass
    return found


class Bench:
    """A node with its runners, at a time of its own; `did` is what the last event had the agent do."""

    def __init__(
        self,
        processes: int = 1,
        threads: int = 1,
        hooks: bool = False,
        ready: bool = True,
        places: int = 1,
        ready_within: float = 300.0,
    ) -> None:
        self.calls = AgentCalls()
        self.now = 100.0
        self._shape = (processes, threads, hooks, places)
        self._generation, self._ready_within = 0, ready_within
        self.did: list[Action] = []
        self.setup()
        if ready:
            for name in list(self.calls.slots):
                self.did += self.calls.ready(name, self.now)

    def setup(self) -> list[Action]:
        """The client has all runners made (again)."""
        processes, threads, hooks, places = self._shape
        self._generation += 1
        settings = {"processes": processes, "threads": threads, "generation": self._generation, "places": [{}] * places}
        self.did = self.calls.setup(
            {**settings, "grace": GRACE, "shared": True, "ready_within": self._ready_within}, hooks, self.now
        )
        return self.did

    @property
    def names(self) -> list[str]:
        """The runners that there are."""
        return list(self.calls.slots)

    def take(self, call_id: str, missing: set[str] | None = None, **about: Any) -> NodeCall:
        """A call comes from the client."""
        call = NodeCall(call_id, {"name": "f", "attempt": 0, **about}, [b"payload"])
        call.missing = missing or set()
        self.did = self.calls.take(call, self.now)
        return call

    def begin(self, call: NodeCall, *, loading: bool = False) -> list[Action]:
        """Its runner's status page says that a call has begun, and has entered its body unless it is `loading`."""
        assert call.slot is not None
        self.did = self.calls.saw(call.slot.name, [(call.id, self.now, 0.0 if loading else self.now)], self.now)
        return self.did

    def end(self, call: NodeCall, kind: str = "done", seconds: float = 0.1) -> list[Action]:
        """Its runner says that a call has ended."""
        assert call.slot is not None
        kinds: dict[str, Verdict] = {
            "done": Returned(id=call.id, seconds=seconds, buffers=[b"result"]),
            "error": Raised(id=call.id, seconds=seconds, error=ERROR, buffers=[b"error"]),
            "exited": Exited(id=call.id, seconds=seconds, code=3),
            "stopped": Stopped(id=call.id, seconds=seconds),
        }
        self.did = self.calls.ended(call.slot.name, kinds[kind], self.now)
        return self.did

    def give_back(self, call: NodeCall) -> list[Action]:
        """Its runner gives a call back."""
        assert call.slot is not None
        self.did = self.calls.returned(call.slot.name, [call.id], self.now)
        return self.did

    def exit(self, name: str, status: int = -11) -> list[Action]:
        """A runner's process is gone."""
        self.did = self.calls.exited(name, status, "last words", False, self.now)
        return self.did

    def cancel(self, call: NodeCall, why: str = "cancelled") -> list[Action]:
        """The client wants a call to end."""
        self.did = self.calls.cancel(call.id, why, GRACE, self.now)
        return self.did

    def tick(self, seconds: float) -> list[Action]:
        """Time passes."""
        self.now += seconds
        self.did = self.calls.tick(self.now)
        return self.did

    def make_short(self) -> None:
        """A call ends that was so short that others are sent ahead from now on."""
        self.end(self.take("short"), seconds=0.0005)
        assert self.calls.mean == 0.0005

    def messages(self, kind: type[Send | Tell] = Tell) -> list[list[Any]]:
        """The messages to the client (Tell) or to runners (Send) after the last event, without their counts."""
        return [action.message.encoded()[0][:-1] for action in self.did if isinstance(action, kind)]

    def sent(self) -> list[list[Any]]:
        """The kinds and calls of the messages to runners that the last event led to."""
        return [message[:2] for message in self.messages(Send)]
