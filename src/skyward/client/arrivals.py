"""What nodes send: results, items of streams, output, parts of large buffers, questions about shared collections."""

from __future__ import annotations

import threading
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
from skyward.errors import SharedLost
from skyward.node.logs import parsed
from skyward.node.protocol import (
    NO_BLOBS,
    AgentToClient,
    ClientToAgent,
    Files,
    Grant,
    Returned,
    Share,
    Verdict,
    output_cost,
)
from skyward.node.settings import MARK
from skyward.transport.blobs import key_of
from skyward.transport.codec import Message, Raw, handles
from skyward.transport.frames import Malformed
from skyward.transport.records import replace
from skyward.transport.streams import Consumer, Stream

if TYPE_CHECKING:
    from skyward.client.call import Call
    from skyward.client.core import Core
    from skyward.node.shared.channel import Channel

__all__ = ["Arrivals", "ClientShared", "StreamActions"]

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


_CLIENT = "client"
_CLOSED = "the pool is closed, and its shared collections with it."


class ClientShared:
    """Asks the server of shared collections on node 0, and relays for nodes.

    `post` sends messages to one of `nodes`. `gone` says why node 0 was given up.
    """

    def __init__(self, post: Callable[[int, list[Message]], None], nodes: int, gone: Callable[[], str]) -> None:
        self._post_to, self._nodes, self._gone = post, nodes, gone
        self._lock = threading.Lock()  # over the making of the channel
        self._channel: Channel | None = None
        self._opened = False

    def channel(self) -> Channel:
        if self._channel is None:
            from skyward.node.shared.channel import Channel, pack_value, unpack_value
            from skyward.transport.payload import Packer

            with self._lock:
                packer = Packer()
                self._channel = self._channel or Channel(
                    self._post,
                    lambda value, what: pack_value(packer, value, what),
                    lambda data: unpack_value(data, keep_classes=True),
                )
        return self._channel

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close(_CLOSED)

    def lost(self, node: int, rank: int | None, reason: str) -> None:
        """With `rank` None the whole node is lost or was restarted."""
        head = node == 0 and rank is None
        messages: list[Message] = [ClientToAgent.Lost(node, rank, reason)]
        if head and self._gone():
            messages.insert(0, ClientToAgent.Head(None))  # from now on others ask us, until it is back
        for other in range(1, self._nodes) if head else [0]:
            self._post_to(other, messages)
        if head:
            self._opened = False
            if self._channel is not None:
                self._channel.fail("lost", _lost(reason))

    def _post(self, message: Raw, values: list[Any]) -> None:
        if gone := self._gone():  # who asks is known to the channel by now: if it is lost from here on, that is told
            raise SharedLost(_lost(gone))
        messages: list[Message] = [Share(_CLIENT, message, values)]
        if not self._opened:
            self._opened = True
            messages.insert(0, Share(_CLIENT, ["open", "the client", None, 0], []))
        self._post_to(0, messages)

    @handles(Share)
    def asked(self, share: Share, number: int, now: float) -> None:
        asker, message = share.asker, share.message
        if number == 0 and asker == _CLIENT:
            if self._channel is not None:
                self._channel.receive(message, share.buffers)
            return
        # of a runner whose node cannot reach node 0, or the answer to it
        node = asker.partition("/")[0]
        to = int(node) if number == 0 and node.isdecimal() and len(node) < 9 else 0
        if (number == 0 and not 0 < to < self._nodes) or (number != 0 and node != str(number)):
            raise Malformed(f"node {number} asks for {asker[:80]!r}, which is not one of its processes")
        if to == 0 and (gone := self._gone()):
            if message[0] == "ask":
                from skyward.node.shared.protocol import ServerToAsker

                answer = ServerToAsker.Answer(message[1], "", "lost", _lost(gone), [])
                self._post_to(number, [Share(asker, *answer.encoded())])
            return
        self._post_to(to, [share])


def _lost(reason: str) -> str:
    return (
        f"node 0, which keeps the shared collections of the pool, is lost ({reason}): all are empty now, and whether "
        "this operation was done is not known. Try it again when node 0 is back."
    )
