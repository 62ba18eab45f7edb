"""Large buffers on their way to nodes, between them, and home."""

from __future__ import annotations

import errno
import os
import queue
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from skyward.client import uploads as uploads_module
from skyward.client.call import CallFuture
from skyward.client.uploads import Parts, Uploads
from skyward.errors import ResultNotSerializable
from skyward.node.blob_cache import BlobCache
from skyward.node.protocol import Files, Returned
from skyward.transport import certificates
from skyward.transport.codec import Message
from skyward.transport.link import greet
from tests.support.waiting import until

NAME = "0123456789abcdef" * 2
KEPT = "ab" * 14  # key, attempt and index of a kept result
DATA = os.urandom(700_000)


@pytest.fixture(scope="module")
def authority() -> certificates.Authority:
    return certificates.Authority("blob_cache", 3600)


def blob_cache(path: Path, authority: certificates.Authority) -> BlobCache:
    path.mkdir(mode=0o700)
    made = BlobCache(str(path), certificates.context(authority.issue("node-0"), server=False))
    made.shared = False
    return made


def give(node: BlobCache, data: bytes, piece: int = 200_000) -> bool:
    done = False
    for offset in range(0, len(data), piece):
        done = node.accept(NAME, offset, len(data), data[offset : offset + piece])
    return done


def test_pieces_become_a_file_that_is_seen_only_when_it_is_whole(
    tmp_path: Path, authority: certificates.Authority
) -> None:
    node = blob_cache(tmp_path / "a", authority)
    assert not node.accept(NAME, 0, len(DATA), DATA[:200_000])
    assert node.coming(NAME)
    assert os.listdir(tmp_path / "a") == [f"{NAME}.part"]
    paths, missing = node.take({"1": [NAME, len(DATA)]})
    assert missing == {NAME}
    assert node.accept(NAME, 200_000, len(DATA), DATA[200_000:])
    assert Path(paths["1"][0]).read_bytes() == DATA
    assert node.take({"1": [NAME, len(DATA)]})[1] == set()


def test_a_piece_after_one_that_found_no_room_is_not_taken_for_the_rest(
    tmp_path: Path, authority: certificates.Authority
) -> None:
    """Row 26: half a buffer never counts as a whole one."""
    node = blob_cache(tmp_path / "a", authority)
    (tmp_path / "a" / f"{NAME}.part").mkdir()  # nothing can be written there
    with pytest.raises(OSError):
        node.accept(NAME, 0, len(DATA), DATA[:200_000])
    (tmp_path / "a" / f"{NAME}.part").rmdir()
    assert not node.accept(NAME, 200_000, len(DATA), DATA[200_000:])
    assert node.take({"1": [NAME, len(DATA)]})[1] == {NAME}


