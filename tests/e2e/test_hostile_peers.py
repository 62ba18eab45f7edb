"""What a client or a runner sends that is not a message ends a connection or a process, never an agent (SEC-7)."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import skyward as sky
from skyward.errors import SkywardError
from tests.support.waiting import until

# pyright: reportPrivateUsage=false


@pytest.fixture(scope="module")
def pool() -> Iterator[sky.ComputePool]:
    with sky.ComputePool(provider=sky.Local(), nodes=2, console=False) as made:
        yield made


@sky.compute
def double(x: int) -> int:
    return 2 * x


def agents(pool: sky.ComputePool) -> list[int]:
    """The process ids of the agents."""
    return [about["pid"] for about in connections(pool).greetings()]


def connections(pool: sky.ComputePool) -> Any:
    engine: Any = pool._fleet.engine  # type: ignore[union-attr]
    return engine._connections


MESSAGES: dict[str, list[Any]] = {
    "an unknown kind": ["explode", 0],
    "no fields": ["call", 0],
    "wrong types": ["recall", 7, 0],
    "a call without anything": ["call", "x", {}, 0],
    "settings without anything": ["info", 5, 0],
    "a negative grace": ["cancel", "x", "y", float("nan"), 0],
    "a blob with a path for a name": ["expect", "../../x", 0],
    "a piece of nothing": ["blob", "x", 10**18, 5, 0],
    "a question of nobody": ["share", "client", ["ask", "x", 0], 0],
    "ports without end": ["ports", -1, 0, 0],
    "deep": ["ask", [[[[]]]], 0],
}


@pytest.mark.parametrize("message", MESSAGES.values(), ids=MESSAGES.keys())
def test_a_message_that_is_none_breaks_the_link_and_not_the_agent(pool: sky.ComputePool, message: list[Any]) -> None:
    before = agents(pool)
    said: Any = SimpleNamespace(encoded=lambda: (message, ()))  # what no client of ours would send
    connections(pool).post(0, [said])
    assert list(double(4) @ pool) == [8, 8]
    assert agents(pool) == before


BYTES = {
    "nonsense": b"\xff" * 100,
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "deep": struct.pack("!II", 100_000, 0) + b"[" * 100_000,
    "a claim": struct.pack("!IIQ", 2, 1, 1 << 62) + b"{}",
    "not an object": struct.pack("!II", 2, 0) + b"[]",
    "bad UTF-8": struct.pack("!II", 4, 0) + b'"\xff"',
}


@pytest.mark.parametrize("data", BYTES.values(), ids=BYTES.keys())
def test_bytes_that_are_no_frame_break_the_link_and_not_the_agent(pool: sky.ComputePool, data: bytes) -> None:
    before = agents(pool)
    link = connections(pool).peers[0].link
    with link.lock:
        link.sock.send(data)
    assert list(double(4) @ pool) == [8, 8]
    assert agents(pool) == before


@sky.compute
def sends(what: str) -> None:
    """Sends nonsense to the agent, as a body can that looks for the socket."""
    import gc
    import time

    from skyward.node.runner import Runner
    from skyward.transport.frames import encode

    runner: Any = next(found for found in gc.get_objects() if isinstance(found, Runner))

    def send(message: Any) -> None:
        runner._write(runner._sock, runner._send_lock, encode([message]))

    if what == "message":
        send(["explode", 0])
    elif what == "types":
        send(["done", 5, [], 0])
    elif what == "metadata":
        call = next(iter(runner._calls.calls))
        send(["done", call, {"s": "soon"}, 0])
    else:
        runner._sock.sendall(b"\xff" * 64)
    time.sleep(60)


@pytest.mark.parametrize("what", ["message", "types", "metadata", "bytes"])
def test_a_runner_that_sends_nonsense_is_ended_and_its_agent_is_not(pool: sky.ComputePool, what: str) -> None:
    before = agents(pool)
    with pytest.raises(SkywardError):
        sends(what) >> pool
    assert list(double(4) @ pool) == [8, 8]
    assert agents(pool) == before


def test_greetings_that_are_none_end_no_agent(pool: sky.ComputePool) -> None:
    from skyward.transport.frames import encode
    from skyward.transport.local_sockets import connect

    before = agents(pool)
    hosts: Any = pool._fleet  # type: ignore[attr-defined]
    path = hosts.by_node[0].keeper.sockets[0]
    hellos: tuple[Any, ...] = (
        {},
        {"session": 5, "received": 0},
        {"session": "x"},
        {"session": "x", "received": "y"},
        {"fetch": 7},
        {"fetch": ["x"]},
        {"share": "x", "session": "s", "received": 0},
        [],
        7,
    )
    for hello in hellos:
        with connect(path, 30) as sock:
            sock.settimeout(30)
            for piece in encode(hello):
                sock.sendall(piece)
            until(lambda sock=sock: sock.recv(1) == b"", what=hello)
    assert list(double(4) @ pool) == [8, 8]
    assert agents(pool) == before
