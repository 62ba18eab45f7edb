"""Large buffers on their way to nodes, between them, and home."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from skyward.engine import certs
from skyward.engine.cargo import Cargo, Parts
from skyward.engine.freight import Freight
from skyward.engine.link import greet

NAME = "0123456789abcdef" * 2
DATA = os.urandom(700_000)


@pytest.fixture(scope="module")
def authority() -> certs.Authority:
    return certs.Authority("freight")


def freight(path: Path, authority: certs.Authority) -> Freight:
    path.mkdir()
    made = Freight(str(path), certs.context(authority.issue("node-0"), server=False))
    made.shared = False
    return made


def give(node: Freight, data: bytes, piece: int = 200_000) -> bool:
    done = False
    for offset in range(0, len(data), piece):
        done = node.accept(NAME, offset, len(data), data[offset : offset + piece])
    return done


def test_pieces_become_a_file_that_is_seen_only_when_it_is_whole(tmp_path: Path, authority: certs.Authority) -> None:
    node = freight(tmp_path / "a", authority)
    assert not node.accept(NAME, 0, len(DATA), DATA[:200_000])
    assert node.coming(NAME)
    assert os.listdir(tmp_path / "a") == [f"{NAME}.part"]
    paths, missing = node.take({"1": [NAME, len(DATA)]})
    assert missing == {NAME}
    assert node.accept(NAME, 200_000, len(DATA), DATA[200_000:])
    assert Path(paths["1"][0]).read_bytes() == DATA
    assert node.take({"1": [NAME, len(DATA)]})[1] == set()


def test_a_piece_after_one_that_found_no_room_is_not_taken_for_the_rest(
    tmp_path: Path, authority: certs.Authority
) -> None:
    """Row 26: half a buffer never counts as a whole one."""
    node = freight(tmp_path / "a", authority)
    (tmp_path / "a" / f"{NAME}.part").mkdir()  # nothing can be written there
    with pytest.raises(OSError):
        node.accept(NAME, 0, len(DATA), DATA[:200_000])
    (tmp_path / "a" / f"{NAME}.part").rmdir()
    assert not node.accept(NAME, 200_000, len(DATA), DATA[200_000:])
    assert node.take({"1": [NAME, len(DATA)]})[1] == {NAME}


@pytest.fixture
def peers(tmp_path: Path, authority: certs.Authority) -> Iterator[tuple[Freight, Freight, int]]:
    """Two nodes; the first one serves what it has on a port."""
    one, two = freight(tmp_path / "one", authority), freight(tmp_path / "two", authority)
    context = certs.context(authority.issue("node-1"), server=True)
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                raw, _ = listener.accept()
            except OSError:
                return
            sock = context.wrap_socket(raw, server_side=True)
            hello = greet(sock, None, time.monotonic() + 10)
            threading.Thread(target=one.serve, args=(sock, hello["fetch"]), daemon=True).start()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield one, two, listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(5)


def test_a_node_gets_a_buffer_from_its_peer(peers: tuple[Freight, Freight, int], tmp_path: Path) -> None:
    one, two, port = peers
    give(one, DATA)
    two.fetch(NAME, len(DATA), [["127.0.0.1", port]])
    assert two.arrivals.get(timeout=10) == (NAME, True)
    assert (tmp_path / "two" / NAME).read_bytes() == DATA


def test_a_peer_that_is_still_receiving_passes_it_on_afterwards(peers: tuple[Freight, Freight, int]) -> None:
    one, two, port = peers
    one.accept(NAME, 0, len(DATA), DATA[:200_000])
    two.fetch(NAME, len(DATA), [["127.0.0.1", port]])
    one.accept(NAME, 200_000, len(DATA), DATA[200_000:])
    assert two.arrivals.get(timeout=10) == (NAME, True)


def test_a_buffer_that_no_peer_has_is_asked_for_again(peers: tuple[Freight, Freight, int]) -> None:
    _, two, port = peers
    two.fetch(NAME, len(DATA), [["127.0.0.1", port], ["127.0.0.1", 1]])
    assert two.arrivals.get(timeout=10) == (NAME, False)
    assert not two.coming(NAME)


def test_buffers_that_no_call_needs_make_room_for_others(
    tmp_path: Path, authority: certs.Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = freight(tmp_path / "a", authority)
    monkeypatch.setattr("skyward.blobs.room", lambda _: 1_000_000)
    give(node, DATA)
    node.take({"0": [NAME, len(DATA)]})
    other = NAME[::-1]
    node.take({"0": [other, len(DATA)]})
    node.accept(other, 0, len(DATA), DATA)
    assert sorted(os.listdir(tmp_path / "a")) == sorted([NAME, other])  # both are needed
    node.drop([NAME])
    assert os.listdir(tmp_path / "a") == [other]


def test_a_result_goes_home_in_pieces_before_the_word_that_it_is_done(
    tmp_path: Path, authority: certs.Authority
) -> None:
    node = freight(tmp_path / "a", authority)
    result = tmp_path / "a" / ("ab" * 12)
    result.write_bytes(DATA)
    said: list[Any] = []

    def tell(kind: str, *body: Any, buffers: list[Any]) -> None:
        said.append((kind, *body, bytes(buffers[0])))

    about = {"blobs": {"1": [str(result), len(DATA)]}}
    node.ship("call", about, lambda: said.append("done"))
    node.ship("call", [], lambda: said.append("later"))
    node.ship("other", [], lambda: said.append("unrelated"))
    assert said == ["unrelated"]
    assert not node.send(lambda: 0, tell)
    assert said[-2:] == ["done", "later"]
    home = Parts(str(tmp_path))
    for _, name, offset, data in said[1:-2]:
        home.accept(name, offset, data)
    home.place(about)
    assert Path(about["blobs"]["1"][0]).read_bytes() == DATA
    assert not result.exists()


def test_no_more_is_read_than_the_link_takes(tmp_path: Path, authority: certs.Authority) -> None:
    node = freight(tmp_path / "a", authority)
    result = tmp_path / "a" / ("ab" * 12)
    result.write_bytes(DATA)
    node.ship("call", {"blobs": {"1": [str(result), len(DATA)]}}, lambda: None)
    assert node.send(lambda: 5 << 20, lambda *_, **__: pytest.fail("there was no room"))
    node.abandon()
    assert not result.exists()


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "", "AB" * 12, "ab" * 40, "ab" * 12 + "\n"])
def test_a_node_cannot_choose_where_on_the_client_a_result_lies(tmp_path: Path, name: str) -> None:
    """A compromised node must not write or read files of the user's."""
    home = Parts(str(tmp_path))
    with pytest.raises(ValueError, match="no name"):
        home.accept(name, 0, b"x")
    with pytest.raises(ValueError, match="no name"):
        home.place({"blobs": {"0": [name, 1]}})


