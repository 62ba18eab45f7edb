"""Forwards requests of a node's runners to the server on node 0, over a link between agents or through the client."""

from __future__ import annotations

import os
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from skyward.node.client_link import hear_link
from skyward.node.protocol import RunnerShare, Share
from skyward.node.settings import checked_greeting
from skyward.node.shared.protocol import AskerToServer, ServerToAsker
from skyward.transport.backoff import backoff
from skyward.transport.codec import Buffers, Message, Raw
from skyward.transport.link import Link, greet

if TYPE_CHECKING:
    pass

__all__ = ["PATIENCE", "Relay", "Uplink"]


class Relay:
    """Part of an agent, on its loop. `send` goes to a runner, `tell` to the client, `post` to node 0; `direct` says
    whether that link has an address.
    """

    def __init__(
        self,
        send: Callable[[str, Message], None],
        tell: Callable[[Message], None],
        post: Callable[[Message], None],
        direct: Callable[[], bool],
    ) -> None:
        self._send, self._tell, self._post, self._direct = send, tell, post, direct
        self._open: dict[str, set[int]] = {}  # of each asker, the questions that have no answer yet
        self._ways: dict[str, bool] = {}  # of each asker, whether it uses the link; it keeps to that

    def up(self, asker: str, message: Raw, buffers: Buffers) -> None:
        unanswered = self._open.setdefault(asker, set())
        if message[0] == "ask":
            unanswered.add(message[1])
        if asker not in self._ways:
            self._ways[asker] = self._direct()
        if self._ways[asker]:
            self._post(Share(asker, message, buffers))
        else:
            self._tell(Share(asker, message, buffers))

    def down(self, asker: str, message: Raw, buffers: Buffers) -> None:
        unanswered = self._open.get(asker)
        if unanswered is not None:
            unanswered.discard(message[1])
            self._send(runner_of(asker), RunnerShare(message, buffers))

    def ended(self, asker: str, why: str) -> None:
        if asker in self._open:
            self.up(asker, AskerToServer.Gone(why).encoded()[0], [])
            del self._open[asker], self._ways[asker]

    def lost(self, why: str, *, direct: bool | None = None) -> None:
        for asker, unanswered in self._open.items():
            if direct is not None and self._ways[asker] is not direct:
                continue
            ids, self._open[asker] = unanswered, set()
            for id in sorted(ids):
                answer = ServerToAsker.Answer(id, "", "lost", why, [])
                self._send(runner_of(asker), RunnerShare(*answer.encoded()))
        self._ways.update((asker, self._direct()) for asker in self._open)


def runner_of(asker: str) -> str:
    return asker.rpartition("/")[2]


# The link from a node's agent to that of node 0, for shared collections; made with the first question.
#
# It survives broken connections, as the client's links do: what was said arrives once and in order, or the whole link
# is given up, and both sides know.


PATIENCE = 30.0
_GREETING = 10.0
_PAUSES = 0.1, 2.0  # between attempts: the first one, and the longest

_MOST_UNREAD = 3
_UNREAD = (
    "this node and node 0, which keeps the pool's shared collections, cannot read what they send to each other, and it "
    "is not known whether this operation was done."
)

Found = tuple[socket.socket, dict[str, Any]] | Exception


class Uplink:
    """Part of an agent, on its loop; only connecting uses threads. `lost` is called when pending requests will get no
    reply.
    """

    def __init__(
        self,
        node: int,
        selector: selectors.BaseSelector,
        clock: Callable[[], float],
        wake: Callable[[], None],
        dial: Callable[[], socket.socket],
        obey: Callable[[list[Raw], list[Any]], None],
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
        self._pauses = backoff(*_PAUSES)
        self._unread = False

    def post(self, message: Message) -> None:
        raw, buffers = message.encoded()
        self._link.post([raw], buffers)
        if self._link.sock is None and not self._connecting:
            self._down = self._clock()
            self._connect(0.0)
        self._watch()

    def renounce(self, why: str) -> None:
        if self._link.sock is not None:
            self._selector.unregister(self._link.sock)
            self._link.detach()
        self._session, self._incarnation, self._link = os.urandom(8).hex(), "", Link(self._clock)
        self._lost(why)

    def look(self) -> None:
        while not self._found.empty():
            found = self._found.get()
            self._connecting = False
            if isinstance(found, Exception):
                self._failed(found)
            elif found[1].get("session") != self._session or self._link.sock is not None:
                found[0].close()  # it was given up meanwhile
            elif found[1].get("unread", 0) >= _MOST_UNREAD:
                found[0].close()
                self.renounce(_UNREAD)
            else:
                self._attach(*found)

    def pending(self) -> bool:
        unread, self._unread = self._unread, False
        return unread

    def hear(self, events: int = 0) -> None:
        link, sock = self._link, self._link.sock
        if sock is None:
            return
        if events & selectors.EVENT_WRITE:
            link.flush()
        self._unread = hear_link(link, self._obey)
        if link is self._link:
            if link.sock is not None:
                self._watch()
            elif link.unread < _MOST_UNREAD:
                self._broken(sock)
            else:
                self._selector.unregister(sock)
                self.renounce(_UNREAD)

    def _broken(self, sock: socket.socket) -> None:
        self._selector.unregister(sock)
        self._down, self._pauses = self._clock(), backoff(*_PAUSES)
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
        self._connect(next(self._pauses))

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
