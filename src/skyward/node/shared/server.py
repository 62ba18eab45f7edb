"""The server of shared collections in node 0's agent, created with the first request."""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

from skyward.api.info import InstanceInfo
from skyward.node.shared.protocol import AskerToServer, ServerToAsker
from skyward.node.shared.state import Answer, SharedState
from skyward.node.timers import Timers
from skyward.transport import local_sockets
from skyward.transport.codec import Buffers, Raw, Receiver, halves, handles
from skyward.transport.frames import Buffer, FrameReader, FrameWriter, encode
from skyward.transport.link import greet

__all__ = ["Route", "Server", "serving"]

log = logging.getLogger("skyward.engine")

_GREETING = 10.0

Route = Callable[[Raw, list[Any]], None]


class Server:
    def __init__(
        self,
        epoch: str,
        selector: selectors.BaseSelector,
        clock: Callable[[], float],
        timers: Timers,
        info: Callable[[], InstanceInfo],
    ) -> None:
        self._selector, self._clock, self._timers, self._info = selector, clock, timers, info
        self._state = SharedState(epoch)
        self._routes: dict[str, Route] = {}
        self._unsent: dict[str, _Direct] = {}
        self._directs = 0
        self._due: tuple[float, int] | None = None
        self._receive = Receiver(AskerToServer, self).receive

    def receive(self, asker: str, message: Raw, buffers: Buffers, route: Route) -> None:
        """Replies go by `route`."""
        if asker not in self._routes:
            self._routes[asker] = route
        self._receive(message, buffers, asker)
        self._flush()

    def gone(self, asker: str, why: str) -> None:
        if self._routes.pop(asker, None) is not None:
            self._deliver(self._state.gone(asker, why, self._clock()))
            self._flush()

    def gone_all(self, prefix: str, why: str) -> None:
        for asker in [asker for asker in self._routes if asker.startswith(prefix)]:
            self.gone(asker, why)

    def lost(self, node: int, rank: int | None, why: str) -> None:
        """A rank, or with None a whole node, whether it has used collections or not."""
        info = self._info()
        ranks = [other for other in range(info.world_size) if info.node_of(other) == node] if rank is None else [rank]
        for each in ranks:
            self._deliver(self._state.lost(each, f"rank {each} is lost: {why}", self._clock()))
        self._flush()

    def end(self, code: str, text: str) -> None:
        self._deliver(self._state.end(code, text))
        self._flush()

    # what processes say

    @handles(AskerToServer.Open)
    def _opened(self, message: AskerToServer.Open, asker: str) -> None:
        info, rank = self._info(), message.rank
        self._state.group.ranks = info.world_size
        self._state.open(asker, message.label, rank if rank is not None and _may_be(asker, rank, info) else None)

    @handles(AskerToServer.Ask)
    def _asked(self, message: AskerToServer.Ask, asker: str) -> None:
        values = [bytes(buffer) for buffer in message.buffers]  # a view would keep all that came with it
        self._deliver(
            self._state.ask(
                asker,
                message.id,
                message.epoch,
                message.kind,
                message.name,
                message.operation,
                message.arguments,
                message.timeout,
                values,
                self._clock(),
            )
        )
        if message.timeout is not None:
            self._set_timer()

    @handles(AskerToServer.Withdraw)
    def _withdrawn(self, message: AskerToServer.Withdraw, asker: str) -> None:
        self._deliver(self._state.withdraw(asker, message.id))

    @handles(AskerToServer.Gone)
    def _asker_gone(self, message: AskerToServer.Gone, asker: str) -> None:
        self.gone(asker, message.why)

    def _deliver(self, answers: list[Answer]) -> None:
        for asker, message, values in answers:
            route = self._routes.get(asker)
            if route is not None:
                route(message, values)

    # time

    def _set_timer(self) -> None:
        due = self._state.due()
        if self._due is not None:
            if self._due[0] <= due:
                return
            self._timers.cancel(self._due[1])
            self._due = None
        if due < float("inf"):
            self._due = due, self._timers.after(due - self._clock(), self._tick)

    def _tick(self) -> None:
        self._due = None
        self._deliver(self._state.tick(self._clock()))
        self._set_timer()
        self._flush()

    # runners of this computer, each with a connection of its own

    def admit(self, sock: socket.socket) -> None:
        self._directs += 1
        direct = _Direct(f"direct/{self._directs}", sock)
        try:
            for piece in encode({"shared": True}):
                sock.sendall(piece)
        except OSError:
            sock.close()
            return
        sock.setblocking(False)
        self._routes[direct.name] = partial(self._queue, direct)
        self._selector.register(sock, selectors.EVENT_READ, partial(self._on_direct, direct))

    def _queue(self, direct: _Direct, message: Raw, values: list[Any]) -> None:
        direct.messages.append(message)
        direct.buffers += values
        self._unsent[direct.name] = direct

    def _on_direct(self, direct: _Direct, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._write(direct)
        alive = True
        try:
            frames, alive = direct.reader.read(direct.sock.recv_into)
            for messages, buffers in frames:
                at = 0
                for message in messages:
                    self._receive(message, buffers[at : at + message[-1]], direct.name)
                    at += message[-1]
        except BlockingIOError:
            pass
        except OSError:
            alive = False
        except Exception:
            log.exception("a runner sent something that is not a message about shared collections")
            alive = False
        self._flush()
        if not alive:
            self._selector.unregister(direct.sock)
            direct.sock.close()
            self.gone(direct.name, "its process has ended")

    def _flush(self) -> None:
        if not self._unsent:
            return
        unsent, self._unsent = self._unsent, {}
        for direct in unsent.values():
            messages, direct.messages = direct.messages, []
            buffers, direct.buffers = direct.buffers, []
            pieces = _encoded(messages, buffers)
            if len(pieces) == 1 and not direct.writer.pending:  # nearly always: it goes at once
                try:
                    sent = direct.sock.send(pieces[0])
                except OSError:
                    sent = 0  # full, or gone, which the next read says
                if sent == len(pieces[0]):
                    continue
                pieces = [memoryview(pieces[0])[sent:]]
            direct.writer.add(pieces)
            self._write(direct)

    def _write(self, direct: _Direct) -> None:
        try:
            done = direct.writer.write(direct.sock.send)
        except OSError:
            direct.writer.clear()  # it is gone, which the next read says
            return
        if done is direct.waits:  # the selector must say when there is room, or need not any more
            direct.waits = not done
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if direct.waits else 0)
            self._selector.modify(direct.sock, events, partial(self._on_direct, direct))


