"""The client's connections, as sockets come and go."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from skyward.client.connections import Connections, Event, Greeted, Heard, Lost, NotReached, Unreachable
from skyward.errors import ClockSkew
from skyward.node.settings import Refused, checked_greeting
from skyward.transport import certificates, frames
from skyward.transport.frames import FrameReader, encode
from skyward.transport.link import greet
from skyward.transport.roles import CLIENT, node_role
from tests.support.waiting import until


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


def next_event(connections: Connections, events: deque[Event] | None = None) -> Event:
    """What connections see next; `events` are those that they have seen already."""
    events = deque() if events is None else events
    deadline = time.monotonic() + 10
    while not events:
        assert time.monotonic() < deadline, "nothing happens"
        events += connections.poll(0.2)
    return events.popleft()


def heard(event: Event) -> tuple[int, str, list[Any], list[bytes]]:
    """A message: its node, its kind, its fields, its buffers."""
    assert isinstance(event, Heard)
    return event.number, event.message[0], event.message[1:-1], [bytes(buffer) for buffer in event.buffers]


def lost(event: Event) -> int:
    """The node to which the connection is gone."""
    assert isinstance(event, Lost)
    return event.number


class Nodes:
    """Connections whose nodes are plain sockets that the test writes to."""

    def __init__(self, count: int = 2) -> None:
        self.connections = Connections(count, lambda number: socket.socket())
        self.sockets: dict[int, socket.socket] = {}
        self._sent = [0] * count
        self._events: deque[Event] = deque()
        for number in range(count):
            self.connect(number)

    def connect(self, number: int) -> None:
        near, self.sockets[number] = socket.socketpair()
        peer = self.connections.peers[number]
        answer = {"incarnation": "first", "received": 0}
        assert self.connections.attach(Greeted(number, peer.link, near, answer)) is False

    def next(self) -> Event:
        """What happens next."""
        return next_event(self.connections, self._events)

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
    got = [heard(nodes.next()) for _ in range(3)]
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
    assert lost(nodes.next()) == 0
    assert not nodes.connections.connected(0)
    nodes.say(1, [["done", "a", 0]])
    assert heard(nodes.next()) == (1, "done", ["a"], [])
    nodes.sockets[0].close()
    nodes.connect(0)
    nodes.say(0, [["done", "b", 0]], s=2)
    assert heard(nodes.next()) == (0, "done", ["b"], [])


def test_a_node_that_goes_on_sending_nonsense_is_given_up(nodes: Nodes) -> None:
    """What it has sent comes again after each break: without an end its calls would wait for ever."""
    for _ in range(2):
        nodes.write(0, {"s": 1, "m": []})
        assert lost(nodes.next()) == 0
        nodes.sockets[0].close()
        nodes.connect(0)
    nodes.write(0, {"s": 1, "m": []})
    event = nodes.next()
    assert isinstance(event, Unreachable)
    assert event.number == 0
    assert "not a message of ours" in str(event.error)
    nodes.say(1, [["done", "a", 0]])
    assert heard(nodes.next())[0] == 1


@pytest.mark.parametrize("welcome", [None, [], {}, {"incarnation": "x"}, {"incarnation": 1, "received": 0}, "hello"])
def test_a_greeting_that_is_none_counts_as_a_failed_attempt(nodes: Nodes, welcome: Any) -> None:
    with pytest.raises(ValueError, match="not one of our agents"):
        checked_greeting(welcome, "s")


def test_a_welcome_to_another_session_is_refused() -> None:
    """An agent that speaks with somebody else has nothing to say to us."""
    with pytest.raises(Refused, match="another session"):
        checked_greeting({"incarnation": "x", "received": 0, "session": "other"}, "s")


def test_a_node_that_refuses_is_not_asked_again_and_its_reason_is_told() -> None:
    ends: list[socket.socket] = []

    def reach(number: int) -> socket.socket:
        near, far = socket.socketpair()
        ends.append(far)
        for piece in encode({"refused": "the session is none of this pool"}):
            far.sendall(piece)
        return near

    connections = Connections(1, reach)
    connections.connect(0, time.monotonic() + 600)
    event = next_event(connections)
    assert isinstance(event, Unreachable)
    assert "none of this pool" in str(event.error)
    connections.reconnect(0)
    event = next_event(connections)
    assert isinstance(event, NotReached)
    assert "none of this pool" in str(event.error)
    assert len(ends) == 2
    connections.close()
    for end in ends:
        end.close()


@pytest.mark.parametrize("ahead", [False, True])
def test_a_node_whose_clock_is_wrong_by_days_is_named_at_once(ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 24: it refuses a certificate that was made just now."""
    authority = certificates.Authority("p", 3600)
    server = certificates.context(authority.issue(node_role(0)), server=True)
    if ahead:
        authority.lifetime = -1.0
    else:
        monkeypatch.setattr(certificates, "_DAY", -3600.0)
    client = certificates.context(authority.issue(CLIENT), server=False)

    def serve(far: socket.socket) -> None:
        with far, contextlib.suppress(OSError):
            server.wrap_socket(far, server_side=True).recv(1)

    def reach(number: int) -> socket.socket:
        near, far = socket.socketpair()
        threading.Thread(target=serve, args=(far,), daemon=True).start()
        return certificates.secure(near, client, 30.0, node_role(0))

    connections = Connections(1, reach)
    connections.connect(0, time.monotonic() + 600)
    event = next_event(connections)
    assert isinstance(event, Unreachable)
    assert isinstance(event.error, ClockSkew)
    assert "differ by more than a day" in str(event.error)
    connections.close()


