"""What a call costs on the wire: frames and bytes are counted, since a time could not be asserted."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Any

import pytest

import skyward as sky
from skyward.transport.link import Link

NODES, CALLS = 2, 100
BYTES_OUT, BYTES_IN = 250, 130  # of a frame on average; 200 and 97 when this was written


class Counts(Counter[str]):
    """Numbers by name, from several threads."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()

    def add(self, **numbers: int) -> None:
        with self._lock:
            self.update(numbers)


class CountingSocket:
    """A socket that counts what passes through it; everything else is the socket's own."""

    def __init__(self, sock: Any, counts: Counts) -> None:
        self._sock, self._counts = sock, counts

    def send(self, *args: Any) -> int:
        sent = self._sock.send(*args)
        self._counts.add(sends=1, bytes_out=sent)
        return sent

    def recv_into(self, *args: Any) -> int:
        try:
            got = self._sock.recv_into(*args)
        except BlockingIOError:
            self._counts.add(reads_without_data=1)
            raise
        self._counts.add(reads=1, bytes_in=got)
        return got

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counts:
    """Counts for every link of this process that is made from now on: the client's, as agents have their own."""
    seen = Counts()
    attach, post, read = Link.attach, Link.post, Link.read

    def counting_attach(link: Link, sock: Any, *args: Any, **options: Any) -> None:
        attach(link, CountingSocket(sock, seen), *args, **options)  # type: ignore[arg-type] - it has what a link uses

    def counting_post(link: Link, *args: Any, **options: Any) -> Any:
        seen.add(frames_out=1)
        return post(link, *args, **options)

    def counting_read(link: Link) -> Any:
        arrived, more = read(link)
        seen.add(frames_in=len(arrived))
        return arrived, more

    monkeypatch.setattr(Link, "attach", counting_attach)
    monkeypatch.setattr(Link, "post", counting_post)
    monkeypatch.setattr(Link, "read", counting_read)
    return seen


def test_a_call_is_one_small_frame_each_way(counts: Counts) -> None:
    """Beside these there are acknowledgements and, once a second, the nodes' signs of life."""
    call = sky.compute(len)  # known by its name: no body travels, so the bytes are those of the protocol
    with sky.ComputePool(nodes=NODES, console=False) as pool:
        for _ in range(10):
            call("") >> pool
        counts.clear()
        began = time.monotonic()
        for _ in range(CALLS):
            call("") >> pool
        seen = dict(counts)
        beats = NODES * (int(time.monotonic() - began) + 2)

    beside = CALLS // 20 + beats
    assert CALLS <= seen["frames_out"] <= CALLS + beside, seen
    assert CALLS <= seen["frames_in"] <= CALLS + beside, seen
    assert CALLS <= seen["sends"] <= CALLS + beside, seen  # acknowledgements are among these
    assert CALLS <= seen["reads"] <= CALLS + beside, seen
    assert seen.get("reads_without_data", 0) == 0, seen  # a short read says that there is no more
    assert CALLS <= seen["bytes_out"] <= BYTES_OUT * (CALLS + beside), seen
    assert CALLS <= seen["bytes_in"] <= BYTES_IN * (CALLS + beside), seen


def test_a_large_argument_crosses_no_socket_on_this_computer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes of this computer read it where it lies; it was sent to each of them all the same."""
    sent: list[int] = []
    real = Link.post

    def counted(self: Link, messages: Any, buffers: Any = ()) -> bool:
        sent.append(sum(map(len, buffers)))
        return real(self, messages, buffers)

    monkeypatch.setattr(Link, "post", counted)
    with sky.ComputePool(nodes=2, console=False) as pool:
        assert sky.compute(len)(bytes(16 << 20)) @ pool == [16 << 20] * 2
        assert sky.compute(len)(bytes(16 << 20)) @ pool == [16 << 20] * 2
    assert sum(sent) < 1 << 20


@sky.compute
def of_fifty_megabytes() -> bytes:
    return bytes(50 << 20)


@sky.compute
def length_and_node(data: bytes, *_: bytes) -> tuple[int, int]:
    return len(data), sky.instance_info().node


@pytest.mark.parametrize("way", ["kept", "argument"])
def test_a_large_result_for_another_call_costs_two_small_frames_each_way(counts: Counts, way: str) -> None:
    """Whether it is kept first or made for the call, where it was made and on the other node: it crosses no socket."""
    with sky.ComputePool(nodes=2, console=False) as pool:
        length_and_node(b"") @ pool
        of_fifty_megabytes() >> pool  # both bodies are known there
        refs: list[Any] = []
        counts.clear()
        began = time.monotonic()
        for _ in range(3):
            if way == "kept":
                refs.append(of_fifty_megabytes().keep() >> pool)
                assert (length_and_node(refs[-1]) >> pool)[0] == 50 << 20
            else:
                made: Any = of_fifty_megabytes()
                assert (length_and_node(made) >> pool)[0] == 50 << 20
        seen = dict(counts)
        beside = 3 * 3 + 2 * (int(time.monotonic() - began) + 2)  # acknowledgements, what is let go, signs of life
        assert 6 <= seen["frames_out"] <= 6 + beside, seen
        assert 6 <= seen["frames_in"] <= 6 + beside, seen
        assert seen["bytes_out"] <= 1500 * (6 + beside), seen
        assert seen["bytes_in"] <= 500 * (6 + beside), seen

        counts.clear()
        for ref in refs:
            assert length_and_node(ref) @ pool == [(50 << 20, 0), (50 << 20, 1)]
        assert counts["bytes_out"] + counts["bytes_in"] < 100_000, counts
        if refs:
            assert len(refs[0].get()) == 50 << 20
        assert counts["bytes_out"] + counts["bytes_in"] < 100_000, counts
