"""A detached run, as whoever looks at it sees it: status, output, its end. Looking never disturbs it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from skyward.errors import InvalidArgument, SkywardError
from skyward.history import runs
from skyward.node import run_folder
from skyward.node.run_folder import JOURNAL, OUTPUT
from skyward.pool import run_record
from skyward.transport import journal

__all__ = ["Run", "RunStatus"]

_LOOK = 0.2
_STOPPING = 60.0

Stage = Literal["submitting", "running", "stopping", "finished", "failed", "stopped", "expired", "lost"]


@dataclass(frozen=True)
class RunStatus:
    """What is known of a run at a moment; times are seconds since 1970."""

    stage: Stage
    """`expired`: its time or its budget was over. `lost`: its steward or machine is gone, and no end was written."""
    code: int | None = None
    """The program's exit status, when it has ended."""
    began: float | None = None
    ended: float | None = None
    until: float | None = None
    """When it ends at the latest."""
    restarts: int = 0
    """How often its program was started again."""

    @property
    def over(self) -> bool:
        return self.stage not in ("submitting", "running", "stopping")


class Run:
    """A detached run of this computer, by its name; see `sky.attach`."""

    def __init__(self, name: str) -> None:
        self.name, self._record = name, run_record.find(name)

    def __repr__(self) -> str:
        return f"<Run {self.name} {self.status.stage}>"

    @property
    def about(self) -> dict[str, Any]:
        """Its program, pool and provider, as they were submitted."""
        return self._record.facts["submitted"]

    @property
    def status(self) -> RunStatus:
        if "handed" not in self._record.facts:
            self._record = run_record.find(self.name)
        if "handed" not in self._record.facts:
            return RunStatus("submitting" if runs.find(self.name).in_use else "lost")
        found = self._status()
        # its steward may have ended after the journal was read
        return self._status() if found.stage == "lost" else found

    def _status(self) -> RunStatus:
        facts = self._journal()
        first = {fact["fact"]: fact for fact in reversed(facts)}
        last = {fact["fact"]: fact for fact in facts}
        began, until = first.get("started", {}).get("time"), last.get("head", {}).get("until")
        made = partial(RunStatus, began=began, until=until, restarts=sum(f["fact"] == "restarted" for f in facts))
        if "ended" in last:
            why, code = last["ended"]["why"], last["ended"]["code"]
            stages: dict[str, Stage] = {"stop": "stopped", "deadline": "expired"}
            stage = stages.get(why, "finished" if code == 0 else "failed")
            return made(stage, code, ended=last["ended"]["time"])
        if never := next((last[word] for word in ("stop", "deadline", "late") if word in last), None):
            return made("stopped" if "stop" in last else "expired", ended=never["time"])
        answer = self._ask({"do": "status"})
        if answer is None:
            return made("lost")
        return made("stopping" if answer["state"] == "stopping" else "running")

    def output(self, offset: int = 0) -> Iterator[bytes]:
        """What its program has printed so far, from a byte on, in pieces."""
        while piece := run_folder.piece(self._folder, OUTPUT, offset):
            offset += len(piece)
            yield piece

    def follow(self, offset: int = 0) -> Iterator[bytes]:
        """The same until the run is over."""
        while True:
            over = self.status.over
            for piece in self.output(offset):
                offset += len(piece)
                yield piece
            if over:
                return
            time.sleep(_LOOK)

    def wait(self, timeout: float | None = None) -> RunStatus:
        """Its status when it is over; TimeoutError if it is not within `timeout` seconds."""
        limit = None if timeout is None else time.monotonic() + timeout
        while not (status := self.status).over:
            if limit is not None and time.monotonic() > limit:
                raise TimeoutError(f"the run {self.name} is {status.stage} after {timeout:g} s.")
            time.sleep(_LOOK)
        return status

    def stop(self) -> RunStatus:
        """Ends it: its program is told (SIGTERM), then killed after the pool's grace; machines are released."""
        if not self.status.over and self._ask({"do": "stop"}) is None and not self.status.over:
            raise SkywardError(f"the steward of {self.name} does not answer. Its machines end by themselves.")
        return self.wait(_STOPPING)

    def check_over(self) -> None:
        """Raises unless it is over: only then may it be forgotten."""
        if not self.status.over:
            raise InvalidArgument(f"the run {self.name} is not over. Stop it first: `sky stop {self.name}`.")

    @property
    def seen(self) -> int:
        """How much of its output was shown on this computer, in bytes."""
        return self._record.seen

    @seen.setter
    def seen(self, offset: int) -> None:
        self._record.seen = offset

    @property
    def _folder(self) -> str:
        return str(self._record.facts.get("handed", {}).get("folder", ""))

    def _journal(self) -> list[dict[str, Any]]:
        content = b""
        while piece := run_folder.piece(self._folder, JOURNAL, len(content)):
            content += piece
        return journal.read(content)[0]

    def _ask(self, question: dict[str, Any]) -> dict[str, Any] | None:
        try:
            return run_folder.ask(self._record.facts["handed"]["socket"], question)
        except (OSError, ValueError):
            return None
