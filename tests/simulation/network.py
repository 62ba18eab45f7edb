"""Connections of bytes between a client and an agent, delivered, delayed and cut as the world says."""

from __future__ import annotations

import random
from typing import Any

from skyward.transport.frames import FrameReader

__all__ = ["Connection", "End", "Selector"]


class End:
    """One end of a connection; what `Link` needs of a socket."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.leaving = bytearray()  # sent, still on the way
        self.arrived = bytearray()
        self.eof = self.closed = False

    def pending(self) -> int:
        return 0

    def setblocking(self, _: bool) -> None:
        pass

    def send(self, data: memoryview) -> int:
        if self.closed or self.eof:
            raise BrokenPipeError
        if len(self.leaving) > 1 << 16:
            raise BlockingIOError
        taken = bytes(data)
        if len(taken) > 1 and self._rng.random() < 0.1:
            taken = taken[: self._rng.randint(1, len(taken) - 1)]
        self.leaving += taken
        return len(taken)

    def sendall(self, data: Any) -> None:
        self.leaving += bytes(data)

    def recv_into(self, room: memoryview) -> int:
        if self.closed:
            raise OSError("closed")
        if not self.arrived:
            if self.eof:
                return 0
            raise BlockingIOError
        count = min(len(room), len(self.arrived))
        room[:count] = self.arrived[:count]
        del self.arrived[:count]
        return count

    def close(self) -> None:
        self.closed = True


class Connection:
    """Both ends, and what is between them."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.client, self.agent = End(rng), End(rng)
        self.mute = False  # bytes vanish, and nobody is told

    def deliver(self) -> bool:
        """Moves some bytes; False if there were none."""
        moved = False
        for near, far in ((self.client, self.agent), (self.agent, self.client)):
            if near.leaving and not self.mute and self._rng.random() < 0.8:
                count = len(near.leaving) if self._rng.random() < 0.8 else self._rng.randint(1, len(near.leaving))
                far.arrived += near.leaving[:count]
                del near.leaving[:count]
                moved = True
            if near.closed and not near.leaving and not far.eof and not self.mute:
                far.eof = moved = True
        return moved

    def cut(self) -> None:
        """Ends the connection; what was on its way may be lost, the rest arrives."""
        for near, far in ((self.client, self.agent), (self.agent, self.client)):
            count = self._rng.randint(0, len(near.leaving))
            far.arrived += near.leaving[:count]
            near.leaving.clear()
            far.eof = True

    def welcome(self) -> Any:
        """The agent's answer to a greeting, which has arrived whole."""
        self.client.arrived += self.agent.leaving
        self.agent.leaving.clear()
        reader = FrameReader()
        while True:
            frames, _ = reader.read(lambda room: self.client.recv_into(room[:1]))
            if frames:
                return frames[0][0]


class Selector:
    """What an agent's link needs of a selector."""

    def __init__(self) -> None:
        self._keys: dict[Any, Any] = {}

    def register(self, sock: Any, events: int, data: Any) -> None:
        self._keys[sock] = _Key(events, data)

    modify = register

    def unregister(self, sock: Any) -> None:
        del self._keys[sock]

    def get_key(self, sock: Any) -> Any:
        return self._keys[sock]

    def get_map(self) -> dict[Any, Any]:
        return self._keys


class _Key:
    def __init__(self, events: int, data: Any) -> None:
        self.events, self.data = events, data
