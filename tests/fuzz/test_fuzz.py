"""Whatever comes from outside raises declared errors only, takes bounded memory, and harms no bystander (SEC-7)."""

from __future__ import annotations

import io
import json
import struct
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from skyward.client.output import Lines
from skyward.errors import BootstrapError
from skyward.machines import ledger
from skyward.node.protocol import AgentToClient, Run
from skyward.node.settings import Refused, checked_greeting
from skyward.providers.aws import notices
from skyward.setup.keeper_client import _parsed
from skyward.transport import includes, journal
from skyward.transport.codec import decoder, split
from skyward.transport.frames import FrameReader, Malformed, encode
from skyward.transport.link import Broken, Link
from skyward.transport.records import fields_of
from skyward.transport.roles import refusal
from tests.support.fake_nodes import FakePool

# pyright: reportPrivateUsage=false

FUZZ = settings.get_profile("fuzz")

numbers = st.one_of(
    st.integers(), st.floats(), st.sampled_from([0, -1, 1 << 31, 1 << 63, 1 << 64, -(1 << 63), float("nan"), 1e308])
)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, st.text(max_size=20)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)),
    max_leaves=8,
)
NAMES = ("s", "blobs", "group", "replaced", "place", "error", "code", "stderr", "oom", "shared", "limit", "killed")
metadata = st.dictionaries(st.sampled_from([*NAMES, "reason", "size", "incomplete"]), values, max_size=5)
kinds = {kind: tuple(fields_of(message)) for kind, message in AgentToClient.messages().items()}
kinds |= {kind: ("id", "metadata") for kind, fields in kinds.items() if "seconds" in fields and "group" in fields}


@st.composite
def messages(draw: st.DrawFn, known: dict[str, tuple[str, ...]] = kinds) -> list[Any]:
    """A message of a kind that is known, mostly with as many fields as it has, of any types."""
    kind = draw(st.sampled_from(sorted(known)))
    fields = [draw(st.one_of(metadata, values)) for name in known[kind] if name not in ("buffers", "kind")]
    if draw(st.integers(0, 9)) == 0:
        fields = fields[:-1]
    return [kind, *fields, draw(st.one_of(st.just(0), st.just(1), values))]


def chunks(data: bytes, sizes: list[int]) -> Iterator[bytes]:
    at = 0
    for size in [*sizes, len(data)]:
        if data[at : at + size]:
            yield data[at : at + size]
        at += size


def read_all(data: bytes, sizes: list[int]) -> int:
    """Reads bytes in pieces as frames; how many there were."""
    reader, pieces, found = FrameReader(), chunks(data, sizes), 0

    def recv(room: memoryview) -> int:
        piece = next(pieces, b"")
        room[: len(piece)] = piece
        return len(piece)

    alive = True
    while alive:
        frames, alive = reader.read(recv)
        found += len(frames)
    return found


@FUZZ
@given(st.binary(max_size=200), st.lists(st.integers(1, 64), max_size=8))
@example(struct.pack("!II", 0, 0xFFFFFFFF) + b"x" * 64, [])
@example(struct.pack("!IIQ", 2, 1, 1 << 63) + b"{}", [8])
@example(struct.pack("!II", 2000, 0) + b"[" * 2000, [])
def test_any_bytes_are_frames_or_malformed(data: bytes, sizes: list[int]) -> None:
    try:
        read_all(data, sizes)
    except Malformed:
        pass


@FUZZ
@given(values, st.lists(st.binary(max_size=40), max_size=4), st.integers(0, 400), st.binary(min_size=1, max_size=3))
def test_a_frame_with_some_bytes_changed_is_a_frame_or_malformed(
    header: Any, buffers: list[bytes], at: int, change: bytes
) -> None:
    data = bytearray(b"".join(bytes(piece) for piece in encode(header, buffers)))
    data[at % len(data) : at % len(data) + len(change)] = change
    try:
        read_all(bytes(data), [7, 1, 100])
    except Malformed:
        pass


