"""The runners of one node: ordered from the nursery, spoken to over sockets, listened to through pipes.

It knows how to start, reach and end them. What they are for, and what it means when one ends, is the agent's business.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from skyward.engine.slots import Pipe, RunnerSlot

__all__ = ["Crew"]


class Crew:
    """All runners of an agent, those that are being ended included."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        nursery: socket.socket,
        heed: Callable[[RunnerSlot, str, list[Any], list[Any]], None],
        output: Callable[[RunnerSlot, Pipe, bytes], None],
        ended: Callable[[RunnerSlot, int], None],
        full: Callable[[], bool],
    ) -> None:
        self._selector, self._nursery = selector, nursery
        self._heed, self._output, self._ended, self._full = heed, output, ended, full
        self._slots: dict[str, RunnerSlot] = {}
        self._paused = False
        nursery.setblocking(False)
        selector.register(nursery, selectors.EVENT_READ, self._on_nursery)

    def __iter__(self) -> Iterator[RunnerSlot]:
        """The runners in service."""
        return (slot for slot in list(self._slots.values()) if not slot.retired)

    def __len__(self) -> int:
        return sum(not slot.retired for slot in self._slots.values())

    @property
    def gone(self) -> bool:
        """Whether no runner is left, not even one that is being ended."""
        return not self._slots

    def spawn(self, name: str, threads: int, env: dict[str, str], cwd: str) -> RunnerSlot:
        """Has the nursery fork a runner."""
        ours, theirs = socket.socketpair()
        out, out_write = os.pipe()
        err, err_write = os.pipe()
        order = json.dumps({"spawn": name, "cwd": cwd}).encode()
        variables = os.memfd_create("skyward-env")  # in memory, and of any size: a message has a limit
        try:
            with open(variables, "wb", closefd=False) as file:
                file.write(json.dumps(env).encode())
            self._nursery.setblocking(True)
            socket.send_fds(self._nursery, [order], [theirs.fileno(), out_write, err_write, variables])
        except OSError:
            pass  # the nursery is gone: _on_nursery sees it next
        finally:
            self._nursery.setblocking(False)
            theirs.close()
            for fd in (out_write, err_write, variables):
                os.close(fd)
        slot = self._slots[name] = RunnerSlot(name, ours, threads, Pipe("stdout", out), Pipe("stderr", err))
        ours.setblocking(False)
        self._selector.register(ours, selectors.EVENT_READ, partial(self._on_runner, slot))
        for pipe in (slot.out, slot.err):
            os.set_blocking(pipe.fd, False)
            self._listen(slot, pipe)
        return slot

    def send(self, slot: RunnerSlot, message: list[Any], buffers: list[Any] | None = None) -> None:
        """Sends a message to a runner."""
        if slot.eof:
            return
        if not slot.send([[*message, len(buffers) if buffers else 0]], buffers or []):
            both = selectors.EVENT_READ | selectors.EVENT_WRITE
            self._selector.modify(slot.sock, both, partial(self._on_runner, slot))

    def kill(self, slot: RunnerSlot) -> None:
        """Kills a runner and what its bodies have started; `ended` is called when it is gone."""
        try:
            self._nursery.send(json.dumps({"kill": slot.name, "signal": int(signal.SIGKILL)}).encode())
        except OSError:
            pass  # as in spawn

    def retire(self, slot: RunnerSlot) -> None:
        """Kills a runner that another one will stand in for."""
        slot.retired = True
        self.kill(slot)

    def kill_all(self) -> None:
        """Kills every runner."""
        for slot in self._slots.values():
            self.kill(slot)

    def drain(self, slot: RunnerSlot) -> None:
        """Passes on everything a runner has written so far."""
        for pipe in (slot.out, slot.err):
            while pipe.open and self._forward(slot, pipe):
                pass

    def resume(self) -> None:
        """Listens again to pipes that were left alone while the client did not keep up."""
        if not self._paused or self._full():
            return
        self._paused = False
        for slot in self._slots.values():
            for pipe in (slot.out, slot.err):
                if pipe.paused and pipe.open:
                    pipe.paused = False
                    self._listen(slot, pipe)

    def _listen(self, slot: RunnerSlot, pipe: Pipe) -> None:
        self._selector.register(pipe.fd, selectors.EVENT_READ, partial(self._on_output, slot, pipe))

    def _on_output(self, slot: RunnerSlot, pipe: Pipe, _: int) -> None:
        if self._full():
            self._selector.unregister(pipe.fd)
            pipe.paused = self._paused = True
        else:
            self._forward(slot, pipe)

    def _forward(self, slot: RunnerSlot, pipe: Pipe) -> bool:
        data = pipe.read()
        if data is None:
            return False
        if not data:
            self._unregister(pipe.fd)
            return False
        self._output(slot, pipe, data)
        return True

    def _on_runner(self, slot: RunnerSlot, events: int) -> None:
        if events & selectors.EVENT_WRITE and slot.flush():
            self._selector.modify(slot.sock, selectors.EVENT_READ, partial(self._on_runner, slot))
        for messages, buffers in slot.read():
            at = 0
            for message in messages:
                count = message[-1]
                self._heed(slot, message[0], message[1:-1], buffers[at : at + count])
                at += count
        if slot.eof:
            self._unregister(slot.sock)

    def _on_nursery(self, _: int) -> None:
        while True:
            try:
                data = self._nursery.recv(1 << 16)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                os._exit(3)  # without a nursery there are no runners; the keeper starts this agent again
            message = json.loads(data)
            slot = self._slots.get(message["id"])
            if slot is None:
                continue
            if "pid" in message:
                slot.pid = message["pid"]
            else:
                self._on_exit(slot, message["status"])

    def _on_exit(self, slot: RunnerSlot, status: int) -> None:
        """What the runner still said is heard before its end is told."""
        self._on_runner(slot, selectors.EVENT_READ)
        self.drain(slot)
        for fileobj in (slot.sock, slot.out.fd, slot.err.fd):
            self._unregister(fileobj)
        slot.close()
        del self._slots[slot.name]
        self._ended(slot, status)

    def _unregister(self, fileobj: Any) -> None:
        if fileobj in self._selector.get_map():
            self._selector.unregister(fileobj)