def test_all_sessions_of_a_pool_begin_alike_and_no_two_are_the_same() -> None:
    connections = Connections(3, lambda number: socket.socket(), session="pool")
    before = [peer.session for peer in connections.peers]
    connections.renounce(1)
    sessions = {*before, *(peer.session for peer in connections.peers)}
    assert len(sessions) == 4
    assert all(session.startswith("pool") for session in sessions)
    connections.close()


def test_whatever_an_attempt_to_connect_raises_is_told() -> None:
    tries: list[int] = []

    def reach(number: int) -> socket.socket:
        tries.append(number)
        raise RuntimeError("no tunnel")

    connections = Connections(1, reach)
    for _ in range(3):
        connections.reconnect(0, 0.001)
        event = next_event(connections)
        assert isinstance(event, NotReached)
        assert str(event.error) == "no tunnel"
    assert tries == [0, 0, 0]
    connections.connect(0, 0.0)
    event = next_event(connections)
    assert isinstance(event, Unreachable)
    assert (event.number, str(event.error)) == (0, "no tunnel")
    connections.close()


def test_a_machine_that_refuses_twice_is_set_up_again() -> None:
    revived: list[int] = []

    def reach(number: int) -> socket.socket:
        raise ConnectionRefusedError

    connections = Connections(1, reach, revived.append)
    for expected in ([], [], [0], [0, 0]):
        connections.reconnect(0)
        assert isinstance(next_event(connections), NotReached)
        assert revived == expected
    connections.close()


def test_no_attempt_is_made_after_connecting_was_stopped() -> None:
    tries: list[int] = []
    connections = Connections(1, lambda number: tries.append(number) or socket.socket())
    connections.stop_connecting()
    connections.reconnect(0, 600)
    connections.connect(0, time.monotonic() + 600)
    until(lambda: not any(t.name in ("skyward-connect", "skyward-reconnect") for t in threading.enumerate()))
    assert tries == []
    connections.close()


def test_a_greeting_that_comes_after_the_node_was_given_up_is_not_used(nodes: Nodes) -> None:
    near, far = socket.socketpair()
    with far:
        event = Greeted(0, nodes.connections.peers[0].link, near, {"incarnation": "first", "received": 0})
        nodes.connections.renounce(0)
        assert nodes.connections.attach(event) is None
        assert near.fileno() == -1


