"""The client's links to all nodes: connects, reads and writes them, and returns events.

caller's thread      writes to a link itself: no hand-over on the way out
polling thread       reads all links, and is the only one that closes their sockets
a thread per try     connects to a node and greets its agent; `poll` returns the result
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from skyward.errors import ClockSkew
from skyward.node.settings import Greeting, Refused, Welcome, checked_greeting
from skyward.transport.backoff import backoff
from skyward.transport.codec import Message, Raw, split
from skyward.transport.frames import FROM_NODE, TooLarge
from skyward.transport.link import Broken, Link, greet

__all__ = [
    "SILENCE",
    "ClientOffline",
    "Connection",
    "Connections",
    "Event",
    "Greeted",
    "Heard",
    "Lost",
    "NodeEnded",
    "NotReached",
    "Unreachable",
    "given_up",
    "next_try",
]


log = logging.getLogger("skyward.engine")

SILENCE = 10.0
_GREETING = 10.0
_SKEWED = (
    "a certificate that was made just now is not valid there, or no longer: the clocks of the node and of this "
    "computer differ by more than a day. Set them right (timedatectl, chronyc makestep, ntpdate)."
)
_REFUSED = 5.0
_LONGEST_PAUSE = 1.0
MOST_MALFORMED = 3


@dataclass(eq=False)
class Connection:
    number: int
    link: Link = field(default_factory=partial(Link, takes=FROM_NODE))
    session: str = field(default_factory=lambda: os.urandom(8).hex())
    incarnation: str = ""
    epoch: int = 0
    """Which start of a detached run's program; 0 in other pools."""
    greeting: Greeting = field(default_factory=lambda: Greeting())
    malformed: int = 0
    refusals: int = 0
    attached: Link | None = None

    def hello(self) -> dict[str, Any]:
        greeting = {"session": self.session, "received": self.link.received}
        return {**greeting, "epoch": self.epoch} if self.epoch else greeting

    def welcome(self, sock: socket.socket, answer: Welcome) -> bool:
        """True for a different agent, which knows nothing of us."""
        restarted = self.incarnation not in ("", answer["incarnation"])
        self.incarnation, self.greeting, self.refusals = answer["incarnation"], answer, 0
        if restarted:
            self.link, self.malformed = self.link.fresh(), 0
        self.link.attach(sock, 0 if restarted else answer["received"])
        return restarted

    def renounce(self, session: str) -> Link:
        """Forgets what was sent; returns the old link, whose socket is open."""
        old = self.link
        self.link, self.session, self.incarnation, self.malformed = old.fresh(), session, "", 0
        return old


class Heard(NamedTuple):
    number: int
    link: Link
    message: Raw
    buffers: list[Any]


class Greeted(NamedTuple):
    number: int
    link: Link
    sock: socket.socket
    answer: Welcome
    first: bool = False


class NotReached(NamedTuple):
    number: int
    error: Exception


class Lost(NamedTuple):
    number: int
    link: Link


class Unreachable(NamedTuple):
    """A node could not be reached, or one side cannot read what the other sends."""

    number: int
    error: Exception
    link: Link | None = None


Event = Heard | Greeted | NotReached | Lost | Unreachable
Refusal = Callable[[int, Message, TooLarge], None]


