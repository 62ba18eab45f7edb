"""The agents' part in shared collections: node 0 serves them, others relay, through the client if they must."""

from __future__ import annotations

import logging
import os
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from skyward.node.client_link import ClientLink, read_link
from skyward.node.protocol import ClientToAgent, RunnerShare, Share
from skyward.node.runners import RunnerProcess
from skyward.node.settings import Welcome, checked_greeting
from skyward.node.shared.protocol import AgentToHead, AskerToServer, HeadToAgent, ServerToAsker
from skyward.node.timers import Timers
from skyward.transport.backoff import backoff
from skyward.transport.codec import Buffers, Message, Raw, Receiver, handles
from skyward.transport.frames import Malformed
from skyward.transport.link import Link, greet

if TYPE_CHECKING:
    pass

if TYPE_CHECKING:  # imported with the first question
    from skyward.node.shared.agent_side import Relay, Uplink
    from skyward.node.shared.server import Server

__all__ = [
    "PATIENCE",
    "Relay",
    "Shared",
    "Uplink",
]


log = logging.getLogger("skyward.engine")

_LOOK = 5.0
_ENDED = "its process has ended"

Dial = Callable[[str, int], socket.socket]


class Shared:
    """On the agent's loop. `send` goes to a runner, `tell` to the client, `dial` connects to another agent; `wake`
    schedules `look`.
    """

    def __init__(
        self,
        node: int,
        token: str,
        selector: selectors.BaseSelector,
        clock: Callable[[], float],
        timers: Timers,
        send: Callable[[str, Message], None],
        dial: Dial,
        wake: Callable[[], None],
    ) -> None:
        self._node, self._token, self._selector, self._clock, self._timers = node, token, selector, clock, timers
        self._send, self._dial, self._wake = send, dial, wake
        self.tell: Callable[[Message], None]
        self.head: tuple[str, int] | None = None
        self.info = ""
        self._made: Server | None = None
        self._passing: Relay | None = None
        self._up: Uplink | None = None
        self._peers: dict[int, tuple[ClientLink, list[float]]] = {}  # with the time since when each is not connected
        self._count = 0

    # what the agent tells

    def admit(self, sock: socket.socket, hello: dict[str, Any]) -> None:
        if "session" in hello:
            self._admit_peer(sock, hello)
        else:
            self._server().admit(sock)

    def poll(self) -> None:
        if self._up is not None:
            self._up.poll()

    def pending(self) -> bool:
        """Whether a link may have buffered data that the selector does not show."""
        if self._up is None and not self._peers:
            return False
        links: list[Any] = [self._up, *(link for link, _ in self._peers.values())]
        more = [link for link in links if link is not None and link.pending()]
        for link in more:
            link.read(0)
        return bool(more)

    def ended(self, runner: str) -> None:
        if self._made is not None:
            self._made.gone(self._asker(runner), _ENDED)
        elif self._passing is not None:
            self._passing.ended(self._asker(runner), _ENDED)

    def fence(self) -> None:
        """The client had given this node up: its state is dropped."""
        if self._made is not None:
            self._made.end(
                "lost", "node 0 was given up for lost: the shared collections, which it kept, are empty now."
            )
            self._made = None
            self._peers.clear()
        if self._up is not None:
            self._up.renounce("the client had given this node up for lost.")

    def close(self) -> None:
        if self._made is not None:
            self._made.end("closed", "the pool is closing; its shared collections end with it.")

    # what client and runners say

    @handles(Share)
    def _shared(self, share: Share, node: int | None = None) -> None:
        """From the client; or, with its number, from another node."""
        asker = share.asker
        if node is not None and asker.partition("/")[0] != str(node):
            raise Malformed(f"node {node} asks for {asker[:80]!r}, which is not one of its processes")
        if self._node == 0:
            route = self._to_client if node is None else self._to_peer
            self._server().receive(asker, share.message, share.buffers, partial(route, asker))
        elif self._passing is not None:
            self._passing.down(asker, share.message, share.buffers)

    @handles(ClientToAgent.Lost)
    def _lost(self, message: ClientToAgent.Lost) -> None:
        node, rank, why = message.node, message.rank, message.why
        if self._made is not None:
            if rank is None and (peer := self._peers.pop(node, None)) is not None:
                peer[0].drop()
            if rank is None:
                self._made.gone_all(f"{node}/", why)
            self._made.lost(node, rank, why)
        elif self._passing is not None and node == 0 and rank is None:
            self._passing.lost(f"node 0, which kept the shared collections of the pool, is lost ({why}).", direct=False)

    @handles(ClientToAgent.Head)
    def _head(self, message: ClientToAgent.Head) -> None:
        place = message.place
        before, self.head = self.head, place
        if before is not None and place is None and self._up is not None:
            self._up.renounce("node 0, which kept the shared collections of the pool, is lost.")

    @handles(RunnerShare)
    def _asked_by_runner(self, share: RunnerShare, runner: RunnerProcess) -> None:
        asker = self._asker(runner.name)
        if self._node == 0:
            self._server().receive(asker, share.message, share.buffers, partial(self._to_runner, runner.name))
        else:
            self._relay().up(asker, share.message, share.buffers)

    def _asker(self, runner: str) -> str:
        return f"{self._node}/{self._token}/{runner}"

    def _to_client(self, asker: str, message: Raw, buffers: Buffers) -> None:
        self.tell(Share(asker, message, buffers))

    def _to_runner(self, runner: str, message: Raw, buffers: Buffers) -> None:
        self._send(runner, RunnerShare(message, buffers))

    # node 0

    def _server(self) -> Server:
        if self._made is None:
            from skyward.api.info import InstanceInfo
            from skyward.node.shared.server import Server

            self._count += 1
            epoch = f"{self._token}.{self._count}"
            self._made = Server(
                epoch,
                self._selector,
                self._clock,
                self._timers,
                lambda: InstanceInfo.from_json(self.info),
            )
        return self._made

    def _admit_peer(self, sock: socket.socket, hello: dict[str, Any]) -> None:
        node: int = hello["share"]
        if node not in self._peers:
            self._count += 1
            hear = Receiver(AgentToHead, self).receive_all
            link = _PeerLink(
                self._selector,
                {},
                lambda messages, buffers: hear(messages, buffers, node),
                lambda: self._give_up(node, "its agent has begun again"),
                f"{self._token}.{self._count}",
                self._clock,
            )
            if not self._peers:
                self._timers.after(_LOOK, self._look_at_peers)
            self._peers[node] = link, [0.0]
        link, away = self._peers[node]
        away[0] = 0.0
        link.attach(sock, hello)

    def _to_peer(self, asker: str, message: Raw, buffers: Buffers) -> None:
        peer = self._peers.get(int(asker.partition("/")[0]))
        if peer is not None:
            peer[0].tell_now(Share(asker, message, buffers))

    def _give_up(self, node: int, why: str) -> None:
        self._server().gone_all(f"{node}/", why)

    def _look_at_peers(self) -> None:
        from skyward.node.shared.agent_side import PATIENCE

        now = self._clock()
        for node, (link, away) in list(self._peers.items()):
            if link.connected:
                away[0] = 0.0
            elif not away[0]:
                away[0] = now
            elif now - away[0] > PATIENCE:
                del self._peers[node]
                self._give_up(node, f"nothing was heard from its node for {now - away[0]:.0f} s")
        if self._peers:
            self._timers.after(_LOOK, self._look_at_peers)

    # other nodes

    def _relay(self) -> Relay:
        if self._passing is None:
            from skyward.node.shared.agent_side import Relay

            self._passing = Relay(self._send, self.tell, self._post, lambda: self.head is not None)
        return self._passing

    def _post(self, message: Message) -> None:
        if self._up is None:
            from skyward.node.shared.agent_side import Uplink

            relay = self._relay()
            self._up = Uplink(
                self._node,
                self._selector,
                self._clock,
                self._wake,
                self._dial_head,
                Receiver(HeadToAgent, _Down(relay)).receive_all,
                lambda why: relay.lost(why, direct=True),
            )
        self._up.post(message)

    def _dial_head(self) -> socket.socket:
        if self.head is None:
            raise ConnectionError("node 0 cannot be reached from here")
        return self._dial(*self.head)