def test_a_buffer_that_finds_no_room_in_memory_lies_on_a_disk(
    tmp_path: Path, authority: certificates.Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container, whose /dev/shm has 64 MB: calls are sent ahead, and all their arguments at once."""
    (tmp_path / "disk").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "disk"))
    node = blob_cache(tmp_path / "a", authority)
    plain, room = os.pwrite, 500_000

    def pwrite(fd: int, data: Any, offset: int) -> int:
        if offset + len(data) > room and os.readlink(f"/proc/self/fd/{fd}").startswith(str(tmp_path / "a")):
            raise OSError(errno.ENOSPC, "No space left on device")
        return plain(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    taken, _ = node.take({"1": [NAME, len(DATA)]})
    assert give(node, DATA)
    node.locate(taken)
    assert tmp_path / "disk" in Path(taken["1"][0]).parents
    assert Path(taken["1"][0]).read_bytes() == DATA
    again = BlobCache(str(tmp_path / "a"), certificates.context(authority.issue("node-0"), server=False))
    assert again.take({"1": [NAME, len(DATA)]}) == (taken, set())
    node.drop([NAME])
    node.discard([NAME])
    assert not os.path.exists(taken["1"][0])


def test_a_buffer_that_somebody_else_has_removed_is_asked_for_again(
    tmp_path: Path, authority: certificates.Authority
) -> None:
    node = blob_cache(tmp_path / "a", authority)
    give(node, DATA)
    shutil.rmtree(tmp_path / "a")
    assert node.take({"1": [NAME, len(DATA)]})[1] == {NAME}
    assert give(node, DATA)
    assert (tmp_path / "a" / NAME).read_bytes() == DATA


def test_a_buffer_whose_file_is_removed_while_it_comes_is_asked_for_again(
    tmp_path: Path, authority: certificates.Authority
) -> None:
    node = blob_cache(tmp_path / "a", authority)
    node.accept(NAME, 0, len(DATA), DATA[:200_000])
    (tmp_path / "a" / f"{NAME}.part").unlink()
    assert not node.accept(NAME, 200_000, len(DATA), DATA[200_000:])
    assert node.arrivals.get(timeout=60) == (NAME, False)
    assert os.listdir(tmp_path / "a") == []
    assert give(node, DATA)
    assert (tmp_path / "a" / NAME).read_bytes() == DATA


def test_a_result_whose_file_is_removed_while_it_comes_is_an_error_not_a_file_with_zeros(tmp_path: Path) -> None:
    home, name = Parts(str(tmp_path)), "ab" * 12
    home.accept(name, 0, len(DATA), DATA[:1000])
    (tmp_path / name).unlink()
    home.accept(name, 1000, len(DATA), DATA[1000:])
    _, incomplete = home.placed({"1": (name, len(DATA))})
    assert "No such file" in (incomplete or "")
    assert list(tmp_path.iterdir()) == []


def test_an_agent_that_is_started_again_finds_arguments_and_removes_what_its_predecessor_kept(
    tmp_path: Path, authority: certificates.Authority
) -> None:
    """The client counts the results of a node whose agent died as lost, and makes them again."""
    give(blob_cache(tmp_path / "a", authority), DATA)
    for name in (KEPT, NAME[::-1] + ".part"):
        (tmp_path / "a" / name).write_bytes(DATA)
    again = BlobCache(str(tmp_path / "a"), certificates.context(authority.issue("node-0"), server=False))
    assert os.listdir(tmp_path / "a") == [NAME]
    assert again.take({"0": [NAME, len(DATA)]})[1] == set()


def test_an_agent_that_is_started_again_makes_the_directory_that_somebody_has_removed(
    tmp_path: Path, authority: certificates.Authority
) -> None:
    node = BlobCache(str(tmp_path / "a"), certificates.context(authority.issue("node-0"), server=False))
    assert give(node, DATA)
    assert (tmp_path / "a" / NAME).read_bytes() == DATA


def test_an_agent_on_the_clients_computer_removes_nothing_when_it_is_started_again(tmp_path: Path) -> None:
    """All nodes there and the client share one directory: kept results of other nodes lie in it, too."""
    (tmp_path / KEPT).write_bytes(DATA)
    BlobCache(str(tmp_path), None)
    assert (tmp_path / KEPT).read_bytes() == DATA


@pytest.fixture
def peers(tmp_path: Path, authority: certificates.Authority) -> Iterator[tuple[BlobCache, BlobCache, int]]:
    """Two nodes; the first one serves what it has on a port."""
    one, two = blob_cache(tmp_path / "one", authority), blob_cache(tmp_path / "two", authority)
    context = certificates.context(authority.issue("node-1"), server=True)
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
    thread.join(60)


def test_a_node_gets_a_buffer_from_its_peer(peers: tuple[BlobCache, BlobCache, int], tmp_path: Path) -> None:
    one, two, port = peers
    give(one, DATA)
    two.fetch(NAME, len(DATA), [[1, "127.0.0.1", port]])
    assert two.arrivals.get(timeout=60) == (NAME, True)
    assert (tmp_path / "two" / NAME).read_bytes() == DATA


@pytest.mark.parametrize(("size", "sizes"), [((2 << 20) + 5, [1 << 20, 1 << 20, 5]), (1 << 20, [1 << 20]), (0, [0])])
def test_a_buffer_from_a_peer_is_written_in_large_pieces(
    peers: tuple[BlobCache, BlobCache, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    size: int,
    sizes: list[int],
) -> None:
    one, two, port = peers
    data = os.urandom(size)
    assert one.accept(NAME, 0, len(data), data)
    pieces: list[int] = []
    plain = two._parts.write

    def write(name: str, offset: int, piece: Any, total: int) -> None:
        pieces.append(len(piece))
        plain(name, offset, piece, total)

    monkeypatch.setattr(two._parts, "write", write)
    two.fetch(NAME, len(data), [[1, "127.0.0.1", port]])
    assert two.arrivals.get(timeout=60) == (NAME, True)
    assert pieces == sizes
    assert (tmp_path / "two" / NAME).read_bytes() == data


def test_a_peer_that_is_still_receiving_passes_it_on_afterwards(peers: tuple[BlobCache, BlobCache, int]) -> None:
    one, two, port = peers
    one.accept(NAME, 0, len(DATA), DATA[:200_000])
    two.fetch(NAME, len(DATA), [[1, "127.0.0.1", port]])
    one.accept(NAME, 200_000, len(DATA), DATA[200_000:])
    assert two.arrivals.get(timeout=60) == (NAME, True)


def test_a_peer_that_has_not_heard_yet_that_a_buffer_comes_waits_for_the_word(
    peers: tuple[BlobCache, BlobCache, int],
) -> None:
    """On a busy machine the question of a peer may overtake the client's message."""
    one, two, port = peers
    two.fetch(NAME, len(DATA), [[1, "127.0.0.1", port]])
    until(lambda: bool(one._lock._waiters), 60)  # type: ignore[attr-defined]
    one.expect(NAME)
    give(one, DATA)
    assert two.arrivals.get(timeout=60) == (NAME, True)


def test_a_buffer_that_no_peer_has_is_asked_for_again(peers: tuple[BlobCache, BlobCache, int]) -> None:
    _, two, port = peers
    two.fetch(NAME, len(DATA), [[1, "127.0.0.1", port], [1, "127.0.0.1", 1]])
    assert two.arrivals.get(timeout=60) == (NAME, False)
    assert not two.coming(NAME)


def test_buffers_that_no_call_needs_make_room_for_others(
    tmp_path: Path, authority: certificates.Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = blob_cache(tmp_path / "a", authority)
    monkeypatch.setattr("skyward.transport.blobs.room", lambda _: 1_000_000)
    give(node, DATA)
    node.take({"0": [NAME, len(DATA)]})
    other = NAME[::-1]
    node.take({"0": [other, len(DATA)]})
    node.accept(other, 0, len(DATA), DATA)
    assert sorted(os.listdir(tmp_path / "a")) == sorted([NAME, other])  # both are needed
    node.drop([NAME])
    assert os.listdir(tmp_path / "a") == [other]


def test_a_result_goes_home_in_pieces_before_the_word_that_it_is_done(
    tmp_path: Path, authority: certificates.Authority
) -> None:
    node = blob_cache(tmp_path / "a", authority)
    result = tmp_path / "a" / ("ab" * 12)
    result.write_bytes(DATA)
    said: list[Any] = []

    def tell(message: Any) -> None:
        said.append((message.name, message.offset, message.size, bytes(message.buffers[0])))

    files: Files = {"blobs": {"1": (str(result), len(DATA))}}
    node.ship("call", [files], lambda: said.append("done"))
    node.ship("call", [], lambda: said.append("later"))
    node.ship("other", [], lambda: said.append("unrelated"))
    assert said == ["unrelated"]
    assert not node.send(lambda: 0, tell)
    assert said[-2:] == ["done", "later"]
    home = Parts(str(tmp_path))
    for name, offset, size, data in said[1:-2]:
        home.accept(name, offset, size, data)
    blobs, _ = home.placed(files.get("blobs", {}))
    assert Path(blobs["1"][0]).read_bytes() == DATA
    assert not result.exists()


def test_no_more_is_read_than_the_link_takes(tmp_path: Path, authority: certificates.Authority) -> None:
    node = blob_cache(tmp_path / "a", authority)
    result = tmp_path / "a" / ("ab" * 12)
    result.write_bytes(DATA)
    node.ship("call", [{"blobs": {"1": (str(result), len(DATA))}}], lambda: None)
    assert node.send(lambda: 5 << 20, lambda *_, **__: pytest.fail("there was no room"))
    node.abandon()
    assert not result.exists()


@pytest.mark.parametrize("name", ["../mine", "{}/mine", "", "AB" * 12, "ab" * 40, "ab" * 12 + "\n"])
def test_a_node_cannot_choose_where_on_the_client_a_result_lies(tmp_path: Path, name: str) -> None:
    """A compromised node must not write or read files of the user's."""
    mine = tmp_path / "mine"
    mine.write_text("of the user")
    (tmp_path / "home").mkdir()
    home, name = Parts(str(tmp_path / "home")), name.format(tmp_path)
    with pytest.raises(ValueError, match="not the name"):
        home.accept(name, 0, 1, b"x")
    with pytest.raises(ValueError, match="not the name"):
        home.placed({"0": (name, 1)})
    assert mine.read_text() == "of the user"


def raw(post: Callable[[int, list[Any], list[Any]], None]) -> Callable[[int, Sequence[Message]], None]:
    """Has a function take messages as they are on the wire, and their buffers."""

    def posted(node: int, messages: Sequence[Message]) -> None:
        encoded = [message.encoded() for message in messages]
        post(node, [list(said) for said, _ in encoded], [buffer for _, buffers in encoded for buffer in buffers])

    return posted


def test_the_client_sends_a_buffer_to_one_node_and_names_it_to_the_others(tmp_path: Path) -> None:
    path = tmp_path / "buffer"
    path.write_bytes(DATA)
    posted: list[tuple[int, list[Any], list[Any]]] = []
    arrived = threading.Event()

    def post(node: int, messages: list[Any], buffers: list[Any]) -> None:
        posted.append((node, messages, buffers))
        if messages[0][0] == "blob" and messages[0][2] + len(buffers[0]) == len(DATA):
            arrived.set()

    uploads = Uploads(raw(post), lambda _: 0, lambda node: ("10.0.0.1", 7000 + node))
    for node in (0, 1, 2, 0):
        uploads.load(node, {NAME: (str(path), len(DATA))})
    assert arrived.wait(60)
    uploads.close()
    fetches = [(node, m[0][1:4]) for node, m, _ in posted if m[0][0] == "fetch"]
    assert fetches == [
        (1, [NAME, len(DATA), [(0, "10.0.0.1", 7000)]]),
        (2, [NAME, len(DATA), [(0, "10.0.0.1", 7000), (1, "10.0.0.1", 7001)]]),
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

    uploads = Uploads(raw(post), lambda _: 0, lambda _: None)  # a star: no node reaches another
    uploads.load(0, {NAME: (str(path), len(DATA))})
    uploads.load(1, {NAME: (str(path), len(DATA))})
    assert both.wait(60)
    uploads.close()
    assert sorted(nodes) == [0, 1]


def test_a_link_that_takes_nothing_is_looked_at_less_and_less_often(tmp_path: Path) -> None:
    path = tmp_path / "buffer"
    path.write_bytes(DATA)
    pauses: list[float] = []

    def wait(seconds: float | None = None) -> bool:
        pauses.append(seconds or 0.0)
        return False

    uploads = Uploads(lambda *_: None, lambda _: 0 if len(pauses) >= 12 else 1 << 30, lambda _: None)
    closing = threading.Event()
    closing.wait = wait
    uploads._closing = closing
    uploads.load(0, {NAME: (str(path), len(DATA))})
    until(lambda: len(pauses) >= 12)
    uploads.close()
    assert pauses[:3] == [0.001, 0.002, 0.004]
    assert pauses[7:12] == [0.1] * 5


class Sending:
    """A client's uploads to nodes that only keep what they get."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, patience: float = 30.0) -> None:
        monkeypatch.setattr(uploads_module, "_PAUSE", 0.005)
        monkeypatch.setattr(uploads_module, "_PATIENCE", patience)
        self.whole: queue.SimpleQueue[tuple[int, str, bytes]] = queue.SimpleQueue()
        self.other: queue.SimpleQueue[tuple[int, str, str]] = queue.SimpleQueue()
        self.failed: queue.SimpleQueue[tuple[int, str, Exception]] = queue.SimpleQueue()
        self._data: dict[tuple[int, str], bytes] = {}
        self.uploads = Uploads(raw(self._post), lambda _: 0, lambda _: None, lambda *what: self.failed.put(what))

    def _post(self, node: int, messages: list[Any], buffers: list[Any]) -> None:
        kind, name = messages[0][:2]
        if kind != "blob":
            self.other.put((node, kind, name))
            return
        _, _, offset, total, _ = messages[0]
        got = self._data[node, name] = (self._data[node, name] if offset else b"") + bytes(buffers[0])
        assert len(got) == offset + len(buffers[0])
        if len(got) == total:
            self.whole.put((node, name, got))

    def named(self, kind: str) -> tuple[int, str]:
        while True:
            node, said, name = self.other.get(timeout=10)
            if said == kind:
                return node, name


def refuse(monkeypatch: pytest.MonkeyPatch, times: float, path: Path, error: type[Exception] = OSError) -> None:
    """Has opening one file fail, as when a process has too many of them open."""
    count = 0

    def opened(file: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal count
        if str(file) == str(path) and count < times:
            count += 1
            raise error(errno.EMFILE, "Too many open files", str(file))
        return open(file, *args, **kwargs)

    monkeypatch.setattr(uploads_module, "open", opened, raising=False)


@pytest.mark.parametrize("error", [OSError, PermissionError, MemoryError, ValueError])
def test_an_upload_that_fails_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    path = tmp_path / "buffer"
    path.write_bytes(DATA)
    uploads = Sending(monkeypatch)
    refuse(monkeypatch, 3, path, error)
    uploads.uploads.load(0, {NAME: (str(path), len(DATA))})
    assert uploads.whole.get(timeout=10) == (0, NAME, DATA)
    uploads.uploads.close()


def test_an_upload_that_keeps_failing_is_told_and_holds_up_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, good = tmp_path / "buffer", tmp_path / "good"
    path.write_bytes(DATA)
    good.write_bytes(DATA)
    uploads = Sending(monkeypatch, patience=0.05)
    refuse(monkeypatch, float("inf"), path)
    uploads.uploads.load(0, {NAME: (str(path), len(DATA)), NAME[::-1]: (str(good), len(DATA))})
    assert uploads.whole.get(timeout=10)[1] == NAME[::-1]
    node, name, error = uploads.failed.get(timeout=10)
    assert (node, name) == (0, NAME)
    assert isinstance(error, OSError)
    assert uploads.named("unexpect") == (0, NAME)
    refuse(monkeypatch, 0, path)
    uploads.uploads.load(0, {NAME: (str(path), len(DATA))})  # the next call that needs it
    assert uploads.whole.get(timeout=10)[1] == NAME
    uploads.uploads.close()


def test_a_buffer_whose_calls_ended_before_it_was_sent_is_sent_for_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file was gone when its turn came: the node does not have it, whatever was written down before."""
    path = tmp_path / "buffer"
    uploads = Sending(monkeypatch)
    uploads.uploads.load(0, {NAME: (str(path), len(DATA))})
    assert uploads.named("unexpect") == (0, NAME)
    assert isinstance(uploads.failed.get(timeout=10)[2], FileNotFoundError)
    path.write_bytes(DATA)
    uploads.uploads.load(0, {NAME: (str(path), len(DATA))})
    assert uploads.whole.get(timeout=10) == (0, NAME, DATA)
    uploads.uploads.close()


def test_a_buffer_that_is_dropped_while_its_file_is_missing_holds_up_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `push` does: it removes a piece that every node has written, and says so afterwards."""
    gone, good = tmp_path / "gone", tmp_path / "good"
    good.write_bytes(DATA)
    uploads = Sending(monkeypatch)
    opening, dropped = threading.Event(), threading.Event()

    def opened(file: Any, *args: Any, **kwargs: Any) -> Any:
        if str(file) == str(gone):
            opening.set()
            assert dropped.wait(60)
        return open(file, *args, **kwargs)

    monkeypatch.setattr(uploads_module, "open", opened, raising=False)
    uploads.uploads.load(0, {NAME: (str(gone), len(DATA))})
    assert opening.wait(60)
    uploads.uploads.drop(NAME)
    dropped.set()
    uploads.uploads.load(0, {NAME[::-1]: (str(good), len(DATA))})
    assert uploads.whole.get(timeout=60) == (0, NAME[::-1], DATA)
    uploads.uploads.close()


@pytest.mark.parametrize("pieces", [0, 1, 2])
@pytest.mark.parametrize("again", [False, True], ids=["for-good", "and-sent-again"])
def test_a_node_does_not_wait_for_the_rest_of_a_buffer_that_is_dropped(
    tmp_path: Path, authority: certificates.Authority, pieces: int, again: bool
) -> None:
    """Else a later `fetch` of the same content would change nothing, and the call that needs it would wait."""
    path, node = tmp_path / "buffer", blob_cache(tmp_path / "node", authority)
    path.write_bytes(DATA)
    said: list[str] = []
    whole = threading.Event()

    def post(_: int, messages: list[Any], buffers: list[Any]) -> None:
        kind, name, *more, _ = messages[0]
        if name == NAME:
            said.append(kind)
            if kind == "blob":
                node.accept(name, *more, buffers[0])
            else:
                {"expect": node.expect, "unexpect": node.unexpect}[kind](name)
        elif kind == "blob" and more[0] + len(buffers[0]) == len(DATA):
            whole.set()

    def backlog(_: int) -> int:
        if said == ["expect"] + ["blob"] * pieces:  # asked before every piece
            uploads.drop(NAME)
            if again:
                uploads.load(0, {NAME: (str(path), len(DATA))})
            uploads.load(0, {NAME[::-1]: (str(path), len(DATA))})
        return 0

    uploads = Uploads(raw(post), backlog, lambda _: None)
    uploads.load(0, {NAME: (str(path), len(DATA))})
    assert whole.wait(60)  # of the next buffer: nothing more comes of the first
    uploads.close()
    assert said == ["expect", *["blob"] * pieces, "unexpect", *(["expect", "blob", "blob", "blob"] if again else [])]
    assert not node.coming(NAME)
    assert node.take({"1": [NAME, len(DATA)]})[1] == (set() if again else {NAME})


def test_an_upload_that_meets_a_bug_of_ours_fails_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing, good = tmp_path / "missing", tmp_path / "good"
    good.write_bytes(DATA)
    uploads = Sending(monkeypatch)

    def broken(*_: object) -> bool:
        raise KeyError("bug")

    monkeypatch.setattr(uploads.uploads, "_worth_trying", broken)
    uploads.uploads.load(0, {NAME: (str(missing), len(DATA)), NAME[::-1]: (str(good), len(DATA))})
    assert isinstance(uploads.failed.get(timeout=60)[2], KeyError)
    assert uploads.whole.get(timeout=60)[1] == NAME[::-1]
    uploads.uploads.close()


def test_a_file_that_has_become_shorter_does_not_keep_its_upload_going_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "buffer"
    path.write_bytes(DATA[:1000])
    uploads = Sending(monkeypatch, patience=0.05)
    uploads.uploads.load(0, {NAME: (str(path), len(DATA))})
    assert "1000 bytes" in str(uploads.failed.get(timeout=10)[2])
    uploads.uploads.close()


def test_a_node_that_is_lost_is_sent_nothing_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "buffer"
    path.write_bytes(DATA)
    uploads = Sending(monkeypatch)
    refuse(monkeypatch, 2, path)
    uploads.uploads.load(0, {NAME: (str(path), len(DATA))})
    uploads.uploads.forget(0)
    uploads.uploads.load(0, {NAME[::-1]: (str(path), len(DATA))})
    assert uploads.whole.get(timeout=10)[1] == NAME[::-1]
    uploads.uploads.close()


def no_renames(monkeypatch: pytest.MonkeyPatch) -> None:
    def rename(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "rename", rename)


def test_a_fetch_that_fails_at_its_very_end_is_told(
    peers: tuple[BlobCache, BlobCache, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    one, two, port = peers
    give(one, DATA)
    no_renames(monkeypatch)
    two.fetch(NAME, len(DATA), [[1, "127.0.0.1", port]])
    assert two.arrivals.get(timeout=10) == (NAME, False)
    assert not two.coming(NAME)
    assert os.listdir(tmp_path / "two") == []


@pytest.mark.parametrize("source", [[], ["127.0.0.1"], [None, None], ["127.0.0.1", "port"], 7])
def test_a_source_that_is_none_is_passed_over(peers: tuple[BlobCache, BlobCache, int], source: Any) -> None:
    one, two, port = peers
    give(one, DATA)
    two.fetch(NAME, len(DATA), [source, [1, "127.0.0.1", port]])
    assert two.arrivals.get(timeout=10) == (NAME, True)


def test_a_fetch_for_which_there_is_no_thread_is_told(
    tmp_path: Path, authority: certificates.Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = blob_cache(tmp_path / "a", authority)

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    node.fetch(NAME, len(DATA), [[1, "127.0.0.1", 1]])
    assert node.arrivals.get(timeout=10) == (NAME, False)
    assert not node.coming(NAME)


def test_a_last_piece_that_cannot_be_kept_is_an_error_and_leaves_nothing_behind(
    tmp_path: Path, authority: certificates.Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = blob_cache(tmp_path / "a", authority)
    with monkeypatch.context() as patched:
        no_renames(patched)
        with pytest.raises(OSError, match="Input/output"):
            give(node, DATA)
    assert not node.coming(NAME)
    assert os.listdir(tmp_path / "a") == []
    assert give(node, DATA)


def test_a_peer_that_waits_is_answered_when_the_buffer_does_not_come(peers: tuple[BlobCache, BlobCache, int]) -> None:
    for fail in ("unexpect", "accept"):
        one, two, port = peers
        one.accept(NAME, 0, len(DATA), DATA[:200_000])
        two.fetch(NAME, len(DATA), [[1, "127.0.0.1", port]])
        with pytest.raises(queue.Empty):
            two.arrivals.get(timeout=0.1)
        if fail == "unexpect":
            one.unexpect(NAME)
        else:
            with pytest.raises(TypeError):
                one.accept(NAME, 200_000, len(DATA), "no bytes")
        assert two.arrivals.get(timeout=10) == (NAME, False)
        assert not one.coming(NAME)


def test_room_that_cannot_be_made_is_no_error_of_a_buffer_that_has_come(
    tmp_path: Path, authority: certificates.Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    def room(_: str) -> int:
        raise OSError(errno.EIO, "Input/output error")

    node = blob_cache(tmp_path / "a", authority)
    monkeypatch.setattr("skyward.transport.blobs.room", room)
    assert give(node, DATA)
    assert node.take({"0": [NAME, len(DATA)]})[1] == set()


def shipped(tmp_path: Path, node: BlobCache, result: Path, *, before: Any = lambda: None) -> Returned:
    """Sends a result home; returns what arrived there."""
    said: list[Any] = []
    files: Files = {"blobs": {"1": (str(result), len(DATA))}}
    node.ship("call", [files], lambda: said.append("done"))
    before()
    for _ in range(3):
        node.send(lambda: 0, said.append)
    home = Parts(str(tmp_path))
    for part in said[:-1]:
        home.accept(part.name, part.offset, part.size, part.buffers[0])
    assert said[-1] == "done"
    blobs, incomplete = home.placed(files.get("blobs", {}))
    return Returned(id="call", blobs=blobs, incomplete=incomplete or files.get("incomplete"), buffers=[b"", b""])


def test_a_result_waits_until_its_file_can_be_opened(
    tmp_path: Path, authority: certificates.Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = blob_cache(tmp_path / "a", authority)
    result = tmp_path / "a" / ("ab" * 12)
    result.write_bytes(DATA)
    refusals = [OSError(errno.EMFILE, "Too many open files")]
    real = os.open

    def opened(path: Any, *args: Any) -> int:
        if str(path) == str(result) and refusals:
            raise refusals.pop()
        return real(path, *args)

    monkeypatch.setattr(os, "open", opened)
    assert Path(shipped(tmp_path, node, result).blobs["1"][0]).read_bytes() == DATA


def test_a_result_whose_file_is_gone_or_short_on_the_node_is_an_error_of_its_call(
    tmp_path: Path, authority: certificates.Authority
) -> None:
    for index, left in enumerate((b"", DATA[:300_000])):
        node = blob_cache(tmp_path / str(index), authority)
        result = tmp_path / str(index) / ("ab" * 12)
        result.write_bytes(DATA)

        def spoil(result: Path = result, left: bytes = left) -> None:
            result.write_bytes(left) if left else result.unlink()

        future: CallFuture[Any] = CallFuture("train")
        future.settle(shipped(tmp_path, node, result, before=spoil))
        with pytest.raises(ResultNotSerializable, match=f"its file on the node has {len(left):,} bytes"):
            future.result(0)


def test_a_result_of_which_a_piece_found_no_room_here_is_an_error_not_a_file_with_a_hole(tmp_path: Path) -> None:
    home, name = Parts(str(tmp_path)), "ab" * 12
    (tmp_path / name).mkdir()  # nothing can be written there
    home.accept(name, 0, len(DATA), DATA[:1000])
    (tmp_path / name).rmdir()
    home.accept(name, 1000, len(DATA), DATA[1000:])
    assert not (tmp_path / name).exists()
    blobs, incomplete = home.placed({"1": (name, len(DATA))})
    future: CallFuture[Any] = CallFuture("train")
    future.settle(Returned(id="call", blobs=blobs, incomplete=incomplete, buffers=[b"", b""]))
    with pytest.raises(ResultNotSerializable, match="it could not be written"):
        future.result(0)
