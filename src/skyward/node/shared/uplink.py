"""The link from a node's agent to that of node 0, for shared collections; made with the first question.

It survives broken connections, as the client's links do: what was said arrives once and in order, or the whole link is
given up, and both sides know.
"""

from __future__ import annotations

import os
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from skyward.node.client_link import hear_link
from skyward.node.receiver import Message, checked_greeting
from skyward.transport.link import Link, greet

__all__ = ["PATIENCE", "Uplink"]

PATIENCE = 30.0
"""How many seconds a broken link is tried again, before it is given up."""
_GREETING = 10.0
_PAUSES = 0.1, 2.0  # between attempts: the first one, and the longest

Found = tuple[socket.socket, dict[str, Any]] | Exception


class Uplink:
    """Part of an agent, on its loop; only connecting happens in threads.

    `dial` connects to node 0, `obey` gets what comes from there, `lost` is told when no answers come any more to what
    was asked. `wake` has the agent call `look`.
    """

    def __init__(
        self,
        node: int,
        selector: selectors.BaseSelector,
        clock: Callable[[], float],
        wake: Callable[[], None],
        dial: Callable[[], socket.socket],
        obey: Callable[[list[Message], list[Any]], None],
        lost: Callable[[str], None],
    ) -> None:
        self._node, self._selector, self._clock = node, selector, clock
        self._wake, self._dial, self._obey, self._lost = wake, dial, obey, lost
        self._found: queue.SimpleQueue[Found] = queue.SimpleQueue()
        self._session, self._incarnation = os.urandom(8).hex(), ""
        self._link = Link(clock)
        self._connecting = False
        self._writing = False
        self._down = clock()  # since when there is no connection
        self._pause = _PAUSES[0]
        self._unread = False

    def post(self, message: Message, buffers: list[Any]) -> None:
        """Sends a message, now or when there is a connection."""
        self._link.post([message], buffers)
        if self._link.sock is None and not self._connecting:
            self._down = self._clock()
            self._connect(0.0)
        self._watch()

    def renounce(self, why: str) -> None:
        """Gives the link up: nothing that was said counts any more."""
        if self._link.sock is not None:
            self._selector.unregister(self._link.sock)
            self._link.detach()
        self._session, self._incarnation, self._link = os.urandom(8).hex(), "", Link(self._clock)
        self._lost(why)

    def look(self) -> None:
        """Takes what threads have found."""
        while not self._found.empty():
            found = self._found.get()
            self._connecting = False
            if isinstance(found, Exception):
                self._failed(found)
            elif found[1].get("session") != self._session or self._link.sock is not None:
                found[0].close()  # it was given up meanwhile
            else:
                self._attach(*found)

    def pending(self) -> bool:
        """Whether there may be more to hear than the selector knows."""
        unread, self._unread = self._unread, False
        return unread

    def hear(self, events: int = 0) -> None:
        """Takes what node 0 has sent, and sends what it was not ready for."""
        link, sock = self._link, self._link.sock
        if sock is None:
            return
        if events & selectors.EVENT_WRITE:
            link.flush()
        self._unread = hear_link(link, self._obey)
        if link is self._link:
            if link.sock is None:
                self._broken(sock)
            else:
                self._watch()

    def _broken(self, sock: socket.socket) -> None:
        self._selector.unregister(sock)
        self._down, self._pause = self._clock(), _PAUSES[0]
        self._connect(0.0)

    def _failed(self, error: Exception) -> None:
        away = self._clock() - self._down
        if away > PATIENCE:
            self.renounce(
                f"node 0, which keeps the pool's shared collections, could not be reached for {away:.0f} s ({error}): "
                "locks of this node are released, and whether this operation was done is not known. Asking again works "
                "when it can be reached."
            )
            return
        self._connect(self._pause)
        self._pause = min(_PAUSES[1], 2 * self._pause)

    def _attach(self, sock: socket.socket, answer: dict[str, Any]) -> None:
        restarted = self._incarnation not in ("", answer["incarnation"])
        if restarted:
            self._link = Link(self._clock)
        self._incarnation = answer["incarnation"]
        self._link.attach(sock, 0 if restarted else answer["received"])
        self._selector.register(sock, selectors.EVENT_READ, self.hear)
        self._unread, self._writing = True, False
        if restarted:
            self._lost(
                "node 0, which keeps the shared collections of the pool, was restarted, or has given this node up for "
                "lost: whether this operation was done is not known. Asking again works."
            )
        self._watch()

    def _watch(self) -> None:
        """Has the selector say when the socket takes more, while something waits for that."""
        if self._link.writing is not self._writing and self._link.sock is not None:
            self._writing = not self._writing
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._writing else 0)
            self._selector.modify(self._link.sock, events, self.hear)

    def _connect(self, pause: float) -> None:
        self._connecting = True
        hello = {"share": self._node, "session": self._session, "received": self._link.received}
        threading.Thread(target=self._try, args=(pause, hello), name="skyward-uplink", daemon=True).start()

    def _try(self, pause: float, hello: dict[str, Any]) -> None:
        try:
            time.sleep(pause)
            sock = self._dial()
            try:
                answer = checked_greeting(greet(sock, hello, time.monotonic() + _GREETING), hello["session"])
            except BaseException:
                sock.close()
                raise
            self._found.put((sock, answer))
        except Exception as exc:  # of sockets, or of a greeting that is none: `look` decides what follows
            self._found.put(exc)
        self._wake()
