"""Whatever a node sends, it breaks its own link at most: the others work on (SEC-7)."""

from __future__ import annotations

import json
import pickle
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest

from skyward import events
from skyward.client.output import Chunk
from skyward.errors import NodeLost, PluginError, SkywardError
from skyward.node.protocol import AgentToClient
from skyward.transport.frames import FROM_NODE
from tests.support.fake_nodes import FakePool
from tests.support.waiting import until

ERROR = {"type": "ValueError", "message": "m", "traceback": "t"}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakePool]:
    with FakePool(tmp_path_factory.mktemp("pool")) as pool:
        yield pool


@pytest.fixture
def pool(shared: FakePool) -> FakePool:
    """A pool whose node 0 may be hostile: it has its trust back, and its connection."""
    connections = shared.engine._connections  # pyright: ignore[reportPrivateUsage]
    connections.peers[0].malformed = 0
    shared.nodes[0].answers = True
    assert shared.works(0)
    return shared


def frame(header: bytes, lengths: tuple[int, ...] = (), head: int | None = None, count: int | None = None) -> bytes:
    """A frame whose prefix may lie."""
    prefix = struct.pack("!II", len(header) if head is None else head, len(lengths) if count is None else count)
    return prefix + struct.pack(f"!{len(lengths)}Q", *lengths) + header


def broken(pool: FakePool) -> bool:
    """Whether node 0 is known to have sent nonsense."""
    return pool.engine._connections.peers[0].malformed > 0  # pyright: ignore[reportPrivateUsage]


MANY = [f"{number:x}" for number in range(300_000)]
BYTES = {
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "zeros": bytes(64),
    "a header of 4 GiB": frame(b"", head=0xFFFFFFFF),
    "a header of a byte more than nodes may send": frame(b"", head=FROM_NODE + 1),
    "other fields": frame(json.dumps({"a": 0, "s": 1, "m": [], "x": 0}).encode()),
    "other fields in the place of ours": frame(json.dumps({"a": 0, "x": 1, "m": []}).encode()),
    "three hundred thousand fields": frame(json.dumps({"a": 0, "s": 1, "m": []} | dict.fromkeys(MANY, 0)).encode()),
    "four billion buffers": frame(b"{}", count=0xFFFFFFFF),
    "a buffer of 2**64 bytes": frame(b"{}", (2**64 - 1,)),
    "not JSON": frame(b"nonsense"),
    "half a JSON": frame(b'{"a": 0'),
    "bad UTF-8": frame(b'{"a": "\xff\xfe"}'),
    "deep JSON": frame(b"[" * 200_000),
    "a number of 10,000 digits": frame(b'{"a": ' + b"9" * 10_000 + b"}"),
    "a negative number": frame(json.dumps({"a": -1, "s": -(10**30), "m": []}).encode()) + frame(b"x"),
    "an acknowledgement of what was not sent": frame(json.dumps({"a": 10**12}).encode()),
    "not an object": frame(b"[]"),
    "not a number": frame(b'{"a": NaN}'),
}


@pytest.mark.parametrize("data", BYTES.values(), ids=BYTES.keys())
def test_bytes_that_are_no_frame_break_the_link_of_their_node_only(pool: FakePool, data: bytes) -> None:
    pool.nodes[0].write(data)
    until(lambda: broken(pool))
    assert pool.works(1)
    assert pool.works(0), "it may connect again"
    assert pool.alive()


