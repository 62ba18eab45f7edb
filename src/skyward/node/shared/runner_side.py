"""A runner's connection to the server of shared collections.

On a local pool it connects to node 0's agent, elsewhere through its own agent, so that no key enters a user process.
"""

from __future__ import annotations

import math
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from skyward.api.info import current_call, instance_info
from skyward.errors import SharedLost
from skyward.node.protocol import RunnerShare
from skyward.node.settings import RunnerSettings
from skyward.node.shared.names import serve_by
from skyward.transport import frames
from skyward.transport.codec import Message, Raw, handles

if TYPE_CHECKING:  # imported when a collection is used
    from skyward.node.shared.channel import Channel

__all__ = ["RunnerShared"]

_TIMEOUT = 30.0
_LOST = (
    "node 0, which keeps the shared collections of the pool, was lost or restarted: all of them are empty now, and "
    "whether this operation was done is not known. Try it again."
)

Write = Callable[[socket.socket, threading.Lock, list[Any]], None]


class RunnerShared:
    def __init__(
        self,
        send: Callable[[Message], None],
        write: Write,
        calls: Callable[[], list[tuple[str, float, float]]],
    ) -> None:
        self._send, self._write, self._calls = send, write, calls
        self._settings: RunnerSettings
        self._pid = os.getpid()
        self._lock = threading.RLock()  # over the making of channel and connection
        self._channel: Channel | None = None
        self._sock: socket.socket | None = None
        self._send_lock = threading.Lock()

    def install(self, settings: RunnerSettings) -> None:
        self._settings, self._pid = settings, os.getpid()
        serve_by(self.channel)

    def channel(self) -> Channel:
        return self._channel or self._make_channel()

    def wake(self, thread: int) -> None:
        if self._channel is not None:
            self._channel.wake(thread)

    def end_call(self, call: str) -> None:
        if self._channel is not None and self._channel.held:
            self._channel.end_call(call)

    def _make_channel(self) -> Channel:
        from skyward.node.shared.channel import Channel, pack_value, refuse_child, unpack_value
        from skyward.transport.payload import Packer

        if os.getpid() != self._pid:
            refuse_child()
        with self._lock:
            if self._channel is None:
                packer = Packer(self._settings["paths"])
                direct = self._settings.get("shared") is not None
                channel = Channel(
                    self._post_direct if direct else self._post,
                    lambda value, what: pack_value(packer, value, what),
                    unpack_value,
                    lambda: (current_call() or (None,))[0],
                    self._age,
                    None if direct else self._opening,
                )
                self._channel = channel
        return self._channel

    def _age(self) -> float:
        call = current_call()
        ages = [time.monotonic() - began for id, began, _ in self._calls() if call is not None and id == call[0]]
        return ages[0] if ages else 0.0

    def _opening(self) -> Raw:
        from skyward.node.shared.protocol import AskerToServer

        info = instance_info()
        where = "" if info.rank == info.node else f" (node {info.node})"
        return AskerToServer.Open(f"rank {info.rank}{where}", info.rank).encoded()[0]

    # over the agent's socket

    def _post(self, message: Raw, values: list[Any]) -> None:
        self._send(RunnerShare(message, values))

    @handles(RunnerShare)
    def _answered(self, share: RunnerShare) -> None:
        self.channel().receive(share.message, share.buffers)

    # over a connection of its own

    def _post_direct(self, message: Raw, values: list[Any]) -> None:
        sock = self._sock or self._connect(message[7] if message[0] == "ask" else None)
        try:
            self._write(sock, self._send_lock, frames.encode([message], values))
        except OSError as exc:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # half of it may have gone out: nothing can follow that
            raise SharedLost(_LOST) from exc

    def _connect(self, timeout: float | None) -> socket.socket:
        from skyward.node.shared.channel import LATE, no_answer
        from skyward.transport.link import greet
        from skyward.transport.local_sockets import connect

        with self._lock:
            if self._sock is not None:
                return self._sock
            patience = _TIMEOUT if timeout is None else min(_TIMEOUT, timeout + LATE)
            sock: socket.socket | None = None
            channel = self.channel()
            try:
                sock = connect(self._settings.get("shared") or "", patience)
                greet(sock, {"share": os.getpid()}, time.monotonic() + patience)
                sock.settimeout(None)
                # a server that reads nothing must not hold a body up for ever; reading may take any time
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", math.ceil(_TIMEOUT), 0))
                self._write(sock, self._send_lock, frames.encode([self._opening()], []))
                reader = threading.Thread(target=self._read, args=(sock, channel), name="skyward-shared", daemon=True)
                reader.start()
            except (OSError, ValueError, RuntimeError) as exc:  # the last: no more threads can be started
                if sock is not None:
                    sock.close()
                if timeout is not None and timeout < patience and isinstance(exc, TimeoutError):
                    raise no_answer(timeout) from None
                raise SharedLost(
                    f"node 0, which keeps the shared collections of the pool, cannot be reached: {exc}"
                ) from exc
            self._sock = sock
            return sock

    def _read(self, sock: socket.socket, channel: Channel) -> None:
        reader, alive, why = frames.FrameReader(), True, _LOST
        try:
            while alive:
                got, alive = reader.read(sock.recv_into)
                for messages, buffers in got:
                    channel.receive_all(messages, buffers)
        except OSError:
            pass
        except Exception as exc:  # what no server of ours sends; nobody would hear anything any more
            why = f"what node 0 has sent of the shared collections of the pool cannot be read: {exc}"
        with self._lock:
            self._sock = None  # the next question makes another one
        sock.close()
        channel.fail("lost", why)
