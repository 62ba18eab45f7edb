"""What becomes of a detached run: a table that knows no clock, process or socket. `node/steward.py` is its shell.

held ──go──► running ──exited──► holding ──over──► over
  │            │ ▲  └─exited, restarts left─┘ (a new epoch)
  │            └─stop, deadline──► stopping ──exited──► holding
  └─stop, deadline, nobody says go──► over
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

__all__ = ["Act", "Action", "Event", "Run", "State"]

State = Literal["held", "running", "stopping", "holding", "over"]
Act = Literal["write", "raise epoch", "start driver", "stop driver", "kill driver", "end others", "copy", "end all"]


@dataclass(frozen=True)
class Action:
    act: Act
    why: str = ""
    code: int = 0


@dataclass(frozen=True)
class Event:
    """`late`: no `go` came. `grace`, `hold`: that time is over."""

    kind: Literal["go", "exited", "stop", "deadline", "late", "grace", "hold"]
    code: int = 0


@dataclass(frozen=True)
class Run:
    state: State = "held"
    restarts: int = 0
    """How many more times a failing driver is started."""
    why: str = ""

    def step(self, event: Event) -> tuple[Run, tuple[Action, ...]]:
        """An event that a state has no row for changes nothing."""
        match self.state, event.kind:
            case "held", "go":
                return replace(self, state="running"), (Action("write", "started"), Action("start driver"))
            case "held", "stop" | "deadline" | "late":
                return replace(self, state="over"), (Action("write", event.kind), Action("end all"))
            case "running", "exited" if event.code and self.restarts:
                # the old processes are gone before anybody hears of the new epoch
                acts = "kill driver", "raise epoch", "start driver"
                again = replace(self, restarts=self.restarts - 1)
                return again, (Action("write", "restarted", event.code), *map(Action, acts))
            case "running", "exited":
                return self._ended("exited", event.code)
            case "running", "stop" | "deadline":
                return replace(self, state="stopping", why=event.kind), (
                    Action("write", f"stopping: {event.kind}"),
                    Action("stop driver"),
                )
            case "stopping", "exited":
                return self._ended(self.why, event.code)
            case "stopping", "grace":
                return self, (Action("kill driver"),)
            case "holding", "hold" | "stop" | "deadline":
                return replace(self, state="over"), (Action("end all"),)
            case _:
                return self, ()

    def _ended(self, why: str, code: int) -> tuple[Run, tuple[Action, ...]]:
        """What the program left behind is killed before its end is written: it changes no results afterwards."""
        acts = Action("kill driver"), Action("write", f"ended: {why}", code), Action("end others"), Action("copy")
        return replace(self, state="holding"), acts