@contextmanager
def serving(path: str, info: InstanceInfo) -> Generator[None]:
    """Serves processes of this computer on a socket at `path`, in a thread."""
    selector, timers = selectors.DefaultSelector(), Timers(time.monotonic)
    server = Server("alone.1", selector, time.monotonic, timers, lambda: info)
    listener, (wake, woken) = local_sockets.listen(path), socket.socketpair()

    def admit(_: int) -> None:
        sock, _ = listener.accept()
        try:
            local_sockets.check_peer(sock)
            greet(sock, None, time.monotonic() + _GREETING)
        except (OSError, ValueError):
            sock.close()  # not one of ours
        else:
            server.admit(sock)

    def serve() -> None:
        while True:
            for key, events in selector.select(min(1.0, max(0.0, timers.due() - time.monotonic()))):
                if key.fileobj is woken:
                    return
                key.data(events)
            timers.run()

    selector.register(listener, selectors.EVENT_READ, admit)
    selector.register(woken, selectors.EVENT_READ, None)
    thread = threading.Thread(target=serve, name="skyward-shared", daemon=True)
    thread.start()
    try:
        yield
    finally:
        wake.close()
        thread.join()
        for key in list(selector.get_map().values()):
            cast(socket.socket, key.fileobj).close()
        selector.close()


def _encoded(messages: list[Raw], buffers: Sequence[Any]) -> list[Buffer]:
    try:
        return encode(messages, buffers)
    except (RecursionError, TypeError, ValueError) as exc:
        if len(messages) > 1:
            return [piece for half in halves(messages, buffers) for piece in _encoded(*half)]
        log.error("an answer about shared collections cannot be sent: %.200s", exc)
        _, id, epoch, *_ = messages[0]
        answer = ServerToAsker.Answer(id, epoch, "too large", f"the answer cannot be sent: {exc}", [])
        return encode([answer.encoded()[0]])


def _may_be(asker: str, rank: int, info: InstanceInfo) -> bool:
    """A process may claim a rank of its own node only."""
    node = asker.partition("/")[0]
    return rank in range(info.world_size) and (node == "direct" or node == str(info.node_of(rank)))


class _Direct:
    def __init__(self, name: str, sock: socket.socket) -> None:
        self.name, self.sock = name, sock
        self.reader, self.writer = FrameReader(), FrameWriter()
        self.messages: list[Raw] = []
        self.buffers: list[Any] = []
        self.waits = False  # whether something waits for the socket to take more