class Connections:
    def __init__(
        self,
        nodes: int,
        reach: Callable[[int], socket.socket],
        revive: Callable[[int], None] | None = None,
        session: str = "",
        epoch: int = 0,
    ) -> None:
        self._new_session = lambda: f"{session}.{os.urandom(8).hex()}"
        self.peers = [Connection(i, session=self._new_session(), epoch=epoch) for i in range(nodes)]
        self._reach, self._revive = reach, revive
        self._clock: Callable[[], float] = time.monotonic
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._unread: set[int] = set()  # nodes from which there may be more than the selector knows
        self._attempts: deque[Event] = deque()  # how attempts to connect went
        self._renounced: deque[Link] = deque()
        self._no_more_attempts = threading.Event()
        self._closed = False
        self._unsettled = True  # some socket is new, gone, or has more to write
        self._looked = 0.0

    # from any thread

    def post(self, number: int, messages: Sequence[Message], refused: Refusal | None = None) -> None:
        """Messages arrive once, in order. If one is too large, it is not sent: `refused` gets it, or TooLarge is
        raised.
        """
        sent, buffers = list[Raw](), list[Any]()
        for message in messages:
            raw, its_buffers = message.encoded()
            sent.append(raw)
            buffers += its_buffers
        try:
            written = self.peers[number].link.post(sent, buffers)
        except TooLarge as exc:
            if len(messages) > 1:  # calls for one node share a frame, and may be very many
                middle = len(messages) // 2
                for half in (messages[:middle], messages[middle:]):
                    self.post(number, half, refused)
            elif refused is not None:
                refused(number, messages[0], exc)
            else:
                raise
            return
        if not written:
            self._unsettled = True
            self.wake()  # the polling thread goes on when the socket takes more

    def wake(self) -> None:
        try:
            self._wake_write.send(b"x")
        except OSError:
            pass  # full (it will wake anyway) or closed

    def greetings(self) -> list[Greeting]:
        return [peer.greeting for peer in self.peers]

    def connected(self, number: int) -> bool:
        return self.peers[number].link.sock is not None

    def heard(self, number: int) -> float:
        return self.peers[number].link.heard

    def unacknowledged(self, number: int) -> int:
        return self.peers[number].link.kept_bytes

    def current(self, number: int, link: Link) -> bool:
        """Messages of a replaced link are dropped."""
        return self.peers[number].link is link

    def connect(self, number: int, deadline: float) -> None:
        """Retries until `deadline`, then reports `Unreachable`."""
        threading.Thread(target=self._connect, args=(number, deadline), name="skyward-connect", daemon=True).start()

    def reconnect(self, number: int, pause: float = 0.0) -> None:
        threading.Thread(target=self._reconnect, args=(number, pause), name="skyward-reconnect", daemon=True).start()

    def stop_connecting(self) -> None:
        self._no_more_attempts.set()

    def renounce(self, number: int) -> None:
        self._renounced.append(self.peers[number].renounce(self._new_session()))
        self.wake()

    def after_fork(self) -> None:
        for peer in self.peers:
            if peer.link.sock is not None:
                os.close(peer.link.sock.detach())

    # threads that connect

    def _connect(self, number: int, deadline: float) -> None:
        refused = 0.0
        for pause in backoff(0.02, _LONGEST_PAUSE, 1.5):
            if self._no_more_attempts.is_set():
                return
            try:
                self._tell(self._greet(self.peers[number], deadline, first=True))
                return
            except Exception as exc:  # of sockets, or of a greeting that is none
                # the agent listens before we are told of it: who is refused for long is refused for good
                refused = refused + pause if isinstance(exc, ConnectionRefusedError) else 0.0
                skewed = _is_clock_skew(exc)
                hopeless = skewed or isinstance(exc, Refused | NodeEnded)
                if time.monotonic() + pause > deadline or refused > _REFUSED or hopeless:
                    self._tell(Unreachable(number, ClockSkew("connecting", _SKEWED, number) if skewed else exc))
                    return
                self._no_more_attempts.wait(pause)

    def _reconnect(self, number: int, pause: float) -> None:
        peer = self.peers[number]
        if self._no_more_attempts.wait(pause) or self.connected(number):
            return
        # once may be a tunnel that has just broken; the next attempt finds the agent, if it is there
        if peer.refusals > 1 and not peer.incarnation:
            self._try_reviving(number)
        try:
            event: Event = self._greet(peer, time.monotonic() + _GREETING)
            if (unread := event.answer.get("unread", 0)) >= MOST_MALFORMED:
                event.sock.close()
                error = ConnectionError(f"it could not read what it was sent, {unread} times in a row")
                event = Unreachable(number, error, event.link)
        except Exception as exc:  # as above; without an event the node's calls would wait for ever
            peer.refusals = peer.refusals + 1 if isinstance(exc, ConnectionRefusedError) else 0
            event = NotReached(number, exc)
        self._tell(event)

    def _try_reviving(self, number: int) -> None:
        if self._revive is not None:
            try:
                self._revive(number)
            except Exception as exc:
                log.debug("node %d cannot be set up again: %s", number, exc)

    def _greet(self, peer: Connection, deadline: float, *, first: bool = False) -> Greeted:
        link, hello = peer.link, peer.hello()
        sock = self._reach(peer.number)
        try:
            limit = min(deadline, time.monotonic() + _GREETING)
            answer = checked_greeting(greet(sock, hello, limit), hello["session"])
        except BaseException:
            sock.close()
            raise
        return Greeted(peer.number, link, sock, answer, first)

    def _tell(self, event: Event) -> None:
        self._attempts.append(event)
        if self._closed:
            self._drop_attempts()  # nobody polls any more
        else:
            self.wake()

    def _drop_attempts(self) -> None:
        while self._attempts:
            try:
                event = self._attempts.popleft()
            except IndexError:
                return
            if isinstance(event, Greeted):
                event.sock.close()

    # the polling thread

    def poll(self, timeout: float) -> list[Event]:
        self.drop_renounced()
        if self._unsettled:
            self._register()
        ready = self._selector.select(0 if self._unread or self._attempts else timeout)
        numbers, self._unread = self._unread, set()
        for key, mask in ready:
            if key.data is None:
                self._wake_read.recv(4096)
                continue
            numbers.add(key.data)
            if mask & selectors.EVENT_WRITE:
                self.peers[key.data].link.flush()
        events: list[Event] = []
        while self._attempts:
            events.append(self._attempts.popleft())
        for number in numbers:
            events += self.read(number)
        if not ready and not numbers:
            for peer in self.peers:
                peer.link.acknowledge()
        return events + self.notice_silence()

    def attach(self, event: Greeted) -> bool | None:
        """True for a different agent, None if it is too late."""
        peer = self.peers[event.number]
        if event.link is not peer.link or self._closed:
            event.sock.close()
            return None
        peer.link.detach()  # of two attempts at once the agent listens to the later one
        restarted = peer.welcome(event.sock, event.answer)
        peer.attached = peer.link
        self._unread.add(peer.number)  # bytes may already have been decrypted
        self._unsettled = True
        return restarted

    def read(self, number: int) -> list[Event]:
        peer = self.peers[number]
        link, events = peer.link, list[Event]()
        try:
            arrived, more = link.read()
            if more:
                self._unread.add(number)
            for messages, buffers in arrived:
                for message, its_buffers in split(messages, buffers):
                    events.append(Heard(number, link, message, its_buffers))
        except Broken:
            events += self._lost(peer, link)
        except Exception as exc:  # one node's nonsense is no reason to stop listening to the others
            events += self.distrust(number, link, exc)
        return events

    def distrust(self, number: int, link: Link, error: Exception) -> list[Event]:
        """Drops the connection after an unreadable message; gives up the node if that repeats."""
        peer = self.peers[number]
        log.warning("node %d sent something that is not a message of ours: %.200r", number, error)
        peer.malformed += 1
        lost, why = self._lost(peer, link), f"what it sends is not a message of ours ({error!s:.200})"
        return lost if peer.malformed < MOST_MALFORMED else [Unreachable(number, ConnectionError(why), link)]

    def notice_silence(self) -> list[Event]:
        """Drops silent connections: agents send something every second."""
        now = self._clock()
        if now - self._looked < 1.0:
            return []
        late, self._looked = now - self._looked > SILENCE / 2, now
        events: list[Event] = []
        for peer in self.peers:
            link = peer.link
            link.acknowledge()  # also a sign of life: the nodes' leases live on it
            if link.sock is not None and now - link.heard > SILENCE and not late:  # late: it was us
                events += self._lost(peer, link)
        return events

    def drop_renounced(self) -> None:
        while self._renounced:
            self._renounced.popleft().detach()
            self._unsettled = True

    def close(self) -> None:
        self._closed = True
        self._no_more_attempts.set()
        self.drop_renounced()
        self._drop_attempts()
        for peer in self.peers:
            peer.link.detach()
        self._selector.close()
        self._wake_read.close()
        self._wake_write.close()

    def _lost(self, peer: Connection, link: Link) -> list[Event]:
        link.detach()
        self._unread.discard(peer.number)
        self._unsettled = True
        if peer.attached is not link:
            return []  # it was given up at this moment
        peer.attached = None
        return [Lost(peer.number, link)]

    def _register(self) -> None:
        self._unsettled = False
        registered = {key.data: key for key in self._selector.get_map().values() if key.data is not None}
        for number, key in list(registered.items()):  # all of them first: a new socket may have an old one's number
            if key.fileobj is not self.peers[number].link.sock:
                self._selector.unregister(key.fileobj)
                del registered[number]
        for peer in self.peers:
            sock, key = peer.link.sock, registered.get(peer.number)
            if sock is None:
                continue
            writing = peer.link.writing
            self._unsettled = self._unsettled or writing
            mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if writing else 0)
            if key is None:
                self._selector.register(sock, mask, peer.number)
            elif key.events != mask:
                self._selector.modify(sock, mask, peer.number)


