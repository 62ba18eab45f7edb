"""Nodes that the test speaks for: a real engine, connected over sockets to threads that say what they are told to."""

from __future__ import annotations

import queue
import socket
import threading
import time
from pathlib import Path
from typing import Any

from skyward import events
from skyward.client.call import Call
from skyward.client.engine import Engine
from skyward.client.settings import PoolSettings
from skyward.node.protocol import AgentToClient, Returned
from skyward.transport.codec import Message
from skyward.transport.exceptions import Described
from skyward.transport.frames import encode
from skyward.transport.link import Broken, Link, greet
from skyward.transport.payload import Packer
from tests.support.plans import StillMachines

__all__ = ["FakeNode", "FakePool"]

# pyright: reportPrivateUsage=false


class FakeNode:
    """One node: greets, says that it is ready, and answers calls; the test has it say anything else."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.calls: queue.SimpleQueue[str] = queue.SimpleQueue()
        """The ids of calls that it has got and not answered by itself."""
        self.answers = True
        """Whether it answers calls at once, with its own number."""
        self.about: dict[str, Any] = {}
        self.failure: tuple[Described, bytes] | None = None
        """Says, instead of being ready, that a hook has raised this."""
        self.link = Link()
        self._lock = threading.Lock()
        self._closed = False

    def connect(self) -> socket.socket:
        """The client's end of a new connection."""
        near, far = socket.socketpair()
        threading.Thread(target=self._serve, args=(far,), daemon=True).start()
        return near

    def say(self, *messages: Any, buffers: tuple[bytes, ...] = ()) -> None:
        """Sends messages to the client."""
        self.link.post(list(messages), buffers)

    def tell(self, message: Message) -> None:
        """Sends a message to the client."""
        raw, buffers = message.encoded()
        self.link.post([raw], buffers)

    def write(self, data: bytes) -> None:
        """Sends bytes to the client, whatever they are."""
        with self.link.lock:
            sock = self.link.sock
            if sock is not None:
                try:
                    sock.setblocking(True)
                    sock.settimeout(10)
                    sock.sendall(data)
                except OSError:
                    pass  # the client has broken the connection
                finally:
                    try:
                        sock.setblocking(False)
                    except OSError:
                        pass

    def write_frame(self, header: Any, buffers: tuple[bytes, ...] = ()) -> None:
        """Sends a frame with any header."""
        self.write(b"".join(bytes(piece) for piece in encode(header, buffers)))

    def done(self, id: str, value: object) -> None:
        """Says that a call has returned."""
        head, buffers = Packer().pack(value, "a result")
        self.tell(Returned(id=id, seconds=0.001, buffers=[bytes(head), *map(bytes, buffers)]))

    def close(self) -> None:
        self._closed = True
        self.link.detach()

    def _serve(self, sock: socket.socket) -> None:
        try:
            hello = greet(sock, None, time.monotonic() + 30)
            answer = {"incarnation": f"agent {self.number}", "received": self.link.received, **self.about}
            answer["session"] = hello["session"]
            for piece in encode(answer):
                sock.sendall(piece)
        except (OSError, ValueError):
            sock.close()
            return
        with sock, self._lock:  # of two connections the later one counts
            self.link.attach(sock, hello["received"])
            while not self._closed and self.link.sock is sock:
                try:
                    arrived, _ = self.link.read()
                except Broken:
                    self.link.detach()
                    return
                for messages, _ in arrived:
                    for message in messages:
                        self._answer(message)
                self.link.flush()
                self.link.acknowledge()
                time.sleep(0.002)

    def _answer(self, message: list[Any]) -> None:
        if message[0] == "ports":
            self.tell(AgentToClient.Ports([1001, 1002, 1003][: message[1]], message[2]))
        elif message[0] == "setup" and self.failure is not None:
            self.tell(AgentToClient.Failed(self.failure[0], message[1]["generation"], [self.failure[1]]))
        elif message[0] == "setup":
            self.tell(AgentToClient.Ready(message[1]["generation"]))
        elif message[0] == "call" and self.answers:
            self.done(message[1], self.number)
        elif message[0] == "call":
            self.calls.put(message[1])


class _Machines(StillMachines):
    def __init__(self, nodes: list[FakeNode]) -> None:
        super().__init__()
        self._nodes = nodes

    def reach(self, node: int) -> socket.socket:
        return self._nodes[node].connect()

    def setup(self, node: int, greetings: list[dict[str, Any]], ports: list[int]) -> tuple[dict[str, Any], list[Any]]:
        return {"info": "{}"}, []


class FakePool:
    """An engine and its nodes; `events` are those that it has emitted."""

    def __init__(self, directory: Path, nodes: int = 2, *, local: bool = True, **plan: Any) -> None:
        self.nodes = [FakeNode(number) for number in range(nodes)]
        self.events: list[events.Event] = []
        known: dict[str, Any] = {
            "pool": "p",
            "nodes": nodes,
            "slots": 4,
            "emit": self.events.append,
            "listening": lambda: True,
            "release": lambda digests: None,
            "gang": False,
            "local": local,
            "lease": 0.0 if local else 60.0,
            "directory": str(directory),
        }
        self.engine = Engine(PoolSettings(**(known | plan)), _Machines(self.nodes))

    def __enter__(self) -> FakePool:
        self.engine.open(time.monotonic() + 60)
        return self

    def __exit__(self, *exc: object) -> None:
        for node in self.nodes:
            node.close()
        self.engine.abandon()

    def made(self, *arguments: bytes) -> Call:
        """A call that was not sent."""
        about = {"name": "f", "fn": "", "split": 1, "attempt": 0}
        return Call(_Pending("f"), about, [b"f", *arguments], {}, {}, 0)  # type: ignore[arg-type]

    def call(self, node: int) -> Call:
        """Sends a call to a node."""
        made = self.made(b"x")
        self.engine.send_to([(node, made)])
        return made

    def works(self, node: int) -> bool:
        """Whether a call to a node returns."""
        return self.call(node).future.result(30) == node

    def alive(self) -> bool:
        """Whether the thread that reads all links still does."""
        return self.engine.thread.is_alive() and not self.engine._closing


class _Pending:
    """What a call is made of, as far as the engine looks."""

    chunk = None

    def __init__(self, name: str) -> None:
        self.name = name
