"""The client's links to all nodes, and the one thread that reads them.

    caller's thread   writes to a link itself: no hand-over on the way out
    I/O thread        reads all links, and does what was put off until no lock is held

It moves messages and keeps connections alive. What they mean is the business of those who follow it. No code of users
runs on the I/O thread: futures hand their callbacks over, and so does who emits events (see callbacks.py).
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from skyward.node.receiver import Message, checked_greeting, split
from skyward.transport.link import Broken, Link, greet

__all__ = ["SILENCE", "Connection", "Connections", "Listener", "Roster"]

log = logging.getLogger("skyward.engine")

SILENCE = 10.0
_GREETING = 10.0
_REFUSED = 5.0
_BUSY_WAIT = 0.05
_IDLE_WAIT = 1.0
_LONGEST_PAUSE = 1.0
_MALFORMED = 3


@dataclass(eq=False)
class Connection:
    """A node, as far as connections go."""

    number: int
    link: Link = field(default_factory=Link)
    session: str = field(default_factory=lambda: os.urandom(8).hex())
    incarnation: str = ""
    about: dict[str, Any] = field(default_factory=dict[str, Any])
    malformed: int = 0
    """How often it has sent something that is no message of ours."""

    def hello(self) -> dict[str, Any]:
        """What a node's agent is greeted with."""
        return {"session": self.session, "received": self.link.received}

    def welcome(self, sock: socket.socket, answer: dict[str, Any]) -> bool:
        """Goes on over a new socket; True if the agent is another one than before, and knows nothing of us."""
        restarted = self.incarnation not in ("", answer["incarnation"])
        self.incarnation, self.about = answer["incarnation"], answer
        if restarted:
            self.link, self.malformed = self.link.fresh(), 0
        self.link.attach(sock, 0 if restarted else answer["received"])
        return restarted

    def renounce(self, session: str) -> None:
        """Forgets what was said: should the node come back, its agent learns that it had been given up."""
        self.link.detach()
        self.link, self.session, self.incarnation, self.malformed = self.link.fresh(), session, "", 0


class Listener(Protocol):
    """Who is told what nodes say, always with the lock of the connections held.

    With a method `mishandled(number, message, error)` it is also told of messages in whose handling it failed itself.
    """

    def heed(self, number: int, message: Message, buffers: list[Any]) -> None: ...
    def turn(self) -> bool: ...
    def collapse(self, error: BaseException) -> None: ...


class Roster(Protocol):
    """Who is told of connections, always with the lock of the connections held."""

    def attached(self, number: int, *, restarted: bool) -> None: ...
    def broken(self, number: int) -> None: ...
    def unreachable(self, number: int, error: Exception) -> None: ...
    def pause(self, number: int, error: Exception) -> float | None: ...