MESSAGES: dict[str, Any] = {
    "an unknown kind": ["explode", 0],
    "a kind that is not a text": [7, 0],
    "a kind of another direction": ["recall", "x", 0],
    "no fields": ["done", 0],
    "one field too many": ["ready", 1, 2, 0],
    "text for a number": ["ready", "1", 0],
    "true for a number": ["ready", True, 0],
    "a negative number": ["want", "x", "a", -5, 0],
    "a huge number": ["ready", 10**30, 0],
    "a number that is none": ["notice", float("nan"), 0],
    "an endless number": ["sample", float("inf"), 0, 0, [], 0],
    "null for a text": ["recalled", None, 0],
    "a list for an object": ["done", "x", [], 0],
    "states that are no texts": ["states", {"x": 1}, 0],
    "no GPUs": ["sample", 0.0, 0, 0, [["a", 0]], 0],
    "GPUs with too many figures": ["sample", 0.0, 0, 0, [[0, "a", *range(20)]], 0],
    "more GPUs than there are": ["sample", 0.0, 0, 0, [[0, "a"]] * 1000, 0],
    "a GPU with an endless name": ["sample", 0.0, 0, 0, [[0, "a" * 100_000]], 0],
    "stacks without their places": ["standing", 1, [{"state": "idle", "cpu": 0.0}], 0],
    "stacks with odd frames": ["standing", 1, [{"place": 0, "state": "x", "cpu": 0.0, "frames": [1]}], 0],
    "facts that are none": [
        *("standing", 1, [{"place": 0, "state": "x", "cpu": 0.0, "facts": {"shards": {"x": ["a"]}}}], 0)
    ],
    "a process that the node does not have": ["replaced", 1, 10**6, 0],
    "ports that are none": ["ports", [70_000, 1, 1], 1, 0],
    "an answer to a node that is not there": ["share", "2/token/runner", ["answer", 1, "", "", None, 0], 0],
    "an answer to nobody": ["share", "client", ["explode", 0], 0],
    "an answer of the wrong form": ["share", "client", ["answer", "x", 0], 0],
    "a message inside a message that is none": ["share", "client", [], 0],
}


@pytest.mark.parametrize("message", MESSAGES.values(), ids=MESSAGES.keys())
def test_messages_that_are_none_break_the_link_of_their_node_only(pool: FakePool, message: list[Any]) -> None:
    pool.nodes[0].say(message)
    if message[0] != "share" or message[1] != "client":  # which the client does not use here
        until(lambda: broken(pool))
    assert pool.works(1)
    assert pool.works(0)
    assert pool.alive()


VERDICTS: dict[str, tuple[str, Any, int]] = {
    "done without its time": ("done", {}, 1),
    "a time that is text": ("done", {"s": "soon"}, 1),
    "a time that is none": ("done", {"s": float("nan")}, 1),
    "a time before its beginning": ("done", {"s": -1e300}, 1),
    "blobs that are none": ("done", {"s": 0.0, "blobs": [1]}, 1),
    "blobs for no buffer": ("done", {"s": 0.0, "blobs": {"99": ["a", 1]}}, 1),
    "a blob without a size": ("done", {"s": 0.0, "blobs": {"0": ["a"]}}, 1),
    "a place that it does not have": ("done", {"s": 0.0, "place": 77}, 1),
    "an error without text": ("error", {}, 1),
    "an error that is text": ("error", {"error": "e"}, 1),
    "an error without its buffer": ("error", {"error": ERROR}, 0),
    "a crash without its code": ("crashed", {}, 0),
    "a code that is text": ("crashed", {"code": "x", "stderr": "", "oom": False, "shared": 0}, 0),
    "a code beyond all signals": ("crashed", {"code": -(10**12), "stderr": "", "oom": False, "shared": 0}, 0),
    "a time-out without a limit": ("timeout", {}, 0),
    "no room without a size": ("noroom", {}, 0),
    "lost without a reason": ("lost", {}, 0),
}


@pytest.mark.parametrize("verdict", VERDICTS.values(), ids=VERDICTS.keys())
def test_a_verdict_that_is_none_ends_its_call_and_breaks_its_link_only(
    pool: FakePool, verdict: tuple[str, Any, int]
) -> None:
    kind, metadata, count = verdict
    pool.nodes[0].answers = False
    call = pool.call(0)
    id = pool.nodes[0].calls.get(timeout=30)
    pool.nodes[0].say([kind, id, metadata, count], buffers=(b"",) * count)
    with pytest.raises(SkywardError, match="could not be read here"):
        call.future.result(30)
    assert broken(pool)
    assert pool.works(1)
    assert pool.alive()