class Wire:
    """A socket that gives some bytes, then nothing."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def recv_into(self, room: memoryview) -> int:
        if not self._data:
            raise BlockingIOError
        count = min(len(room), len(self._data))
        room[:count], self._data = self._data[:count], self._data[count:]
        return count

    def setblocking(self, _: bool) -> None: ...

    def send(self, data: memoryview) -> int:
        return len(data)

    def close(self) -> None: ...


@FUZZ
@given(st.lists(st.one_of(values, st.fixed_dictionaries({"s": values, "a": values, "m": values})), max_size=4))
@example([{"s": 1, "a": 10**12, "m": []}])
@example([{"s": 10**30, "a": 0, "m": [["x", 0]]}])
def test_any_headers_are_messages_or_malformed(headers: list[Any]) -> None:
    link = Link()
    link.attach(Wire(b"".join(bytes(p) for header in headers for p in encode(header))), 0)  # type: ignore[arg-type]
    try:
        for found, buffers in link.read()[0]:
            list(split(found, buffers))
        link.read()
    except (Malformed, Broken):
        pass


@FUZZ
@given(messages())
def test_what_is_looked_into_is_good_or_malformed(message: list[Any]) -> None:
    try:
        heard = decoder(AgentToClient.messages()[message[0]])(json.loads(json.dumps(message)), [b""])
    except Malformed:
        return
    heard.encoded()


@FUZZ
@given(values, metadata)
def test_greetings_are_good_or_refused(greeting: Any, about: dict[str, Any]) -> None:
    given_about = {"incarnation": "x", "received": 0, "session": "s", **about, "cpus": greeting, "gpus": greeting}
    for welcome in (greeting, given_about):
        try:
            checked_greeting(welcome, "s")
        except (Malformed, Refused):
            pass
    for role in (None, "client", "node-1"):
        assert refusal(greeting, role, "s") is None or isinstance(refusal(greeting, role, "s"), str)


@FUZZ
@given(st.text(max_size=14), metadata, st.integers(0, 3))
def test_calls_are_good_or_malformed(id: str, about: dict[str, Any], buffers: int) -> None:
    try:
        decoder(Run)(["call", id, about, buffers], [b""] * buffers)
    except Malformed:
        pass


@FUZZ
@given(st.one_of(st.binary(max_size=60), values.map(lambda value: json.dumps(value).encode())))
@example(b"[" * 100_000)
def test_lines_of_keepers_are_messages_or_malformed(line: bytes) -> None:
    try:
        assert isinstance(_parsed(line)[0], str)
    except Malformed:
        pass


@FUZZ
@given(st.one_of(st.binary(max_size=80), values.map(lambda value: json.dumps(value).encode()), values), st.text())
@example(b"[" * 60_000, "")
@example({"time": "0001-01-01T00:00:00+23:59"}, "")
@example({"time": "9999-12-31T23:59:59-23:59"}, "Mon, 99 Foo 20000000 99:99:99")
def test_notices_are_moments_or_no_notices(body: Any, date: str) -> None:
    given_body = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        notices.taken_at(given_body)
    except ValueError:
        pass
    assert notices.remaining(2.0, date, 1.0) >= 0.0


@FUZZ
@given(st.lists(st.one_of(st.binary(max_size=60), values), max_size=4))
def test_ledgers_are_read_whatever_stands_in_them(lines: list[Any]) -> None:
    for line in lines:
        text = line if isinstance(line, bytes) else json.dumps(line).encode()
        for entry in (text, journal._checksum(text) + b" " + text):
            found = ledger.parsed(entry.replace(b"\n", b""))
            assert found is None or isinstance(found, ledger.Record)


@FUZZ
@given(st.lists(st.binary(max_size=60), max_size=10))
def test_any_output_becomes_lines(pieces: list[bytes]) -> None:
    lines = Lines()
    for piece in pieces:
        assert all(isinstance(text, str) for text, _ in lines.feed(piece))
    assert all("\n" not in text for text, _ in lines.rest())


@settings(FUZZ, max_examples=max(20, FUZZ.max_examples // 10))
@given(
    st.lists(st.tuples(st.text(max_size=30), st.binary(max_size=2), st.binary(max_size=20)), max_size=4), st.binary()
)
@example([("\0\x80", b"", b"")], b"")
def test_archives_are_unpacked_within_their_directory_or_refused(
    tmp_path_factory: pytest.TempPathFactory, members: list[tuple[str, bytes, bytes]], junk: bytes
) -> None:
    root = tmp_path_factory.mktemp("fuzz")
    file = io.BytesIO()
    try:
        with tarfile.open(fileobj=file, mode="w") as tar:
            for name, kind, data in members:
                member = tarfile.TarInfo(name)
                member.type, member.size = kind[:1] or b"0", len(data)
                tar.addfile(member, io.BytesIO(data))
    except (ValueError, UnicodeError):
        return  # no archive can hold that
    for content in (file.getvalue(), file.getvalue()[: len(junk) * 7] + junk):
        try:
            includes.unpack(io.BytesIO(content), root / "inside" / "dest")
        except BootstrapError:
            pass
        assert {path.name for path in root.iterdir()} <= {"inside"}


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakePool]:
    with FakePool(tmp_path_factory.mktemp("pool")) as made:
        yield made


@FUZZ
@given(st.lists(messages(), min_size=1, max_size=3))
def test_whatever_a_node_says_a_bystander_works_on(pool: FakePool, said: list[list[Any]]) -> None:
    peer = pool.engine._connections.peers[0]
    peer.malformed = 0
    pool.nodes[0].say(*said, buffers=(b"",) * 3)
    assert pool.works(1)
    assert pool.alive()


def test_the_corpus_is_where_it_is_kept() -> None:
    assert (Path(__file__).parent / "corpus" / "README.md").exists()
