"""A node's link to the client, on the agent's loop. Messages of one turn share a frame."""

from __future__ import annotations

import logging
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from skyward.node.peers import Waiting, WaitingPeers, accept_all
from skyward.node.protocol import Raised
from skyward.node.settings import Greeting, Welcome
from skyward.transport.codec import Buffers, Message, Raw, halves
from skyward.transport.frames import FROM_NODE, Malformed, encode, nbytes
from skyward.transport.link import Broken, Link, greet, tune
from skyward.transport.local_sockets import check_peer
from skyward.transport.roles import refusal

if TYPE_CHECKING:
    import ssl

    from skyward.node.terms import TermsSlot

__all__ = ["ClientLink", "ClientListener", "read_link"]


log = logging.getLogger("skyward.engine")

_MOST_ERRORS = 8  # in a frame: their texts are long, and a header has a limit
_MOST_BYTES = 16 << 20


class ClientLink:
    def __init__(
        self,
        selector: selectors.BaseSelector,
        greeting: Greeting,
        obey: Callable[[list[Raw], list[Any]], None],
        fence: Callable[[], None],
        incarnation: str,
        clock: Callable[[], float],
    ) -> None:
        self._selector, self._greeting, self._obey, self._fence = selector, greeting, obey, fence
        self._incarnation, self._clock = incarnation, clock
        self._session: str | None = None
        self._link = Link(clock, sends=FROM_NODE)
        self._messages: list[Raw] = []
        self._buffers: list[Any] = []
        self._errors = self._size = 0  # of what was told and not sent: errors, and bytes of buffers
        self._decrypted = False  # whether bytes may be there that the selector does not know of
        self._writing = False  # whether the selector says when the socket takes more

    @property
    def connected(self) -> bool:
        return self._link.sock is not None

    @property
    def kept_bytes(self) -> int:
        return self._link.kept_bytes

    @property
    def heard(self) -> float:
        return self._link.heard

    def attach(self, sock: socket.socket, hello: dict[str, Any]) -> None:
        """A new session means that this node had been given up."""
        if self._link.sock is not None:
            self._selector.unregister(self._link.sock)
            self._link.detach()
        if self._session is not None and hello["session"] != self._session:
            self._messages.clear()
            self._buffers.clear()
            self._errors = self._size = 0
            self._link = self._link.fresh()
            self._fence()
        self._session = hello["session"]
        welcome: Welcome = {
            "incarnation": self._incarnation,
            "session": hello["session"],
            "received": self._link.received,
            "unread": self._link.unread,
            **self._greeting,
        }
        try:
            for piece in encode(welcome):
                sock.sendall(piece)
        except OSError:
            sock.close()
            return
        self._link.attach(sock, hello["received"])
        self._selector.register(sock, selectors.EVENT_READ, self.read)
        self._decrypted, self._writing = True, False

    def read(self, events: int) -> None:
        link, sock = self._link, self._link.sock
        if sock is None:
            return
        if events & selectors.EVENT_WRITE:
            link.flush()
        self._decrypted = read_link(link, self._obey)
        if link.sock is None:
            self._selector.unregister(sock)

    def pending(self) -> bool:
        """Whether there is more to read at once; called once per turn."""
        decrypted, self._decrypted = self._decrypted, False
        return decrypted

    def tell(self, message: Message) -> None:
        raw, buffers = message.encoded()
        self._messages.append(raw)
        if buffers:
            self._buffers += buffers
            self._size += sum(map(nbytes, buffers))
        self._errors += isinstance(message, Raised)
        if self._errors >= _MOST_ERRORS or self._size > _MOST_BYTES:
            self.flush()

    def tell_now(self, message: Message) -> None:
        """Sends at once, so that the link's backlog is known."""
        self.tell(message)
        self.flush()

    def flush(self) -> None:
        if self._messages:
            messages, self._messages = self._messages, []
            buffers, self._buffers = self._buffers, []
            self._errors = self._size = 0
            self._post(messages, buffers)
        if self._link.writing is not self._writing and self._link.sock is not None:
            self._writing = not self._writing
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._writing else 0)
            self._selector.modify(self._link.sock, events, self.read)

    def _post(self, messages: list[Raw], buffers: Buffers) -> None:
        try:
            self._link.post(messages, buffers)
        except (RecursionError, TypeError, ValueError) as exc:
            if len(messages) == 1:  # senders see to it that this does not happen; if it does, the agent lives on
                log.error("a message %.80r cannot be sent: %.200s", messages[0][0], exc)
                return
            for half in halves(messages, buffers):
                self._post(*half)

    def drop(self) -> None:
        if self._link.sock is not None:
            self._selector.unregister(self._link.sock)
            self._link.detach()

    def acknowledge(self) -> None:
        self._link.acknowledge()


