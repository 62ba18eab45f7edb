"""A node's link to the client, on the agent's own loop. The messages of one turn go in one frame."""

from __future__ import annotations

import logging
import selectors
import socket
from collections.abc import Callable
from typing import Any

from skyward.node.receiver import Message
from skyward.transport.frames import Malformed, encode, nbytes
from skyward.transport.link import Broken, Link

__all__ = ["ClientLink", "hear_link"]

log = logging.getLogger("skyward.engine")

_MOST_ERRORS = 8  # in a frame: their texts are long, and a header has a limit
_MOST_BYTES = 16 << 20


class ClientLink:
    """Keeps what was said until the client has acknowledged it, and has it resent over the next connection."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        about: dict[str, Any],
        obey: Callable[[list[Message], list[Any]], None],
        fence: Callable[[], None],
        incarnation: str,
        clock: Callable[[], float],
    ) -> None:
        self._selector, self._about, self._obey, self._fence = selector, about, obey, fence
        self._incarnation, self._clock = incarnation, clock
        self._session: str | None = None
        self._link = Link(clock)
        self._messages: list[Message] = []
        self._buffers: list[Any] = []
        self._errors = self._size = 0  # of what was told and not sent: errors, and bytes of buffers
        self._decrypted = False  # whether bytes may be there that the selector does not know of
        self._writing = False  # whether the selector says when the socket takes more

    @property
    def connected(self) -> bool:
        """Whether the client is there."""
        return self._link.sock is not None

    @property
    def kept_bytes(self) -> int:
        """How much the client has not acknowledged yet."""
        return self._link.kept_bytes

    @property
    def heard(self) -> float:
        """When the client was last heard of."""
        return self._link.heard

    def attach(self, sock: socket.socket, hello: dict[str, Any]) -> None:
        """The client has connected, perhaps again; a new session means that this node had been given up."""
        if self._link.sock is not None:
            self._selector.unregister(self._link.sock)
            self._link.detach()
        if self._session is not None and hello["session"] != self._session:
            self._messages.clear()
            self._buffers.clear()
            self._errors = self._size = 0
            self._link = Link(self._clock)
            self._fence()
        self._session = hello["session"]
        welcome = {
            "incarnation": self._incarnation,
            "session": self._session,
            "received": self._link.received,
            **self._about,
        }
        try:
            for piece in encode(welcome):
                sock.sendall(piece)
        except OSError:
            sock.close()
            return
        self._link.attach(sock, hello["received"])
        self._selector.register(sock, selectors.EVENT_READ, self.hear)
        self._decrypted, self._writing = True, False

    def hear(self, events: int) -> None:
        """Takes what the client has sent, and sends what it was not ready for."""
        link, sock = self._link, self._link.sock
        if sock is None:
            return
        if events & selectors.EVENT_WRITE:
            link.flush()
        self._decrypted = hear_link(link, self._obey)
        if link.sock is None:
            self._selector.unregister(sock)

    def pending(self) -> bool:
        """Whether there is more to hear at once; asked once a turn."""
        decrypted, self._decrypted = self._decrypted, False
        return decrypted

    def tell(self, message: Message, buffers: list[Any] | None = None) -> None:
        """Sends a message with the next `flush`."""
        self._messages.append(message)
        if buffers:
            self._buffers += buffers
            self._size += sum(map(nbytes, buffers))
        self._errors += message[0] == "error"
        if self._errors >= _MOST_ERRORS or self._size > _MOST_BYTES:
            self.flush()

    def tell_now(self, message: Message, buffers: list[Any] | None = None) -> None:
        """Sends at once, so that what the link holds back is known before the next piece is read."""
        self.tell(message, buffers)
        self.flush()

    def flush(self) -> None:
        """Sends in one frame what was told since the last time."""
        if self._messages:
            messages, self._messages = self._messages, []
            buffers, self._buffers = self._buffers, []
            self._errors = self._size = 0
            self._link.post(messages, buffers)
        if self._link.writing is not self._writing and self._link.sock is not None:
            self._writing = not self._writing
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._writing else 0)
            self._selector.modify(self._link.sock, events, self.hear)

    def drop(self) -> None:
        """Ends the connection; a new one may come."""
        if self._link.sock is not None:
            self._selector.unregister(self._link.sock)
            self._link.detach()

    def acknowledge(self) -> None:
        """Says how far the client was heard."""
        self._link.acknowledge()


def hear_link(link: Link, obey: Callable[[list[Message], list[Any]], None]) -> bool:
    """Has `obey` handle what has arrived, and says whether there may be more at once.

    What is no message of ours, or cannot be handled, ends the connection: the other side begins another one, and what
    else it has said is handled.
    """
    more, error = False, None
    try:
        arrived, more = link.read()
    except Broken:
        return False
    except Malformed as exc:
        arrived, error = [], exc
    for messages, buffers in arrived:
        try:
            obey(messages, buffers)
        except Exception as exc:
            error = error or exc
    if error is not None:
        log.warning("a connection is broken, since what came over it cannot be handled: %.200r", error)
        link.detach()
    return more and error is None
