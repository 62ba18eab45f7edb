"""How a joiner and its client pass bytes on: frames of a program's input and output, and plain connections.

Part of the program that joins a pool (`node/join.py`): the standard library only, any Python from 3.8 on.
"""

from __future__ import annotations

import os
import select
import socket
import ssl
import struct
from collections import deque
from collections.abc import Callable
from typing import Any

__all__ = ["STDERR", "STDIN", "STDOUT", "WAIT", "Pump", "splice"]

STDIN, STDOUT, STDERR, _EXIT = range(4)
"""What a frame of a program's connection holds: a piece of one of its files, or at last its exit code."""
WAIT = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
_PIECE = 1 << 18
_MOST = 1 << 20
_HEADER = struct.Struct("!BI")


def splice(left: socket.socket, right: socket.socket) -> None:
    """Passes bytes on between two sockets until both have ended, then closes them."""
    other, waiting, speaking = {left: right, right: left}, {left: b"", right: b""}, {left, right}
    with left, right:
        try:
            for end in other:
                end.setblocking(False)
            while speaking or any(waiting.values()):
                poll = select.poll()
                for end in other:
                    reads = end in speaking and not waiting[other[end]]
                    if reads or waiting[end]:
                        poll.register(end, (select.POLLIN if reads else 0) | (select.POLLOUT if waiting[end] else 0))
                ready = {fd for fd, _ in poll.poll()}
                for end in [end for end in other if end.fileno() in ready]:
                    if waiting[end]:
                        waiting[end] = _sent(end, waiting[end])
                    if end in speaking and not waiting[other[end]]:
                        _pass_on(end, other[end], waiting, speaking)
        except OSError:
            pass  # one side is gone; the other learns it by the end of its connection


def _pass_on(
    end: socket.socket, other: socket.socket, waiting: dict[socket.socket, bytes], speaking: set[socket.socket]
) -> None:
    try:
        piece = end.recv(_PIECE)
    except BlockingIOError:
        return
    if piece:
        waiting[other] = _sent(other, piece)
    else:
        speaking.discard(end)
        other.shutdown(socket.SHUT_WR)


def _sent(sock: socket.socket, data: bytes) -> bytes:
    """Sends what there is room for; gives the rest."""
    try:
        return data[sock.send(data) :]
    except BlockingIOError:
        return data


class Pump:
    """Moves pieces between a TLS connection, in frames, and files: reads `sources` (by channel), writes `sinks`.

    An empty piece is the end of a file. One thread does both ways, as a TLS connection serves only one at a time.
    """

    def __init__(self, sock: ssl.SSLSocket, sources: dict[int, int], sinks: dict[int, int]) -> None:
        self._sock, self._sources, self._sinks = sock, dict(sources), dict(sinks)
        self._outgoing, self._received = bytearray(), bytearray()
        self._backlog: deque[list[Any]] = deque()  # what has come, as channel and piece
        self._code: int | None = None
        sock.setblocking(False)
        for fd in [*self._sources.values(), *self._sinks.values()]:
            os.set_blocking(fd, False)

    def run(self, finish: Callable[[], int] | None = None) -> int | None:
        """Works until an exit code has come, or the connection is lost: then gives None. Closes the files.

        With `finish` it is this side that ends: what that gives once all sources have ended is sent as the exit code.
        """
        finished = False
        try:
            # The side that ends waits for the other to close: what is unread here would take the exit code with it.
            while self._code is None or self._backlog:
                if finish is not None and not self._sources and not finished:
                    self._outgoing += _frame(_EXIT, str(finish()).encode())
                    finished = True
                self._step()
        except OSError:
            pass
        finally:
            for fd in [*self._sources.values(), *self._sinks.values()]:
                os.close(fd)
        return self._code

    def _step(self) -> None:
        poll = select.poll()
        reads = not self._backlog
        poll.register(self._sock, (select.POLLIN if reads else 0) | (select.POLLOUT if self._outgoing else 0))
        for fd in self._sources.values() if len(self._outgoing) < _MOST else ():
            poll.register(fd, select.POLLIN)
        if self._backlog and self._backlog[0][0] in self._sinks:
            poll.register(self._sinks[self._backlog[0][0]], select.POLLOUT)
        ready = dict(poll.poll(0 if reads and self._sock.pending() else None))
        for channel in [channel for channel, fd in self._sources.items() if fd in ready]:
            self._read_source(channel)
        try:
            if self._outgoing:
                del self._outgoing[: self._sock.send(self._outgoing)]
        except WAIT:
            pass
        if reads:
            self._receive()
        elif ready.get(self._sock.fileno(), 0) & (select.POLLHUP | select.POLLERR):
            raise ConnectionError("the connection was lost")
        while self._backlog and self._written(self._backlog[0]):
            self._backlog.popleft()

    def _read_source(self, channel: int) -> None:
        fd = self._sources[channel]
        piece = os.read(fd, _PIECE)
        self._outgoing += _frame(channel, piece)
        if not piece:
            del self._sources[channel]
            os.close(fd)

    def _receive(self) -> None:
        try:
            piece = self._sock.recv(_PIECE)
        except WAIT:
            return
        if not piece:
            raise ConnectionError("the connection has ended")
        self._received += piece
        while len(self._received) >= _HEADER.size:
            channel, size = _HEADER.unpack_from(self._received)
            if size > _MOST:
                raise ConnectionError("what came is no frame")
            if len(self._received) < _HEADER.size + size:
                return
            data = bytes(self._received[_HEADER.size : _HEADER.size + size])
            del self._received[: _HEADER.size + size]
            if channel == _EXIT:
                self._code = _exit_code(data)
            else:
                self._backlog.append([channel, data])

    def _written(self, entry: list[Any]) -> bool:
        """Writes a piece; whether all of it is written, or nobody reads it any more."""
        channel, piece = entry
        fd = self._sinks.get(channel)
        if fd is None:
            return True
        try:
            if piece:
                entry[1] = piece[os.write(fd, piece) :]
                return not entry[1]
        except BlockingIOError:
            return False
        except OSError:
            pass
        os.close(self._sinks.pop(channel))
        return True


def _exit_code(data: bytes) -> int:
    try:
        if len(data) < 12:
            return int(data)
    except ValueError:
        pass
    raise ConnectionError("what came is no exit code")


def _frame(channel: int, data: bytes) -> bytes:
    return _HEADER.pack(channel, len(data)) + data
