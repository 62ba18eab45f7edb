"""A runner as its agent sees it: socket, pipes, and the calls it has."""

from __future__ import annotations

import os
import socket
from collections import OrderedDict
from typing import Any

from skyward.wire import Frame, FrameReader, FrameWriter, encode

__all__ = ["Pipe", "RunnerSlot", "Task", "ahead"]

_READ = 1 << 16
_STDERR_TAIL = 4096
_AHEAD_SECONDS = 0.002
_AHEAD_ONE_SECONDS = 0.2
_AHEAD_MOST = 32
_CALL_ID = 12


def ahead(mean: float | None, threads: int) -> int:
    """How many calls a runner gets beyond those it runs: none if they are long, so that another may take them."""
    if mean is None or mean > _AHEAD_ONE_SECONDS:
        return 0
    if mean > _AHEAD_SECONDS:
        return threads
    return threads * min(_AHEAD_MOST, int(_AHEAD_SECONDS / max(mean, 1e-6)))


class Task:
    """A call on this node."""

    __slots__ = (
        *("about", "backlog", "buffers", "digests", "id", "killed", "missing"),
        *("shifting", "slot", "started", "stop", "timer"),
    )

    def __init__(self, call_id: str, about: dict[str, Any], buffers: list[Any]) -> None:
        self.id, self.about, self.buffers = call_id, about, buffers
        self.slot: RunnerSlot | None = None
        self.started: float | None = None
        self.stop: str | None = None
        self.killed = self.shifting = False
        self.timer: int | None = None
        self.digests: list[str] = []
        self.missing: set[str] = set()
        self.backlog: list[tuple[list[Any], list[Any]]] = []


class Pipe:
    """The reading end of a runner's stdout or stderr."""

    def __init__(self, stream: str, fd: int) -> None:
        self.stream, self.fd = stream, fd
        self.open, self.paused = True, False
        self.tail = b""
        self.call: str | None = None
        self._rest = b""

    def read(self) -> bytes | None:
        """What is there now: None when nothing is, empty bytes when the writers are gone."""
        try:
            data = os.read(self.fd, _READ)
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        if not data:
            self.open = False
        elif self.stream == "stderr":
            self.tail = (self.tail + data)[-_STDERR_TAIL:]
        return data

    def take_apart(self, data: bytes, mark: bytes) -> list[tuple[str | None, bytes]]:
        """The data with the runner's marks taken out; each piece with the call that the last mark named."""
        whole = self._rest + data
        self._rest = b""
        pieces: list[tuple[str | None, bytes]] = []
        while True:
            at = whole.find(b"\0")
            while at >= 0 and not mark.startswith(whole[at : at + len(mark)]):
                at = whole.find(b"\0", at + 1)
            if at < 0:
                break
            if at:
                pieces.append((self.call, whole[:at]))
            end = at + len(mark) + _CALL_ID + 1
            if len(whole) < end:
                self._rest = whole[at:]  # the rest of the mark is still in the pipe
                return pieces
            self.call = whole[at + len(mark) : end - 1].decode()
            whole = whole[end:]
        if whole:
            pieces.append((self.call, whole))
        return pieces


class RunnerSlot:
    """One runner process; `threads` calls run in it at a time."""

    def __init__(self, name: str, sock: socket.socket, threads: int, out: Pipe, err: Pipe) -> None:
        self.name, self.sock, self.threads, self.out, self.err = name, sock, threads, out, err
        self.pid: int | None = None
        self.ready = self.failed = self.stopping = self.retired = self.eof = False
        self.inflight: OrderedDict[str, Task] = OrderedDict()
        self._reader = FrameReader()
        self._writer = FrameWriter()

    def send(self, messages: list[Any], buffers: list[Any]) -> bool:
        """Sends messages; False when some bytes wait for the socket."""
        self._writer.add(encode(messages, buffers))
        return self.flush()

    def flush(self) -> bool:
        """Goes on sending; True when nothing waits."""
        try:
            return self._writer.write(self.sock.send)
        except OSError:
            self._writer.clear()  # it is dying; the nursery tells how
            return True

    def read(self) -> list[Frame]:
        """The frames that have arrived."""
        frames: list[Frame] = []
        while not self.eof:
            try:
                got, alive = self._reader.read(self.sock.recv_into)
            except BlockingIOError:
                break
            except OSError:
                got, alive = [], False
            frames += got
            self.eof = not alive
        return frames

    def stderr_mark(self) -> None:
        """Begins a new call's stderr, where only one runs at a time."""
        if self.threads == 1:
            self.err.tail = b""

    def stderr_tail(self) -> str:
        """The last lines the runner wrote to stderr."""
        return self.err.tail.decode("utf-8", "replace").strip()

    def close(self) -> None:
        """Closes socket and pipes."""
        self.sock.close()
        os.close(self.out.fd)
        os.close(self.err.fd)
