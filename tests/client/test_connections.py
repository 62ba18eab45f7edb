"""The client's connections, as sockets come and go."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from skyward.client.connections import Connections
from skyward.node.receiver import checked_greeting
from skyward.transport.frames import encode


def test_a_new_connection_may_have_the_file_number_of_one_that_was_lost() -> None:
    """As happens when two nodes are replaced at once: the lost one is taken out before the new one is let in."""
    with ExitStack() as stack:
        connections = Connections(2, lambda number: socket.socket())
        lost, peer = socket.socketpair()
        stack.callback(peer.close)
        connections.peers[1].link.sock = lost  # type: ignore[assignment] - any socket does
        connections._register()  # pyright: ignore[reportPrivateUsage]
        number = lost.fileno()
        lost.close()
        connections.peers[1].link.sock = None
        new, peer = socket.socketpair()
        stack.callback(peer.close)
        stack.callback(new.close)
        assert new.fileno() == number
        connections.peers[0].link.sock = new  # type: ignore[assignment] - as above
        connections._register()  # pyright: ignore[reportPrivateUsage]
        peer.send(b"x")
        assert [key.data for key, _ in connections._selector.select(1)] == [0]  # pyright: ignore[reportPrivateUsage]
        connections._selector.close()  # pyright: ignore[reportPrivateUsage]
        connections._wake_read.close()  # pyright: ignore[reportPrivateUsage]
        connections._wake_write.close()  # pyright: ignore[reportPrivateUsage]


class Ears:
    """Follows a connections and keeps what it is told."""

    def __init__(self) -> None:
        self.heard: queue.SimpleQueue[tuple[int, str, list[Any], list[bytes]]] = queue.SimpleQueue()
        self.broke: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.gone: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
        self.failed: queue.SimpleQueue[tuple[int, list[Any], BaseException]] = queue.SimpleQueue()

    def heed(self, number: int, message: list[Any], buffers: list[Any]) -> None:
        kind, body = message[0], message[1:-1]
        if kind == "bad":
            raise KeyError("a bug")
        self.heard.put((number, kind, body, [bytes(buffer) for buffer in buffers]))

    def mishandled(self, number: int, message: list[Any], error: BaseException) -> None:
        self.failed.put((number, message, error))

    def turn(self) -> bool:
        return False

    def collapse(self, error: BaseException) -> None:
        pytest.fail(f"the I/O thread ended: {error!r}")

    def attached(self, number: int, *, restarted: bool) -> None: ...

    def broken(self, number: int) -> None:
        self.broke.put(number)

    def unreachable(self, number: int, error: Exception) -> None:
        self.gone.put((number, str(error)))

    def pause(self, number: int, error: Exception) -> float | None: ...


class Nodes:
    """A connections whose nodes are plain sockets that the test writes to."""

    def __init__(self, count: int = 2) -> None:
        self.ears = Ears()
        self.connections = Connections(count, lambda number: socket.socket())
        self.connections.follow(self.ears, self.ears)
        self.sockets: dict[int, socket.socket] = {}
        self._sent = [0] * count
        for number in range(count):
            self.connect(number)
        self.connections.thread.start()

    def connect(self, number: int) -> None:
        near, self.sockets[number] = socket.socketpair()
        with self.connections.changed:
            self.connections.peers[number].link.attach(near, 0)  # type: ignore[arg-type] - any socket does
            self.connections._unsettled = True  # pyright: ignore[reportPrivateUsage]
        self.connections._wake()  # pyright: ignore[reportPrivateUsage]

    def say(self, number: int, messages: Any, buffers: tuple[bytes, ...] = (), **header: Any) -> None:
        self._sent[number] += 1
        self.write(number, {"s": self._sent[number], "a": 0, "m": messages, **header}, buffers)

    def write(self, number: int, header: Any, buffers: tuple[bytes, ...] = ()) -> None:
        for piece in encode(header, buffers):
            self.sockets[number].sendall(piece)

    def close(self) -> None:
        self.connections.close()
        for sock in self.sockets.values():
            sock.close()


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    made = Nodes()
    yield made
    made.close()


def test_messages_are_passed_on_with_their_buffers(nodes: Nodes) -> None:
    nodes.say(1, [["done", "a", {}, 1], ["out", 0], ["part", 2]], (b"1", b"2", b"3"))
    got = [nodes.ears.heard.get(timeout=10) for _ in range(3)]
    assert got == [(1, "done", ["a", {}], [b"1"]), (1, "out", [], []), (1, "part", [], [b"2", b"3"])]


@pytest.mark.parametrize(
    "header",
    [
        {"s": 1, "m": []},  # no "a"
        {"s": "one", "a": 0, "m": []},
        {"s": 1, "a": 0},  # no messages
        {"s": 1, "a": 0, "m": {"done": 0}},
        {"s": 1, "a": 0, "m": ["done"]},
        {"s": 1, "a": 0, "m": [[]]},
        {"s": 1, "a": 0, "m": [["done"]]},
        {"s": 1, "a": 0, "m": [["done", "x"]]},
        {"s": 1, "a": 0, "m": [["done", True]]},
        {"s": 1, "a": 0, "m": [["done", -1]]},
        {"s": 1, "a": 0, "m": [["done", 1]]},  # more buffers than there are
        {"s": 1, "a": 0, "m": [[7, 0]]},
        [],
        None,
        "hello",
    ],
)
def test_a_frame_that_is_none_breaks_the_connection_to_its_node_only(nodes: Nodes, header: Any) -> None:
    nodes.write(0, header)
    assert nodes.ears.broke.get(timeout=10) == 0
    assert not nodes.connections.connected(0)
    nodes.say(1, [["done", "a", 0]])
    assert nodes.ears.heard.get(timeout=10) == (1, "done", ["a"], [])
    nodes.sockets[0].close()
    nodes.connect(0)
    nodes.say(0, [["done", "b", 0]], s=2)
    assert nodes.ears.heard.get(timeout=10) == (0, "done", ["b"], [])


def test_a_node_that_goes_on_sending_nonsense_is_given_up(nodes: Nodes) -> None:
    """What it has sent comes again after each break: without an end its calls would wait for ever."""
    for _ in range(2):
        nodes.write(0, {"s": 1, "m": []})
        assert nodes.ears.broke.get(timeout=10) == 0
        nodes.sockets[0].close()
        nodes.connect(0)
    nodes.write(0, {"s": 1, "m": []})
    number, why = nodes.ears.gone.get(timeout=10)
    assert number == 0
    assert "no message of ours" in why
    nodes.say(1, [["done", "a", 0]])
    assert nodes.ears.heard.get(timeout=10)[0] == 1


def test_a_message_in_whose_handling_we_fail_is_told_and_the_next_is_handled(nodes: Nodes) -> None:
    nodes.say(0, [["bad", "call", {}, 1], ["done", "b", 1]], (b"x", b"y"))
    number, message, error = nodes.ears.failed.get(timeout=10)
    assert (number, message, type(error)) == (0, ["bad", "call", {}, 1], KeyError)
    assert nodes.ears.heard.get(timeout=10) == (0, "done", ["b"], [b"y"])
    assert nodes.connections.connected(0)


def test_what_is_put_off_is_done_by_the_io_thread_without_the_lock(nodes: Nodes) -> None:
    connections, seen, done = nodes.connections, list[Any](), threading.Event()

    def act(i: int) -> None:
        def try_lock() -> bool:
            free = connections.lock.acquire(timeout=10)
            connections.lock.release()
            return free

        with ThreadPoolExecutor(1) as other:
            free = other.submit(try_lock).result()
        seen.append((i, threading.current_thread() is connections.thread, free))
        done.set()

    def fail() -> None:
        raise ValueError("a bug")

    with connections.lock:
        connections.defer(fail)
        connections.defer(act, 1)
    assert done.wait(10)
    assert seen == [(1, True, True)]


def test_what_is_put_off_after_the_end_is_done_at_once(nodes: Nodes) -> None:
    nodes.connections.close()
    seen: list[int] = []
    nodes.connections.defer(seen.append, 1)
    assert seen == [1]


@pytest.mark.parametrize("welcome", [None, [], {}, {"incarnation": "x"}, {"incarnation": 1, "received": 0}, "hello"])
def test_a_greeting_that_is_none_counts_as_a_failed_attempt(nodes: Nodes, welcome: Any) -> None:
    with pytest.raises(ValueError, match="no agent"):
        checked_greeting(welcome)


def test_whatever_an_attempt_to_connect_raises_the_node_is_tried_again() -> None:
    tries: list[int] = []

    class Patience(Ears):
        def pause(self, number: int, error: Exception) -> float | None:
            return 0.001 if len(tries) < 3 else None

    def reach(number: int) -> socket.socket:
        tries.append(number)
        raise RuntimeError("no tunnel")

    connections = Connections(1, reach)
    ears = Patience()
    connections.follow(ears, ears)
    connections._reconnect(0)  # pyright: ignore[reportPrivateUsage] - what its thread does
    assert tries == [0, 0, 0]
    connections.connect(0, 0.0)
    assert ears.gone.get(timeout=10) == (0, "no tunnel")
    connections.thread.start()
    connections.close()


def test_messages_before_the_one_that_is_none_are_handled(nodes: Nodes) -> None:
    nodes.say(0, [["done", "a", 0], ["done", "b", 0], "nonsense"])
    assert [nodes.ears.heard.get(timeout=10)[2] for _ in range(2)] == [["a"], ["b"]]
    assert nodes.ears.broke.get(timeout=10) == 0