def test_the_client_sends_a_buffer_to_one_node_and_names_it_to_the_others(tmp_path: Path) -> None:
    path = tmp_path / "buffer"
    path.write_bytes(DATA)
    posted: list[tuple[int, list[Any], list[Any]]] = []
    arrived = threading.Event()

    def post(node: int, messages: list[Any], buffers: list[Any]) -> None:
        posted.append((node, messages, buffers))
        if messages[0][0] == "blob" and messages[0][2] + len(buffers[0]) == len(DATA):
            arrived.set()

    cargo = Cargo(post, lambda _: 0, lambda node: ("10.0.0.1", 7000 + node))
    for node in (0, 1, 2, 0):
        cargo.load(node, {NAME: (str(path), len(DATA))})
    assert arrived.wait(10)
    cargo.close()
    fetches = [(node, m[0][1:4]) for node, m, _ in posted if m[0][0] == "fetch"]
    assert fetches == [
        (1, [NAME, len(DATA), [("10.0.0.1", 7000)]]),
        (2, [NAME, len(DATA), [("10.0.0.1", 7000), ("10.0.0.1", 7001)]]),
    ]
    assert b"".join(b[0] for node, m, b in posted if m[0][0] == "blob" and node == 0) == DATA


def test_a_node_whose_peers_fail_gets_the_buffer_from_the_client(tmp_path: Path) -> None:
    path = tmp_path / "buffer"
    path.write_bytes(DATA)
    nodes: list[int] = []
    both = threading.Event()

    def post(node: int, messages: list[Any], buffers: list[Any]) -> None:
        if messages[0][0] == "blob" and messages[0][2] + len(buffers[0]) == len(DATA):
            nodes.append(node)
            if len(nodes) == 2:
                both.set()

    cargo = Cargo(post, lambda _: 0, lambda _: None)  # a star: no node reaches another
    cargo.load(0, {NAME: (str(path), len(DATA))})
    cargo.load(1, {NAME: (str(path), len(DATA))})
    assert both.wait(10)
    cargo.close()
    assert sorted(nodes) == [0, 1]