def test_a_signal_without_a_name_is_no_nonsense(pool: FakePool) -> None:
    pool.nodes[0].answers = False
    call = pool.call(0)
    id = pool.nodes[0].calls.get(timeout=30)
    pool.nodes[0].say(["crashed", id, {"code": -40, "stderr": "", "oom": False, "shared": 0}, 0])
    with pytest.raises(SkywardError, match="signal 40"):
        call.future.result(30)
    assert not broken(pool)


def test_a_node_has_no_say_in_the_calls_of_another(pool: FakePool) -> None:
    """Whatever it says of them: they end with what their own node says."""
    pool.nodes[1].answers = False
    call = pool.call(1)
    id = pool.nodes[1].calls.get(timeout=30)
    hostile = pool.nodes[0]
    hostile.done(id, "forged")
    hostile.say(["error", id, {"error": ERROR}, 1], buffers=(b"",))
    hostile.say(
        ["lost", id, {"reason": "forged"}, 0], ["crashed", id, {"code": 1, "stderr": "", "oom": False, "shared": 0}, 0]
    )
    hostile.say(["cancelled", id, {"group": True, "replaced": True}, 0], ["recalled", id, 0], ["streaming", id, 0])
    hostile.say(["states", {id: "unknown"}, 0], ["items", id, [1], 1], buffers=(b"forged",))
    hostile.say(["out", "stdout", id, 0, 1], buffers=(b"forged line\n",))
    hostile.say(["want", id, "0", 5, 0], ["started", id, 0, 0])
    assert pool.works(0), "all of it has been heard"
    assert not call.future.done()
    pool.nodes[1].done(id, "its own")
    assert call.future.result(30) == "its own"
    pool.nodes[1].answers = True
    assert not pool.engine._core.nodes.gang  # pyright: ignore[reportPrivateUsage]
    assert not any(getattr(event, "call", None) == id for event in pool.events if hasattr(event, "text"))


def test_a_node_does_not_speak_for_runners_of_another(tmp_path: Path) -> None:
    with FakePool(tmp_path) as pool:
        pool.nodes[1].say(["share", "0/token/runner", ["gone", "forged", 0], 0])
        until(lambda: pool.engine._connections.peers[1].malformed)  # pyright: ignore[reportPrivateUsage]
        assert pool.works(0)


def test_a_stream_gets_no_more_items_than_were_asked_for(pool: FakePool) -> None:
    pool.nodes[0].answers = False
    call = pool.call(0)
    future = call.future
    id = pool.nodes[0].calls.get(timeout=30)
    pool.nodes[0].tell(AgentToClient.Streaming(id))
    stream = future.result(30)
    item = b"\x80\x05K\x01."
    pool.nodes[0].tell(AgentToClient.Items(id, [1] * 256, [item] * 256))
    assert next(stream) == 1
    assert not broken(pool)
    pool.nodes[0].tell(AgentToClient.Items(id, [1], [item]))
    until(lambda: broken(pool))
    stream.close()
    assert pool.works(1)


@pytest.mark.parametrize("message", [["explode", 0], ["ready", "1", 0]])
def test_a_frame_full_of_nonsense_ends_its_link_after_three_messages(tmp_path: Path, message: list[Any]) -> None:
    """Who has sent three messages that are none is given up, and the rest is not even looked at (SEC-7)."""
    with FakePool(tmp_path) as pool:
        pool.nodes[0].say(*[message] * 50_000)
        until(lambda: broken(pool))
        assert pool.works(1)
        assert pool.engine._connections.peers[0].malformed <= 3  # pyright: ignore[reportPrivateUsage]


TOLD: dict[str, list[Any]] = {
    "samples": ["sample", 0.0, 0, 0, [], 0],
    "repairs": ["repaired", "x" * 30_000, 0],
    "notes": ["gpus", "memory", "x" * 30_000, 0],
}


@pytest.mark.parametrize("message", TOLD.values(), ids=TOLD.keys())
def test_a_node_that_tells_of_itself_without_end_delays_nobody(tmp_path: Path, message: list[Any]) -> None:
    """Listeners that are far behind hold up whoever emits, and that is the thread that reads all links (SEC-7)."""
    with FakePool(tmp_path) as pool:
        for _ in range(20):
            pool.nodes[0].say(*[message] * 100)
        assert pool.works(0), "all of it has been heard"
        heard = [event for event in pool.events if isinstance(event, events.NodeSample | events.Notice)]
        assert 0 < len(heard) < 1000
        assert all(len(event.text) < 11_000 for event in heard if isinstance(event, events.Notice))
        assert not broken(pool)