def read_link(link: Link, obey: Callable[[list[Raw], list[Any]], None]) -> bool:
    """True if there may be more. An invalid message ends the connection, after the rest of the frame."""
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


# Where an agent lets its client in: it proves who it is, then greets, and nothing is read before both.
#
# A process of this computer connects to a unix socket, and the kernel says whose it is. A process of another machine
# has a certificate of the pool.


_GREETING = 10.0
_WAITING = 64  # who has not shown yet who it is
_SERVING = 1024  # blobs for other nodes, at a time


class ClientListener:
    """Admits connections, each in its own thread, so that a slow or hostile peer delays nobody. `session` is the prefix
    of this pool's session names.
    """

    def __init__(
        self,
        listener: socket.socket,
        host: str,
        context: ssl.SSLContext | None,
        session: str,
        slot: TermsSlot,
        wake: Callable[[], None],
        serve: Callable[[socket.socket, str], None],
    ) -> None:
        self._listener, self._host, self._context, self._session = listener, host, context, session
        self._slot, self._wake, self._serve = slot, wake, serve
        self.since = ""
        """What the current epoch is, for refusals."""
        self._held: list[socket.socket] = []
        self._lock = threading.Lock()
        self._waiting = WaitingPeers(_WAITING, _WAITING)
        self._serving = 0
        self._admitted: queue.SimpleQueue[tuple[socket.socket, dict[str, Any]]] = queue.SimpleQueue()

    def open(self) -> None:
        threading.Thread(
            target=accept_all, args=(self._listener, self._take), name="skyward-accept", daemon=True
        ).start()

    def next(self) -> tuple[socket.socket, dict[str, Any]] | None:
        try:
            return self._admitted.get_nowait()
        except queue.Empty:
            return None

    def free_ports(self, count: int) -> list[int]:
        """Reserves ports of this node for frameworks: bound but not listening, so that they are not ephemeral, yet a
        framework may listen (SO_REUSEADDR).
        """
        self.close()
        for _ in range(count):
            held = socket.socket(socket.AF_INET6 if ":" in self._host else socket.AF_INET)
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind((self._host, 0))
            self._held.append(held)
        return [held.getsockname()[1] for held in self._held]

    def close(self) -> None:
        for held in self._held:
            held.close()
        self._held.clear()

    def _take(self, sock: socket.socket, address: str) -> None:
        peer = self._waiting.add(sock, address)
        try:
            if self._context is not None:
                self._waiting.secure(peer, self._context)
            threading.Thread(target=self._admit, args=(peer,), daemon=True).start()
        except (OSError, RuntimeError):
            self._waiting.remove(peer)
            peer.sock.close()
            time.sleep(0.05)

    def _admit(self, peer: Waiting) -> None:
        sock = peer.sock
        try:
            sock.settimeout(_GREETING)
            tune(sock)
            hello = self._greeted(sock)
        except (OSError, ValueError):
            sock.close()  # not one of this pool: another user, no certificate, or no greeting
            return
        finally:
            self._waiting.remove(peer)
        if "fetch" in hello:
            self._serve_peer(sock, hello["fetch"])
        else:
            self._admitted.put((sock, hello))
            self._wake()

    def _serve_peer(self, sock: socket.socket, blob: str) -> None:
        """A node without room asks another one."""
        with self._lock:
            room = self._serving < _SERVING
            self._serving += room
        if not room:
            sock.close()
            return
        try:
            self._serve(sock, blob)
        finally:
            with self._lock:
                self._serving -= 1

    def _greeted(self, sock: Any) -> dict[str, Any]:
        role = None
        if self._context is None:
            check_peer(sock)
        else:
            from skyward.transport.certificates import role_of

            sock.do_handshake()
            role = role_of(sock)
        hello = greet(sock, None, time.monotonic() + _GREETING)
        why = refusal(hello, role, self._session)
        if (
            why is None
            and self._slot.terms.is_stale(hello.get("terms", hello.get("epoch", 0)))
            and "fetch" not in hello
        ):
            why = f"another process controls this run since {self.since or 'its program was started again'}"
        if why is None:
            return hello
        for piece in encode({"refused": why}):
            sock.sendall(piece)
        raise PermissionError(why)