class _PeerLink(ClientLink):
    def read(self, events: int) -> None:
        super().read(events)
        self.flush()


class _Down:
    def __init__(self, relay: Relay) -> None:
        self._relay = relay

    @handles(Share)
    def _answered(self, share: Share) -> None:
        self._relay.down(share.asker, share.message, share.buffers)


# Forwards requests of a node's runners to the server on node 0, over a link between agents or through the client.


class Relay:
    """On the agent's loop. `send` goes to a runner, `tell` to the client, `post` to node 0; `direct` says whether that
    link has an address.
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

Found = tuple[socket.socket, Welcome] | Exception


class Uplink:
    """On the agent's loop; only connecting uses threads. `lost` is called when pending requests will get no reply."""

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

    def poll(self) -> None:
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

    def read(self, events: int = 0) -> None:
        link, sock = self._link, self._link.sock
        if sock is None:
            return
        if events & selectors.EVENT_WRITE:
            link.flush()
        self._unread = read_link(link, self._obey)
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
                "locks of this node are released, and whether this operation was done is not known. Try it again "
                "when it can be reached."
            )
            return
        self._connect(next(self._pauses))

    def _attach(self, sock: socket.socket, answer: Welcome) -> None:
        restarted = self._incarnation not in ("", answer["incarnation"])
        if restarted:
            self._link = Link(self._clock)
        self._incarnation = answer["incarnation"]
        self._link.attach(sock, 0 if restarted else answer["received"])
        self._selector.register(sock, selectors.EVENT_READ, self.read)
        self._unread, self._writing = True, False
        if restarted:
            self._lost(
                "node 0, which keeps the shared collections of the pool, was restarted, or has given this node up for "
                "lost: whether this operation was done is not known. Try it again."
            )
        self._watch()

    def _watch(self) -> None:
        if self._link.writing is not self._writing and self._link.sock is not None:
            self._writing = not self._writing
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._writing else 0)
            self._selector.modify(self._link.sock, events, self.read)

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