class Connections:
    """Connections to the agents of a pool."""

    def __init__(
        self,
        nodes: int,
        reach: Callable[[int], socket.socket],
        revive: Callable[[int], None] | None = None,
    ) -> None:
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.peers = [Connection(i) for i in range(nodes)]
        self.closing = False
        self._reach, self._revive = reach, revive
        self._clock: Callable[[], float] = time.monotonic
        self._listener: Listener
        self._roster: Roster
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._joining: list[Connection] = []
        self._later: deque[tuple[Callable[..., Any], tuple[Any, ...]]] = deque()
        self._stopped = self._ended = False
        self._stopping = threading.Event()
        self._unsettled = True  # some socket is new, gone, or has more to write
        self._looked = 0.0
        self.thread = threading.Thread(target=self._run, name="skyward-io", daemon=True)

    def follow(self, listener: Listener, roster: Roster) -> None:
        """Says who is told of what happens; before anything does."""
        self._listener, self._roster = listener, roster

    def open(self, deadline: float) -> None:
        """Connects to every node, at once."""
        self.thread.start()
        threads = [threading.Thread(target=self.connect, args=(p.number, deadline), daemon=True) for p in self.peers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def close(self) -> None:
        """Drops all connections."""
        self.closing = self._stopped = True
        self._stopping.set()
        self._wake()
        if self.thread.is_alive() and self.thread is not threading.current_thread():
            self.thread.join(5)

    def after_fork(self) -> None:
        """Closes a forked child's copies of the sockets; they belong to the parent."""
        for peer in self.peers:
            if peer.link.sock is not None:
                os.close(peer.link.sock.detach())

    def post(self, number: int, messages: list[Any], buffers: Sequence[Any] = ()) -> None:
        """Sends messages to a node; they arrive once, in order, even over a broken connection."""
        if not self.peers[number].link.post(messages, buffers):
            self._unsettled = True
            self._wake()  # the I/O thread goes on when the socket takes more

    def defer(self, act: Callable[..., Any], *args: Any) -> None:
        """Has the I/O thread settle a future, emit an event, close a stream: when no lock is held. Must not block."""
        self._later.append((act, args))
        if self._ended:
            self._do_deferred()  # nobody else does it any more
        elif threading.current_thread() is not self.thread:
            self._wake()

    def abouts(self) -> list[dict[str, Any]]:
        """What each node said of itself in its greeting."""
        return [peer.about for peer in self.peers]

    def connected(self, number: int) -> bool:
        """Whether there is a connection to a node at this moment."""
        return self.peers[number].link.sock is not None

    def heard(self, number: int) -> float:
        """When a node was last heard of."""
        return self.peers[number].link.heard

    def connect(self, number: int, deadline: float) -> None:
        """Connects to a node's agent for the first time; tries until `deadline`."""
        pause, refused = 0.02, 0.0
        while not self.closing:
            try:
                self._attach(self.peers[number], deadline)
                return
            except Exception as exc:  # of sockets, or of a greeting that is none; `unreachable` is told
                # the agent listens before we are told of it: who is refused for long is refused for good
                refused = refused + pause if isinstance(exc, ConnectionRefusedError) else 0.0
                if time.monotonic() + pause > deadline or refused > _REFUSED:
                    with self.lock:
                        self._roster.unreachable(number, exc)
                        self.changed.notify_all()
                    return
                time.sleep(pause)
                pause = min(_LONGEST_PAUSE, pause * 1.5)

    def reconnect(self, number: int) -> None:
        """Has a thread connect to a node's agent again, for as long as the roster has patience."""
        threading.Thread(target=self._reconnect, args=(number,), name="skyward-reconnect", daemon=True).start()

    def _reconnect(self, number: int) -> None:
        refusals = 0
        while not self.closing and not self.connected(number):
            try:
                self._attach(self.peers[number], time.monotonic() + _GREETING)
                return
            except Exception as exc:  # as above; a thread that ended here would leave the node's calls waiting for ever
                with self.lock:
                    pause = None if self.closing else self._roster.pause(number, exc)
                    self.changed.notify_all()
                if pause is None:
                    return
                self._stopping.wait(pause)
                refusals = refusals + 1 if isinstance(exc, ConnectionRefusedError) else 0
                # once may be a tunnel that has just broken; the next attempt finds the agent, if it is there
                if refusals > 1 and not self.peers[number].incarnation and not self.closing:
                    self._try_reviving(number)

    def _try_reviving(self, number: int) -> None:
        """Has a node's machine set up again that answers but has nothing of ours any more."""
        if self._revive is not None:
            try:
                self._revive(number)
            except Exception as exc:
                log.debug("node %d cannot be set up again: %s", number, exc)

    def pause(self, seconds: float) -> bool:
        """Waits, in a thread of its own; False if all is closed meanwhile."""
        return not self._stopping.wait(seconds)

    def renounce(self, number: int) -> None:
        """Forgets what was said to a node: should it come back, its agent learns that it had been given up."""
        self.peers[number].renounce(os.urandom(8).hex())
        self._unsettled = True

    def _attach(self, peer: Connection, deadline: float) -> None:
        sock = self._reach(peer.number)
        try:
            session = peer.session
            welcome = checked_greeting(greet(sock, peer.hello(), min(deadline, time.monotonic() + _GREETING)))
        except BaseException:
            sock.close()
            raise
        with self.lock:
            if self._stopped or session != peer.session:
                sock.close()
                return
            restarted = peer.welcome(sock, welcome)
            self._joining.append(peer)
            self._unsettled = True
            self._roster.attached(peer.number, restarted=restarted)
            self.changed.notify_all()
        self._wake()

    # the I/O thread

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
        wait = _IDLE_WAIT
        try:
            while not self._stopped:
                if self._unsettled:
                    with self.lock:
                        self._register()
                ready = self._selector.select(wait)
                with self.lock:
                    self._read(ready)
                    wait = _BUSY_WAIT if self._listener.turn() else _IDLE_WAIT
                self._do_deferred()
        except BaseException as exc:
            log.exception("the engine's I/O thread ended")
            with self.lock:
                self.closing = True
                self._listener.collapse(exc)
                self.changed.notify_all()
            raise
        finally:
            self._ended = True
            self._do_deferred()
            for peer in self.peers:
                peer.link.detach()
            self._selector.close()
            self._wake_read.close()
            self._wake_write.close()

    def _do_deferred(self) -> None:
        while True:
            try:
                act, args = self._later.popleft()
            except IndexError:
                return
            try:
                act(*args)
            except Exception:  # a bug of ours: what is left is done all the same
                log.exception("%r raised", act)

    def _register(self) -> None:
        """Brings the selector up to date with the links' sockets and what they want."""
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
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if writing else 0)
            if key is None:
                self._selector.register(sock, wanted, peer.number)
            elif key.events != wanted:
                self._selector.modify(sock, wanted, peer.number)

    def _read(self, ready: list[tuple[selectors.SelectorKey, int]]) -> None:
        peers: dict[int, Connection] = {}
        for key, events in ready:
            if key.data is None:
                self._wake_read.recv(4096)
                continue
            peers[key.data] = self.peers[key.data]
            if events & selectors.EVENT_WRITE:
                self.peers[key.data].link.flush()
        while self._joining:
            peer = self._joining.pop()  # bytes may already have been decrypted
            peers[peer.number] = peer
        for peer in peers.values():
            self._hear(peer)
        if not ready:
            for peer in self.peers:
                peer.link.acknowledge()
        self._notice_silence()

    def _notice_silence(self) -> None:
        """Gives up connections on which nothing has come for a while: agents speak every second."""
        now = self._clock()
        if now - self._looked < 1.0:
            return
        late, self._looked = now - self._looked > SILENCE / 2, now
        for peer in self.peers:
            peer.link.acknowledge()  # also a sign of life: the nodes' leases live on it
            if peer.link.sock is not None and now - peer.link.heard > SILENCE and not late:  # late: it was us
                peer.link.detach()
                self._lost(peer)

    def _lost(self, peer: Connection) -> None:
        self._unsettled = True
        self._roster.broken(peer.number)
        self.changed.notify_all()

    def _hear(self, peer: Connection) -> None:
        more = True
        while more:
            try:
                arrived, more = peer.link.read()
                for messages, buffers in arrived:
                    for message, its_buffers in split(messages, buffers):
                        self._pass_on(peer, message, its_buffers)
            except Broken:
                self._lost(peer)
                return
            except Exception as exc:  # one node's nonsense is no reason to stop listening to the others
                self._distrust(peer, exc)
                return

    def _pass_on(self, peer: Connection, message: list[Any], buffers: list[Any]) -> None:
        try:
            self._listener.heed(peer.number, message, buffers)
        except BaseException as exc:
            log.exception("message %r of node %d could not be handled", message[0], peer.number)
            mishandled = getattr(self._listener, "mishandled", None)
            if mishandled is None:
                return
            try:
                mishandled(peer.number, message, exc)
            except BaseException:
                log.exception("and neither could that")

    def _distrust(self, peer: Connection, error: Exception) -> None:
        """Breaks the connection to a node that sends what we cannot read; gives up the node when it goes on so."""
        log.warning("node %d sent something that is no message of ours: %r", peer.number, error)
        peer.malformed += 1
        peer.link.detach()
        if peer.malformed < _MALFORMED:
            self._lost(peer)
            return
        self._unsettled = True
        self._roster.unreachable(peer.number, ConnectionError(f"what it sends is no message of ours ({error!r})"))
        self.changed.notify_all()

    def _wake(self) -> None:
        try:
            self._wake_write.send(b"x")
        except OSError:
            pass  # full (it will wake anyway) or closed
