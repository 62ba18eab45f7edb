"""What runners print, on its way to the client: with the call that wrote it, and the local rank of its process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyward.node.agent_tables import Slot
from skyward.node.client_link import ClientLink
from skyward.node.protocol import AgentToClient
from skyward.node.runners import Pipe, RunnerProcess

__all__ = ["OutputRelay"]

_LIMIT_ALONE = 64 << 20


class OutputRelay:
    """Tells the client what the runners in `slots` have written; `mark` separates calls in a pipe."""

    def __init__(self, home: ClientLink, slots: Mapping[str, Slot], mark: bytes) -> None:
        self._home, self._slots, self._mark = home, slots, mark
        self._dropped = 0

    def written(self, runner: RunnerProcess, pipe: Pipe, data: bytes) -> None:
        """A runner has written to stdout or stderr."""
        slot = self._slots.get(runner.name)
        place = slot.place if slot is not None else 0
        if not self._home.connected and self._home.kept_bytes > _LIMIT_ALONE:
            self._dropped += len(data)  # a body does not wait for a client that is away; the loss is told
            return
        if self._dropped:
            note = f"\n... {self._dropped:,} bytes of output were dropped while the client was away ...\n".encode()
            self._home.tell(AgentToClient.out(pipe.stream, None, place, 1), [note])
            self._dropped = 0
        if runner.threads > 1:
            self._home.tell(AgentToClient.out(pipe.stream, None, place, 1), [data])
            return
        first = next(iter(slot.calls), None) if slot is not None else None
        for call, piece in pipe.take_apart(data, self._mark):
            # without a mark it is of the call that came when the runner had nothing else
            known = call if slot is not None and call in slot.calls else first
            self._home.tell(AgentToClient.out(pipe.stream, known, place, 1), [piece])

    def said(self, runner: RunnerProcess, stream: str, call: str | None, buffers: list[Any]) -> None:
        """A runner whose threads share its pipes has sent what one of them wrote."""
        slot = self._slots.get(runner.name)
        place = slot.place if slot is not None else 0
        self._home.tell(AgentToClient.out(stream, call, place, len(buffers)), buffers)