def _is_clock_skew(error: Exception) -> bool:
    told = getattr(error, "reason", "")  # of an ssl.SSLError, which pools on this computer do not load
    return told in ("SSLV3_ALERT_BAD_CERTIFICATE", "SSLV3_ALERT_CERTIFICATE_EXPIRED") or (
        told == "CERTIFICATE_VERIFY_FAILED" and getattr(error, "verify_code", 0) in (9, 10)
    )


_HERE = 15.0
_RECONNECT_REFUSED = 2.0
_SILENT = 15.0
_AWAY = 5.0  # a link that is silent counts as broken after 10 s, so this delays nothing
_GONE = 5.0
_REJOINING = 25.0  # an attempt that began while nobody could be reached takes ten seconds, and so does the next


class NodeEnded(ConnectionError):
    """What ran there has ended for good."""


def given_up(
    lease: float | None,
    away: float,
    silent: float,
    *,
    refused: bool,
    others_speak: bool,
    rejoined: float = float("inf"),
) -> bool:
    """Whether a node is lost: `away` seconds after its connection broke, `silent` seconds after its last message.

    `lease` is None on this computer. A machine that refuses connections is lost at once. A silent one is lost only if
    other nodes speak; otherwise the fault is rather on our side. `rejoined` seconds ago the first of them was reached
    again: the others get as much time as an attempt takes.
    """
    if lease is None:
        return away > _HERE
    if refused:
        return away > _RECONNECT_REFUSED
    if others_speak:  # a client that was stopped has heard nobody: all nodes get time to come back
        return silent > _SILENT and away > _AWAY and rejoined > _REJOINING
    return silent > lease


def next_try(away: float, *, gone: bool) -> float:
    return _GONE if gone else min(2.0, 0.05 + away / 4)


class ClientOffline:
    def __init__(self) -> None:
        self._since, self._told = 0.0, 0
        self.over = float("-inf")

    def began(self, now: float) -> None:
        self._since = now

    def ended(self, now: float) -> None:
        self.over = now if self._since else self.over
        self._since, self._told = 0.0, 0

    def told(self, now: float, lease: float) -> str:
        away = now - self._since
        if not self._since or away <= 30 + 60 * self._told:
            return ""
        self._told += 1
        return (
            f"no connection to any node for {away:.0f} s. What runs there continues; we try again until the lease "
            f"ends, {lease - away:.0f} s from now."
        )
