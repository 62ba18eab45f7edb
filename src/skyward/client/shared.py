"""The client's part in shared collections: asks the server on node 0, and relays for nodes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from skyward.errors import SharedLost
from skyward.node.protocol import ClientToAgent, Share
from skyward.transport.codec import Message, Raw, handles
from skyward.transport.frames import Malformed

if TYPE_CHECKING:  # imported when a collection is used
    from skyward.node.shared.channel import Channel

__all__ = ["ClientShared"]

_CLIENT = "client"
_CLOSED = "the pool is closed, and its shared collections with it."


class ClientShared:
    """`post` sends messages to one of `nodes`. `gone` says why node 0 was given up."""

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
        "this operation was done is not known. Asking again works when it is back."
    )
