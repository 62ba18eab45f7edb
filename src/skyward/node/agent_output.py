"""Runner output on its way to the client, with its call and local rank.

passing ──more than a window unacknowledged──► holding: pipes are not read, so bodies block in print
   ▲                                              │ for longer than PATIENCE
   └────────half of a window is free─────────  thinning: output is dropped, and the amount is reported
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from skyward.node.agent_slots import Slot
from skyward.node.client_link import ClientLink
from skyward.node.protocol import AgentToClient, ClientToAgent, output_cost
from skyward.node.runners import Pipe, RunnerProcess, Stream
from skyward.transport.codec import Buffers, handles

__all__ = ["OutputRelay"]

_KEPT = 8 << 20
_LIMIT_ALONE = 32 << 20
_PATIENCE = 5.0
_WINDOW = 8 << 20


class OutputRelay:
    """`mark` separates calls in a pipe."""

    home: ClientLink

    def __init__(self, slots: Mapping[str, Slot], mark: bytes, clock: Callable[[], float]) -> None:
        self._slots, self._mark, self._clock = slots, mark, clock
        self.window = _WINDOW
        """Bytes that may be unacknowledged."""
        self._under_way = 0
        self._held: float | None = None  # since when bodies wait
        self._thinning = False
        self._left_out = self._lines = 0  # bytes and lines that were not told
        self._why = ""

    def full(self) -> bool:
        """Called once per turn."""
        connected = self.home.connected
        behind = connected and (self._under_way > self.window or self.home.kept_bytes > _KEPT)
        if self._thinning and connected and self._under_way <= self.window // 2 and self.home.kept_bytes <= _KEPT // 2:
            self._thinning = False
        if not behind or self._thinning:
            self._held = None
            return False
        if self._held is None:
            self._held = self._clock()
        if self._clock() - self._held > _PATIENCE:
            self._thinning, self._held = True, None
        return not self._thinning

    def fence(self) -> None:
        self._under_way = self._left_out = self._lines = 0
        self._thinning, self._held = False, None

    @handles(ClientToAgent.Taken)
    def _taken(self, message: ClientToAgent.Taken) -> None:
        self._under_way = max(0, self._under_way - message.size)

    def written(self, runner: RunnerProcess, pipe: Pipe, data: bytes) -> None:
        slot = self._slots.get(runner.name)
        place = slot.place if slot is not None else 0
        if runner.threads > 1:
            self._tell(pipe.stream, None, place, data)
            return
        first = next(iter(slot.calls), None) if slot is not None else None
        for call, piece in pipe.take_apart(data, self._mark):
            # without a mark it is of the call that came when the runner had nothing else
            known = call if slot is not None and call in slot.calls else first
            self._tell(pipe.stream, known, place, piece)

    def said(self, runner: RunnerProcess, stream: Stream, call: str | None, buffers: Buffers) -> None:
        slot = self._slots.get(runner.name)
        for data in buffers:
            self._tell(stream, call, slot.place if slot is not None else 0, data)

    def say_left_out(self, stream: Stream = "stderr", call: str | None = None, place: int = 0) -> None:
        if self._left_out:
            lines, size, self._lines, self._left_out = self._lines, self._left_out, 0, 0
            note = f"\n... {lines:,} lines ({size:,} bytes) of output are omitted here: {self._why} ...\n".encode()
            self._pass_on(stream, call, place, note)

    def _tell(self, stream: Stream, call: str | None, place: int, data: Any) -> None:
        self._why = self._excess() or self._why
        if self._excess():
            self._left_out += len(data)
            self._lines += bytes(data).count(b"\n")
            return
        self.say_left_out(stream, call, place)
        self._pass_on(stream, call, place, data)

    def _excess(self) -> str:
        if not self.home.connected:
            return "the client was away" if self.home.kept_bytes > _LIMIT_ALONE else ""
        if self._thinning or self._under_way > 2 * self.window:
            return "they came faster than the client's listeners, or the network, could take them"
        return ""

    def _pass_on(self, stream: Stream, call: str | None, place: int, data: Any) -> None:
        self._under_way += output_cost(len(data))
        self.home.tell(AgentToClient.Out(stream, call, place, [data]))
