"""A link over real connections that break, with TLS and without: every message arrives once and in order, both ways."""

from __future__ import annotations

import random
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from skyward.transport.certificates import Authority, context
from skyward.transport.frames import Malformed, TooLarge, encode
from skyward.transport.link import Broken, Link, greet, tune


class Wire:
    """Connects two links, over TLS on loopback or over unix sockets, and cuts the connection."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        authority = Authority("test", 3600)
        self._client = context(authority.issue("client"), server=False)
        self._server = context(authority.issue("node-0"), server=True)
        self._listener = socket.create_server(("127.0.0.1", 0))

    def close(self) -> None:
        self._listener.close()

    def pair(self) -> tuple[socket.socket, socket.socket]:
        """A connection, as the client and the node see it."""
        if self._kind == "unix":
            return socket.socketpair()
        accepted: list[ssl.SSLSocket] = []

        def accept() -> None:
            raw, _ = self._listener.accept()
            tune(raw)
            accepted.append(self._server.wrap_socket(raw, server_side=True))

        thread = threading.Thread(target=accept)
        thread.start()
        raw = socket.create_connection(self._listener.getsockname(), 5)
        tune(raw)
        sock = self._client.wrap_socket(raw)
        thread.join(60)
        return sock, accepted[0]

    def join(self, a: Link, b: Link) -> None:
        """A new connection; each side says what it has seen, as in the greeting."""
        ours, theirs = self.pair()
        seen_by_a, seen_by_b = a.received, b.received
        a.attach(ours, seen_by_b)
        b.attach(theirs, seen_by_a)


@pytest.fixture(scope="module", params=["tls", "unix"])
def wire(request: pytest.FixtureRequest) -> Iterator[Wire]:
    made = Wire(request.param)
    yield made
    made.close()


Heard = list[tuple[Any, list[bytes]]]


def read(link: Link, into: Heard) -> bool:
    """Reads what is there; False when the connection is gone."""
    more = True
    while more:
        try:
            arrived, more = link.read()
        except Broken:
            return False
        into += [(messages, list(map(bytes, buffers))) for messages, buffers in arrived]
    return True


def settle(pairs: list[tuple[Link, Heard]], wanted: list[int], seconds: float = 10.0) -> None:
    """Reads and writes on all links until each has heard as many frames as wanted."""
    deadline = time.monotonic() + seconds
    while any(len(heard) < count for (_, heard), count in zip(pairs, wanted, strict=True)):
        assert time.monotonic() < deadline, [len(heard) for _, heard in pairs]
        with selectors.DefaultSelector() as selector:
            for link, _ in pairs:
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.writing else 0)
                selector.register(link.sock, events)  # type: ignore[arg-type]
            selector.select(0.05)
        for link, heard in pairs:
            link.flush()
            assert read(link, heard)


def test_messages_go_both_ways_in_order(wire: Wire) -> None:
    a, b = Link(), Link()
    wire.join(a, b)
    at_a: Heard = []
    at_b: Heard = []
    for i in range(50):
        assert a.post([["call", i]], [bytes([i])])
        b.post([["done", i]])
    settle([(a, at_a), (b, at_b)], [50, 50])
    assert at_b == [([["call", i]], [bytes([i])]) for i in range(50)]
    assert at_a == [([["done", i]], []) for i in range(50)]
    a.detach()
    b.detach()


def test_what_is_posted_before_there_is_a_connection_arrives_with_the_first(wire: Wire) -> None:
    a, b = Link(), Link()
    a.post(["early"])
    heard: Heard = []
    wire.join(a, b)
    settle([(a, []), (b, heard)], [0, 1])
    assert heard == [(["early"], [])]
    a.detach()
    b.detach()


def test_large_buffers_wait_for_the_socket_and_arrive(wire: Wire) -> None:
    a, b = Link(), Link()
    wire.join(a, b)
    big = random.Random(1).randbytes(20 << 20)
    assert a.post(["big"], [b"small", big]) is False
    assert a.writing
    heard: Heard = []
    settle([(a, []), (b, heard)], [0, 1], 30)
    assert heard == [(["big"], [b"small", big])]
    assert not a.writing
    a.detach()
    b.detach()


def test_acknowledged_frames_are_forgotten(wire: Wire) -> None:
    a, b = Link(), Link()
    wire.join(a, b)
    heard: Heard = []
    for i in range(10):
        a.post([i], [b"x" * 1000])
    assert a.kept_bytes > 10_000
    settle([(a, []), (b, heard)], [0, 10])
    b.acknowledge()
    deadline = time.monotonic() + 60
    while a.kept_bytes and time.monotonic() < deadline:
        read(a, [])
    assert a.kept_bytes == 0
    assert b.received == 10
    a.detach()
    b.detach()


def test_a_silent_reader_acknowledges_by_itself_after_a_while(wire: Wire) -> None:
    """A side that only listens must not make the other keep everything."""
    a, b = Link(), Link()
    wire.join(a, b)
    at_a: Heard = []
    at_b: Heard = []
    for i in range(1000):
        a.post([i], [b"x" * 100])
        if i % 50 == 49:
            settle([(a, at_a), (b, at_b)], [0, i + 1])
    read(a, at_a)
    assert a.kept_bytes < 100 * 300
    assert at_a == []
    a.detach()
    b.detach()


def test_a_broken_connection_says_so_after_what_had_arrived(wire: Wire) -> None:
    a, b = Link(), Link()
    wire.join(a, b)
    a.post(["last words"])
    a.detach()
    heard: Heard = []
    deadline = time.monotonic() + 60
    while read(b, heard) and time.monotonic() < deadline:
        pass
    assert heard == [(["last words"], [])]
    assert b.sock is None
    with pytest.raises(Broken):
        b.read()
    b.detach()


def test_unacknowledged_frames_are_sent_again_and_none_twice(wire: Wire) -> None:
    """Some were read, some lie in the socket, some were posted while there was none."""
    a, b = Link(), Link()
    at_a: Heard = []
    at_b: Heard = []
    wire.join(a, b)
    for i in range(10):
        a.post([i])
        b.post([-i])
    settle([(a, at_a), (b, at_b)], [10, 10])
    for i in range(10, 20):
        a.post([i])
        b.post([-i])
    a.detach()
    b.detach()
    for i in range(20, 30):
        a.post([i])
        b.post([-i])
    wire.join(a, b)
    settle([(a, at_a), (b, at_b)], [30, 30])
    assert [messages for messages, _ in at_b] == [[i] for i in range(30)]
    assert [messages for messages, _ in at_a] == [[-i] for i in range(30)]
    a.detach()
    b.detach()


def test_a_frame_cut_in_the_middle_comes_whole_over_the_next_connection(wire: Wire) -> None:
    a, b = Link(), Link()
    wire.join(a, b)
    big = random.Random(2).randbytes(8 << 20)
    heard: Heard = []
    a.post(["before"])
    a.post(["big"], [big])
    settle([(a, []), (b, heard)], [0, 1])
    read(b, heard)
    assert len(heard) == 1
    b.detach()
    a.detach()
    a.post(["after"])
    wire.join(a, b)
    settle([(a, []), (b, heard)], [0, 3], 30)
    assert heard == [(["before"], []), (["big"], [big]), (["after"], [])]
    a.detach()
    b.detach()


def test_a_link_may_be_attached_while_it_believes_in_the_old_connection(wire: Wire) -> None:
    """One side notices a break before the other does: the new connection replaces the old one."""
    a, b = Link(), Link()
    wire.join(a, b)
    a.post(["one"])
    heard: Heard = []
    settle([(a, []), (b, heard)], [0, 1])
    a.detach()
    a.post(["two"])
    old = b.sock
    assert old is not None
    wire.join(a, b)
    settle([(a, []), (b, heard)], [0, 2])
    old.close()  # whoever attaches a link without detaching it first has the old socket to close
    assert heard == [(["one"], []), (["two"], [])]
    a.detach()
    b.detach()


def test_threads_may_post_at_once(wire: Wire) -> None:
    a, b = Link(), Link()
    wire.join(a, b)
    heard: Heard = []

    def work(number: int) -> None:
        for i in range(100):
            a.post([number, i], [b"y" * 300])

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    settle([(a, []), (b, heard)], [0, 400])
    for thread in threads:
        thread.join()
    for number in range(4):
        assert [m[1] for m, _ in heard if m[0] == number] == list(range(100))
    a.detach()
    b.detach()


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("a"), st.integers(0, 60_000)),
        st.tuples(st.just("b"), st.integers(0, 60_000)),
        st.tuples(st.sampled_from(["read a", "read b", "cut", "cut a", "cut b", "ack"]), st.just(0)),
    ),
    max_size=25,
)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
def test_wherever_the_connection_is_cut_nothing_is_lost_or_doubled(wire: Wire, steps: list[tuple[str, int]]) -> None:
    links = {"a": Link(), "b": Link()}
    sent: dict[str, int] = {"a": 0, "b": 0}
    heard: dict[str, Heard] = {"a": [], "b": []}
    wire.join(links["a"], links["b"])
    for act, size in steps:
        name = act[-1]
        if act in ("a", "b"):
            links[act].post([sent[act]], [bytes([sent[act] % 251]) * size])
            sent[act] += 1
        elif act.startswith("read") and links[name].sock is not None:
            read(links[name], heard[name])
        elif act == "ack":
            for link in links.values():
                link.acknowledge()
        elif act.startswith("cut"):
            for each in ("a", "b") if act == "cut" else (name,):
                links[each].detach()
            for link in links.values():
                link.detach()
            wire.join(links["a"], links["b"])
    settle([(links["a"], heard["a"]), (links["b"], heard["b"])], [sent["b"], sent["a"]])
    for name, other in (("a", "b"), ("b", "a")):
        assert [messages for messages, _ in heard[name]] == [[i] for i in range(sent[other])]
        assert all(set(buffers[0]) <= {messages[0] % 251} for messages, buffers in heard[name])
        links[name].detach()


def test_what_the_other_side_would_refuse_is_not_sent_and_the_link_goes_on(wire: Wire) -> None:
    a, b = Link(), Link()
    wire.join(a, b)
    heard: Heard = []
    a.post(["before"])
    with pytest.raises(TooLarge):
        a.post(["k" * (33 << 20)])
    a.post(["after"])
    settle([(a, []), (b, heard)], [0, 2])
    assert [messages for messages, _ in heard] == [["before"], ["after"]]
    b.acknowledge()
    a.detach()
    b.detach()


@pytest.mark.parametrize(
    "header", [{"a": 0, "s": 1}, {"a": 0, "m": []}, {"a": 0, "s": 1, "x": []}, {"a": 0, "s": 1, "m": [], "x": 0}]
)
def test_a_frame_with_other_fields_than_ours_is_none(wire: Wire, header: dict[str, Any]) -> None:
    b = Link()
    ours, theirs = wire.pair()
    b.attach(theirs, 0)
    for piece in encode(header):
        ours.sendall(piece)
    with pytest.raises(Malformed, match="other fields"):
        while True:
            b.read()
    ours.close()
    b.detach()


def test_a_link_counts_how_often_in_a_row_it_cannot_read_the_next_frame(wire: Wire) -> None:
    a, b = Link(), Link()
    for expected in (1, 2):
        ours, theirs = wire.pair()
        b.attach(theirs, 0)
        ours.sendall(b"\xff" * 64)
        with pytest.raises(Malformed):
            while True:
                b.read()
        assert b.unread == expected
        ours.close()
        b.detach()
    a.post(["good"])
    heard: Heard = []
    wire.join(a, b)
    settle([(a, []), (b, heard)], [0, 1])
    assert (heard, b.unread) == ([(["good"], [])], 0)
    a.detach()
    b.detach()


def test_a_greeting_takes_nothing_that_follows_it(wire: Wire) -> None:
    ours, theirs = wire.pair()
    a, b = Link(), Link()
    deadline = time.monotonic() + 60
    answers: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: answers.append(greet(theirs, None, deadline)))
    thread.start()
    for piece in encode({"hello": "node"}):
        ours.sendall(piece)
    a.attach(ours, 0)
    a.post(["follows at once"])
    thread.join(60)
    assert answers == [{"hello": "node"}]
    heard: Heard = []
    b.attach(theirs, 0)
    settle([(a, []), (b, heard)], [0, 1])
    assert heard == [(["follows at once"], [])]
    a.detach()
    b.detach()


def test_a_greeting_that_never_comes_is_given_up(wire: Wire) -> None:
    ours, theirs = wire.pair()
    with pytest.raises(TimeoutError):
        greet(ours, {"hello": 1}, time.monotonic() + 0.2)
    ours.close()
    with pytest.raises((ConnectionError, ssl.SSLError)):
        for _ in range(2):
            greet(theirs, None, time.monotonic() + 2)
    theirs.close()
