"""A connection that outlives its socket: frames are numbered, kept until acknowledged, and sent again after a break.

    header = {"s": number of this frame, "a": last number seen from the other side, "m": messages}

Every message arrives exactly once and in order, whatever happens to the sockets.
"""

from __future__ import annotations

import operator
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, cast

from skyward.transport.frames import PREFIX, Buffer, FrameReader, FrameWriter, Malformed, encode, loads, nbytes

__all__ = ["Broken", "Link", "Message", "greet", "tune"]

Message = tuple[list[Any], list[memoryview]]

_nbytes: Callable[[memoryview], int] = operator.attrgetter("nbytes")
_ACK_FRAMES = 64
_ACK_BYTES = 1 << 20
_READ_BUDGET = 4 << 20
_LONGEST_GREETING = 1 << 20
_RECORD = 1 << 14  # of TLS: one that is not full is the last of its frame


class Broken(Exception):
    """The socket of a link is gone; the link itself is not."""


class Link:
    """Thread-safe, never blocks. `takes` and `sends` limit headers."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, takes: int | None = None, sends: int | None = None
    ) -> None:
        self.lock = threading.Lock()
        self.sock: socket.socket | None = None
        self._clock, self._takes, self._sends = clock, takes, sends
        self.heard = clock()
        self._reader = FrameReader(takes)
        self._writer = FrameWriter()
        self._sent = 0
        self._received = 0
        self._kept: deque[tuple[int, int, list[Buffer]]] = deque()
        self._kept_bytes = 0
        self._unacked_frames = 0
        self._unacked_bytes = 0
        self._malformed: Exception | None = None
        self.unread = 0
        """How often in a row the next frame, which the other side repeats, could not be read."""
        self._decrypted: Callable[[], int] = _nothing

    def fresh(self) -> Link:
        return Link(self._clock, self._takes, self._sends)

    @property
    def received(self) -> int:
        return self._received

    @property
    def kept_bytes(self) -> int:
        return self._kept_bytes

    @property
    def writing(self) -> bool:
        return self.sock is not None and self._writer.pending > 0

    def attach(self, sock: socket.socket, peer_received: int) -> None:
        """Continues from the first frame that the other side has not seen."""
        with self.lock:
            sock.setblocking(False)
            self.sock = sock
            self._decrypted = getattr(sock, "pending", _nothing)  # bytes that the selector does not know of
            self.heard = self._clock()
            self._reader = FrameReader(self._takes)
            self._writer.clear()
            self._forget(peer_received)
            for _, _, pieces in self._kept:
                self._writer.add(pieces)
            self._flush()

    def detach(self) -> None:
        with self.lock:
            self._drop()

    def post(self, messages: Sequence[Any], buffers: Sequence[Buffer] = ()) -> bool:
        """Sends now or once there is a socket; False if some bytes wait. TooLarge, and nothing sent, if the other side
        would refuse them.
        """
        with self.lock:
            pieces = encode({"s": self._sent + 1, "a": self._received, "m": messages}, buffers, self._sends)
            self._sent += 1
            size = len(pieces[0]) if len(pieces) == 1 else sum(map(nbytes, pieces))
            self._kept.append((self._sent, size, pieces))
            self._kept_bytes += size
            self._unacked_frames = self._unacked_bytes = 0
            if self.sock is not None:
                self._writer.add(pieces)
                self._flush()
            return not self._writer.pending

    def flush(self) -> bool:
        with self.lock:
            self._flush()
            return not self._writer.pending

    def read(self) -> tuple[list[Message], bool]:
        """What has arrived, and whether more may be there; raises Broken."""
        arrived: list[Message] = []
        budget = _READ_BUDGET
        with self.lock:
            malformed, self._malformed = self._malformed, None
            if malformed is not None:
                raise malformed
            if self.sock is None:
                raise Broken
            while budget > 0:
                try:
                    frames, alive = self._reader.read(self.sock.recv_into)
                    budget -= self._reader.last
                    for frame in frames:
                        self._accept(frame[0], frame[1], arrived)
                except BlockingIOError:
                    return arrived, False
                except OSError:
                    alive = False
                except Malformed as exc:  # raised at the next read, after what came before it
                    self.unread += 1
                    if not arrived:
                        raise
                    self._malformed = exc
                    return arrived, True
                if not alive:
                    self._drop()
                    if arrived:
                        return arrived, True
                    raise Broken
                if self._reader.last < _RECORD and not self._decrypted():
                    return arrived, False  # the next read would find nothing; if it is wrong, the selector says so
        return arrived, True

    def acknowledge(self) -> None:
        with self.lock:
            if self._unacked_frames and self.sock is not None:
                self._ack()

    def _accept(self, header: Any, buffers: list[memoryview], arrived: list[Message]) -> None:
        if header.__class__ is not dict:
            raise Malformed("the header of a frame is not an object")
        if len(header) != 3 and len(header) != 1:
            raise Malformed("a frame with other fields than ours")
        acknowledged, number = header.get("a"), header.get("s", 0)
        if acknowledged.__class__ is not int or number.__class__ is not int:
            raise Malformed("a frame without its numbers")
        if acknowledged > self._sent:
            raise Malformed("a frame that acknowledges what was not sent")
        if len(header) == 3 and ("s" not in header or "m" not in header):
            raise Malformed("a frame with other fields than ours")
        self.heard = self._clock()
        self._forget(acknowledged)
        if number <= self._received:
            return
        self._received, self.unread = number, 0
        arrived.append((header["m"], buffers))
        self._unacked_frames += 1
        self._unacked_bytes += sum(map(_nbytes, buffers))
        if self._unacked_frames >= _ACK_FRAMES or self._unacked_bytes >= _ACK_BYTES:
            self._ack()

    def _ack(self) -> None:
        self._unacked_frames = self._unacked_bytes = 0
        self._writer.add(encode({"a": self._received}))
        self._flush()

    def _forget(self, acknowledged: int) -> None:
        while self._kept and self._kept[0][0] <= acknowledged:
            self._kept_bytes -= self._kept.popleft()[1]

    def _flush(self) -> None:
        if self.sock is None:
            return
        try:
            self._writer.write(self.sock.send)
        except OSError:
            pass  # the next read says so

    def _drop(self) -> None:
        if self.sock is not None:
            self.sock.close()
            self.sock = None
        self._writer.clear()


def _nothing() -> int:
    return 0


def greet(sock: socket.socket, say: dict[str, Any] | None, deadline: float) -> dict[str, Any]:
    """Exchanges one JSON frame on a blocking socket, and reads nothing beyond it."""
    sock.settimeout(max(0.1, deadline - time.monotonic()))
    if say is not None:
        for piece in encode(say):
            sock.sendall(piece)
    size, buffers = PREFIX.unpack(_received(sock, PREFIX.size, deadline))
    if size > _LONGEST_GREETING or buffers:
        raise Malformed("what answered there did not send a greeting")
    greeting = loads(_received(sock, size, deadline))
    if not isinstance(greeting, dict):
        raise Malformed("what answered there did not send a greeting")
    return cast("dict[str, Any]", greeting)


def _received(sock: socket.socket, size: int, deadline: float) -> bytes:
    """A peer that sends single bytes gets no more time."""
    data = b""
    while len(data) < size:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the other side did not greet in time")
        sock.settimeout(left)
        piece = sock.recv(size - len(data))
        if not piece:
            raise ConnectionError("the other side closed the connection during the greeting")
        data += piece
    return data


def tune(sock: socket.socket) -> None:
    if sock.family == socket.AF_UNIX:
        return  # of this computer, or the near end of a tunnel: ssh looks after the rest
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 3), ("TCP_KEEPCNT", 4), ("TCP_USER_TIMEOUT", 15_000)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
