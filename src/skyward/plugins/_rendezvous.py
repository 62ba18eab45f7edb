"""The nodes of a pool find each other before a framework forms its group.

    node 1 .. n-1  --- pool and number --------------->  node 0, which listens at the group's port until all are there
    node 1 .. n-1  <-- an answer, or who is missing ---  node 0

A node that comes while node 0 is still in an earlier call is refused and tries again, so groups never mix. A framework
that waits for a missing node cannot be stopped, or ends its process. So all waiting is done here, in short steps.
"""

from __future__ import annotations

import json
import select
import selectors
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, cast

from skyward.api.info import InstanceInfo, current_broadcast, current_call, require_peers
from skyward.errors import SkywardError
from skyward.plugins._ranks import called, everyone, this_rank

__all__ = ["Rendezvous"]

_NOTICE = 10.0
_NOTICE_ALONE = 0.5
_STEP = 0.02
_LINE = 65_536
_ADVICE = (
    "A group needs the call on every node: send it with `call() @ pool`; `>>` sends it to one. "
    "If it was, look what keeps the others from starting it, or a firewall from reaching node 0."
)


@dataclass(frozen=True)
class Rendezvous:
    """Where the nodes of a group meet, and how long they wait for each other.

    `group` is what messages call it. `option` is the user's name for the time limit, if there is one.
    """

    group: str
    info: InstanceInfo
    port: int
    seconds: float
    option: str = ""

    def meet(self, answer: Callable[[], Any] = lambda: None) -> Any:
        """Waits for all nodes; returns, on each of them, what `answer` gives on node 0."""
        require_peers(self.info)
        return self._host(answer) if self.info.rank == 0 else self._join()

    def await_listener(self) -> None:
        """Waits until something listens on node 0; a framework that is refused may try again only much later."""
        for _ in self._steps(lambda: [0]):
            try:
                self._connect().close()
                return
            except OSError:
                time.sleep(_STEP)

    def port_taken(self, reason: str) -> SkywardError:
        """The error of a port that was free when the pool opened."""
        return SkywardError(
            f"port {self.port} of node 0, chosen for {self.group} when the pool opened, is not free any more "
            f"({reason}): another program has taken it, or another runner of the node, if the pool has "
            'executor="process". A group has one process a node; open the pool again with one.'
        )

    def _host(self, answer: Callable[[], Any]) -> Any:
        with ExitStack() as stack:
            host = _Host(self._listener(), self.info)
            stack.callback(host.close)
            try:
                for _ in self._steps(host.missing):
                    host.step(_STEP)
            except SkywardError:
                host.reply({"missing": host.missing()})
                raise
            value = answer()
            host.reply({"answer": value})
            return value

    def _join(self) -> Any:
        for _ in self._steps(lambda: [0]):
            try:
                with self._connect() as sock:
                    sock.sendall(_line([self.info.job_id, self.info.rank]))
                    reply = self._reply(sock)
            except (OSError, ValueError):
                time.sleep(_STEP)  # node 0 is not there yet, or has left
                continue
            if "missing" in reply:
                raise self._failure(reply["missing"])
            return reply["answer"]
        raise AssertionError("unreachable")

    def _reply(self, sock: socket.socket) -> dict[str, Any]:
        """What node 0 says in the end: it waits as long as this node, from when it has come itself."""
        deadline = time.monotonic() + self.seconds + 5
        line = b""
        while not line.endswith(b"\n"):
            if time.monotonic() > deadline or len(line) > _LINE:
                raise TimeoutError
            if select.select([sock], [], [], _STEP)[0]:
                data = sock.recv(_LINE)
                if not data:
                    raise ConnectionError
                line += data
        reply: Any = json.loads(line)
        if not isinstance(reply, dict) or not {"missing", "answer"} & reply.keys():
            raise ValueError("not an answer of node 0")
        return cast("dict[str, Any]", reply)

    def _steps(self, missing: Callable[[], list[int]]) -> Iterator[None]:
        """The steps of a wait: one message to the user when it becomes long, an error when the time is over."""
        began, told = time.monotonic(), False
        alone = current_call() is not None and current_broadcast() is None  # then the others may well never come
        while absent := missing():
            waited = time.monotonic() - began
            if waited >= self.seconds:
                raise self._failure(absent)
            if waited > (_NOTICE_ALONE if alone else _NOTICE) and not told:
                told = True
                print(f"{self._waiting(absent)}, at most {self.seconds:g} s. {_ADVICE}", file=sys.stderr, flush=True)
            yield

    def _waiting(self, missing: list[int]) -> str:
        where = f"{self.info.head_addr} port {self.port}"
        return f"{this_rank(self.info)} waits for {called(self.info, missing)} to form {self.group} at {where}"

    def _failure(self, missing: list[int]) -> SkywardError:
        limit = f"{self.option}={self.seconds:g} s" if self.option else f"{self.seconds:g} s"
        return SkywardError(
            f"{self._waiting(missing)}. It needs {everyone(self.info)}, but {called(self.info, missing)} did not come "
            f"within {limit}. {_ADVICE}"
        )

    def _connect(self) -> socket.socket:
        return socket.create_connection((self.info.head_addr, self.port), timeout=5)

    def _listener(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self.info.head_addr else socket.AF_INET
        try:
            return socket.create_server((self.info.head_addr, self.port), family=family, backlog=1024)
        except OSError as exc:
            raise self.port_taken(str(exc.strerror)) from exc


class _Host:
    """Node 0's side: hears every connection, and waits for none of them alone."""

    def __init__(self, listener: socket.socket, info: InstanceInfo) -> None:
        self._listener, self._info = listener, info
        self._selector = selectors.DefaultSelector()
        self._unknown: dict[socket.socket, bytes] = {}  # connections that have not said who they are
        self._guests: dict[int, socket.socket] = {}
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, self._accept)

    def missing(self) -> list[int]:
        """The ranks that are not there."""
        return [rank for rank in range(1, self._info.world_size) if rank not in self._guests]

    def step(self, seconds: float) -> None:
        """Hears what comes within a short time."""
        for key, _ in self._selector.select(seconds):
            key.data(key.fileobj)

    def reply(self, message: dict[str, Any]) -> None:
        """Tells the nodes that are there how it ended. From now on the port is free for the framework."""
        self._selector.unregister(self._listener)
        self._listener.close()
        for guest in self._guests.values():
            try:
                guest.sendall(_line(message))
            except OSError:
                continue  # it has just gone, as the pool will find

    def close(self) -> None:
        """Closes all connections."""
        for key in list(self._selector.get_map().values()):
            cast("socket.socket", key.fileobj).close()
        self._selector.close()

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock = listener.accept()[0]
        except OSError:
            return  # it has gone again
        sock.setblocking(False)
        self._unknown[sock] = b""
        self._selector.register(sock, selectors.EVENT_READ, self._hear)

    def _hear(self, sock: socket.socket) -> None:
        try:
            data = sock.recv(_LINE)
        except OSError:
            data = b""
        line = self._unknown.pop(sock, None)
        node = None
        if data and line is not None:
            line += data
            if not line.endswith(b"\n") and len(line) <= _LINE:
                self._unknown[sock] = line
                return
            node = self._number(line)
        if node is None:
            self._drop(sock)  # a stranger, or a guest that has left: it has nothing more to say
        else:
            self._guests[node] = sock

    def _number(self, line: bytes) -> int | None:
        """The rank that has sent this, if it is one of this pool."""
        try:
            pool, rank = json.loads(line)
        except (ValueError, TypeError):
            return None
        return rank if pool == self._info.job_id and rank in range(1, self._info.world_size) else None

    def _drop(self, sock: socket.socket) -> None:
        self._guests = {node: guest for node, guest in self._guests.items() if guest is not sock}
        self._selector.unregister(sock)
        sock.close()


def _line(message: object) -> bytes:
    return json.dumps(message).encode() + b"\n"