def said(encoded: list[Any], *buffers: bytes) -> Any:
    """A message that is this on the wire."""
    return SimpleNamespace(encoded=lambda: (encoded, buffers))


def test_what_a_full_socket_did_not_take_is_sent_while_nothing_else_happens(nodes: Nodes) -> None:
    """The thread that polls listens for a socket with room only if it was woken and told to."""
    seen: list[Event] = []
    stopped = threading.Event()

    def poll() -> None:
        while not stopped.is_set():
            seen.extend(nodes.connections.poll(600))

    polling = threading.Thread(target=poll)
    polling.start()
    try:
        nodes.say(0, [["done", "a", 0]])
        until(lambda: seen)
        nodes.connections.post(0, [said(["call", "b", {}, 1], bytes(8 << 20))])
        nodes.sockets[0].settimeout(60)
        arrived = 0
        while arrived < 8 << 20:
            arrived += len(nodes.sockets[0].recv(1 << 20))
    finally:
        stopped.set()
        nodes.connections.wake()
        polling.join(60)


def test_what_was_read_before_a_node_was_given_up_is_known_to_be_old(nodes: Nodes) -> None:
    nodes.say(0, [["done", "a", 0]])
    event = nodes.next()
    assert isinstance(event, Heard)
    assert nodes.connections.current(0, event.link)
    nodes.connections.renounce(0)
    assert not nodes.connections.current(0, event.link)
    assert nodes.connections.poll(0) == [], "nothing is lost that was given up"
    nodes.sockets[0].settimeout(10)
    while nodes.sockets[0].recv(4096):
        pass  # an acknowledgement; then the end


def test_another_agent_than_before_begins_a_fresh_link(nodes: Nodes) -> None:
    link = nodes.connections.peers[0].link
    near, far = socket.socketpair()
    with far:
        answer = {"incarnation": "second", "received": 7}
        assert nodes.connections.attach(Greeted(0, link, near, answer)) is True
        assert not nodes.connections.current(0, link)


def test_messages_before_the_one_that_is_none_are_handled(nodes: Nodes) -> None:
    nodes.say(0, [["done", "a", 0], ["done", "b", 0], "nonsense"])
    assert [heard(nodes.next())[2] for _ in range(2)] == [["a"], ["b"]]
    assert lost(nodes.next()) == 0


def test_a_node_that_cannot_read_what_it_is_sent_is_given_up_in_words() -> None:
    """What it cannot read would be sent again over every new connection, for ever."""
    near, far = socket.socketpair()
    with far:
        connections = Connections(1, lambda number: near)
        threading.Thread(target=answer_greeting, args=(far, {"received": 0, "unread": 3}), daemon=True).start()
        connections.reconnect(0)
        event = next_event(connections)
        assert isinstance(event, Unreachable)
        assert "could not read what it was sent" in str(event.error)
        assert near.fileno() < 0
        connections.close()


def answer_greeting(sock: socket.socket, more: dict[str, Any]) -> None:
    """Answers the client's greeting as an agent does."""
    hello = greet(sock, None, time.monotonic() + 30)
    for piece in encode({"incarnation": "x", "session": hello["session"], **more}):
        sock.sendall(piece)


def test_calls_that_are_too_many_for_one_frame_go_in_several(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "_MAX_HEADER", 200)
    calls = [["call", str(number), {"name": "n" * 50}, 1] for number in range(9)]
    nodes.connections.post(0, [said(call, bytes([number])) for number, call in enumerate(calls)])
    arrived: list[Any] = []
    reader, far = FrameReader(), nodes.sockets[0]
    far.settimeout(30)
    while len(arrived) < 9:
        for header, buffers in reader.read(far.recv_into)[0]:
            arrived += [(message, bytes(buffer)) for message, buffer in zip(header["m"], buffers, strict=True)]
    assert arrived == [(call, bytes([number])) for number, call in enumerate(calls)]
    with pytest.raises(frames.TooLarge):
        nodes.connections.post(0, [said(["call", "x" * 300, {}, 0])])
