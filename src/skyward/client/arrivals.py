"""What nodes send: results, items of streams, output, parts of large buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from skyward import events
from skyward.api.secret import hide
from skyward.client.actions import Action, Emit
from skyward.client.call import CallFuture, Packed, discard, is_light, unpacked
from skyward.client.output import Chunk, Transcript, output_window
from skyward.client.settings import PoolSettings
from skyward.client.uploads import Parts, Uploads
from skyward.node.logs import parsed
from skyward.node.protocol import NO_BLOBS, AgentToClient, ClientToAgent, Files, Grant, Returned, Verdict, output_cost
from skyward.node.settings import MARK
from skyward.transport.blobs import key_of
from skyward.transport.codec import Message, handles
from skyward.transport.frames import Malformed
from skyward.transport.records import replace
from skyward.transport.streams import Consumer, Stream

if TYPE_CHECKING:
    from skyward.client.call import Call
    from skyward.client.core import Core

__all__ = ["Arrivals", "StreamActions"]

_MOST_OUTPUT = 128 << 20  # agents keep 32 MiB at most while we are away, and send few windows beyond what was taken


@dataclass(frozen=True)
class StreamActions:
    post: Callable[[int, Sequence[Message]], None]
    closed: Callable[[Call], None]
    defer: Callable[..., None]


class Arrivals:
    def __init__(self, plan: PoolSettings, core: Core, uploads: Uploads, streams: StreamActions) -> None:
        self._plan, self._core, self._uploads, self._streams = plan, core, uploads, streams
        self._parts = Parts(plan.directory)
        self._owed, self._step = [0] * plan.nodes, output_window(plan.nodes) // 8
        self._came, self._heard = [0] * plan.nodes, [0] * plan.nodes  # output in all; each is counted by one thread
        self._transcripts: list[dict[int, Transcript]] = [{} for _ in range(plan.nodes)]  # by node and local rank

    def rest_of_output(self, number: int, id: str | None) -> list[Action]:
        return [Emit(Chunk(partial(self._rest, number, id), _nothing))] if self._transcripts[number] else []

    # in the thread of listeners

    def _rest(self, number: int, id: str | None, wanted: bool) -> list[events.Event]:
        return [
            events.Output(self._plan.pool, number, stream, text, id, progress, self._core.ranks.rank(number, place))
            for place, transcript in list(self._transcripts[number].items())
            for stream, text, progress in transcript.end(id)
        ]

    def _lines(
        self, number: int, stream: Any, id: str | None, rank: int, transcript: Transcript, data: bytes, wanted: bool
    ) -> Iterator[events.Event]:
        for text, progress in transcript.feed(stream, id, data):
            match parsed(text, hide) if text.startswith(MARK) else None:
                case ("log", about):
                    yield events.Log(self._plan.pool, number, **about, call=id, rank=rank)
                case ("warning", about):
                    about["kinds"] = tuple(about["kinds"])
                    yield events.Warned(self._plan.pool, number, **about, call=id, rank=rank)
                case ("progress", about) if wanted:
                    yield events.Progress(self._plan.pool, number, **about, call=id, rank=rank)
                case _ if wanted:
                    line = hide(text) if text.startswith(MARK) else text
                    yield events.Output(self._plan.pool, number, stream, line, id, progress, rank)
                case _:
                    pass

    def _taken(self, number: int, size: int) -> None:
        self._heard[number] += size
        self._owed[number] += size
        if self._owed[number] >= self._step:
            due, self._owed[number] = self._owed[number], 0
            self._streams.post(number, [ClientToAgent.Taken(due)])

    # in the I/O thread

    @handles(Verdict)
    def ended(self, verdict: Verdict, number: int, now: float) -> list[Action]:
        if isinstance(verdict, Returned) and verdict.blobs and verdict.kept is None and not self._plan.local:
            blobs, incomplete = self._parts.placed(verdict.blobs)
            verdict = replace(verdict, blobs=blobs, incomplete=incomplete or verdict.incomplete)
        call = self._core.calls.calls.get(verdict.id)
        if call is None or not call.spoke or call.node != number:  # most print nothing
            return self._core.verdict(verdict, number, now)
        return self.rest_of_output(number, verdict.id) + self._core.verdict(verdict, number, now)

    def _at(self, number: int, id: str | None) -> Call | None:
        """None unless the call is with that node."""
        call = self._core.calls.calls.get(id) if id is not None else None
        return call if call is not None and call.node == number else None

    @handles(AgentToClient.Streaming)
    def streaming(self, message: AgentToClient.Streaming, number: int, now: float) -> None:
        call, actions = self._at(number, message.id), self._streams
        if call is None:
            return
        if call.stream is not None:
            raise Malformed(f"{call.name} streams already")
        consumer = call.stream = Consumer(
            grant=lambda count: actions.post(number, [Grant(call.id, count)]),
            close=lambda: actions.closed(call),
            load=partial(unpacked, call.name),
            is_light=is_light,
        )
        self._core.calls.yielding[call.id] = call
        # the engine keeps the consumer only: when the user lets go of the stream, it closes itself
        future, call.future = call.future, CallFuture(call.name)
        call.future.owner = future.owner
        if future.cancelled():
            actions.defer(consumer.close)
        else:
            actions.defer(future.fulfil, Stream[Any](consumer))

    @handles(AgentToClient.Items)
    def items(self, message: AgentToClient.Items, number: int, now: float) -> None:
        call = self._at(number, message.id)
        stream = call.stream if call is not None else None
        items: list[tuple[Packed, int]] = []
        at = 0
        for item in message.items:
            count, files = (item, _NO_FILES) if isinstance(item, int) else item
            blobs, incomplete = files.get("blobs", NO_BLOBS), files.get("incomplete")
            if blobs and not self._plan.local:
                blobs, lacking = self._parts.placed(blobs)
                incomplete = lacking or incomplete
            if stream is None:
                discard(blobs)
            pieces = list(message.buffers[at : at + count])
            size = sum(piece.nbytes for piece in pieces) + sum(size for _, size in blobs.values())
            items.append((Packed(blobs, pieces, incomplete), size))
            at += count
        if call is not None and stream is not None:
            call.spoke = now
            stream.feed(items)

    @handles(AgentToClient.Want)
    def wanted(self, message: AgentToClient.Want, number: int, now: float) -> None:
        call = self._at(number, message.id)
        if call is not None and message.argument in call.feeders:
            call.feeders[message.argument].grant(message.count)

    @handles(AgentToClient.Out)
    def output(self, message: AgentToClient.Out, number: int, now: float) -> list[Action]:
        actions: list[Action] = []
        id, place = message.id, message.place
        call = self._at(number, id)
        if call is not None:
            actions = self._core.calls.started(number, call.id, place, now)
            call.spoke = now
        else:
            id = None
        rank, transcript = self._core.rank(number, place), self._transcripts[number].setdefault(place, Transcript())
        data = bytes(message.buffers[0])  # a copy: the frame that it came in need not be kept for it
        cost = output_cost(len(data))
        if self._came[number] - self._heard[number] + cost > _MOST_OUTPUT:
            raise Malformed("more output than was taken, by far")
        self._came[number] += cost
        taken = partial(self._taken, number, cost)
        chunk = Chunk(partial(self._lines, number, message.stream, id, rank, transcript, data), taken)
        return [*actions, Emit(chunk)]

    @handles(AgentToClient.Part)
    def part(self, message: AgentToClient.Part, number: int, now: float) -> None:
        self._parts.accept(message.name, message.offset, message.size, message.buffers[0])

    @handles(AgentToClient.Need)
    def need(self, message: AgentToClient.Need, number: int, now: float) -> list[Action]:
        if key_of(message.blob) is not None and not self._uploads.has(message.blob):
            self._core.calls.kept.need(number, message.blob)
            return self._core.calls.follow_kept(now)
        self._uploads.need(number, message.blob)
        return []

    @handles(AgentToClient.Brought)
    def brought(self, message: AgentToClient.Brought, number: int, now: float) -> list[Action]:
        blobs, incomplete = message.files.get("blobs", NO_BLOBS), message.files.get("incomplete")
        if not self._plan.local:
            blobs, lacking = self._parts.placed(blobs)
            incomplete = lacking or incomplete
        self._core.calls.kept.brought(number, message.request, blobs, incomplete)
        return self._core.calls.follow_kept(now)


_NO_FILES: Files = {}


def _nothing() -> None:
    """Nobody waits for it."""