def test_a_node_that_does_not_wait_until_its_output_is_taken_breaks_its_link(tmp_path: Path) -> None:
    """What the client keeps for listeners has a limit, whatever a node believes (SEC-7)."""
    with FakePool(tmp_path) as pool:
        line = b"x" * 65_535 + b"\n"
        for _ in range(20):
            pool.nodes[0].say(*[["out", "stdout", None, 0, 1]] * 160, buffers=(line,) * 160)  # 10 MiB
            if broken(pool):
                break
            assert pool.works(1)
        until(lambda: broken(pool))
        chunks = [event for event in pool.events if isinstance(event, Chunk)]
        assert sum(len(line) for _ in chunks) <= 128 << 20
        assert pool.works(1)


def test_output_that_is_taken_may_go_on(tmp_path: Path) -> None:
    with FakePool(tmp_path) as pool:
        line = b"x" * 65_535 + b"\n"
        for _ in range(14):
            pool.nodes[0].say(*[["out", "stdout", None, 0, 1]] * 160, buffers=(line,) * 160)  # 10 MiB
            assert pool.works(0), "all of it has been heard"
            for chunk in pool.events:
                if isinstance(chunk, Chunk):
                    chunk.taken()
            pool.events.clear()
        assert not broken(pool)


def test_a_node_that_sends_nonsense_again_and_again_is_lost_and_the_others_are_not(tmp_path: Path) -> None:
    with FakePool(tmp_path) as pool:
        pool.nodes[0].answers = False
        waiting = pool.call(0)
        for _ in range(3):
            pool.nodes[0].say(["explode", 0])
        with pytest.raises((NodeLost, CancelledError)):
            waiting.future.result(60)
        assert pool.works(1)
        assert pool.alive()


@pytest.mark.parametrize(
    "about",
    [
        {"cpus": "many"},
        {"gpu_names": [1]},
        {"gpus": [{"uuid": 1, "name": ""}]},
        {"gpus": {}},
        {"path": "x"},
        {"received": -1},
    ],
)
def test_a_greeting_with_nonsense_about_the_machine_is_no_greeting(tmp_path: Path, about: dict[str, Any]) -> None:
    with FakePool(tmp_path) as pool:
        pool.nodes[0].about = about
        pool.nodes[0].link.detach()
        assert pool.works(1)
        pool.nodes[0].about = {}
        assert pool.works(0)


rebuilt_in: list[threading.Thread] = []


def rebuild_here() -> PluginError:
    """What the pickle below calls: says where it is unpickled."""
    rebuilt_in.append(threading.current_thread())
    return PluginError("p", "around_app", "its text", 0)


class Rebuilt:
    def __reduce__(self) -> tuple[Any, ...]:
        return rebuild_here, ()


def test_the_error_of_a_hook_is_unpickled_by_whoever_opens_the_pool(tmp_path: Path) -> None:
    """Not in the thread that reads all links, and under no lock of the pool (SEC-8)."""
    rebuilt_in.clear()
    pool = FakePool(tmp_path)
    described = {"type": "skyward.errors.PluginError", "message": "its text", "traceback": ""}
    pool.nodes[0].failure = described, pickle.dumps([(Rebuilt(), "context", False)])
    with pytest.raises(PluginError, match="its text"), pool:
        pass
    pool.__exit__()
    assert rebuilt_in == [threading.current_thread()]


def test_a_claim_of_much_memory_takes_none(pool: FakePool) -> None:
    """A frame says that 8 GiB follow, and nothing does."""
    before = resident()
    pool.nodes[0].write(frame(b"{}", (8 << 30,)) + b"{}")
    assert pool.works(1)
    assert resident() - before < 64 << 20
    pool.nodes[0].link.detach()
    assert pool.works(0)


def resident() -> int:
    """How much memory this process has."""
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * 4096
