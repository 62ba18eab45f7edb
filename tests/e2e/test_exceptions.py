"""Exceptions, arguments and results of every shape: what arrives, and what is said where nothing can."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward.errors import NotSerializable, RemoteError, ResultNotSerializable, ResultTooLarge
from tests.support.waiting import until

LOCK = threading.Lock()


@sky.compute
def echo(x: Any) -> Any:
    return x


@sky.compute
def call(fn: Callable[[], Any]) -> Any:
    return fn()


class Plain(Exception):
    def __init__(self, message: str, code: int = 0) -> None:
        super().__init__(message, code)
        self.code = code


class OddInit(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first}-{second}")


class KeywordOnly(Exception):
    def __init__(self, *, name: str) -> None:
        super().__init__(f"name is {name}")
        self.name = name


class HoldsLock(Exception):
    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.lock = threading.Lock()


class NoStr(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text for you")


class NoRepr(Exception):
    def __repr__(self) -> str:
        raise RuntimeError("no repr for you")

    __str__ = __repr__


class Base(BaseException):
    pass


class Shy:
    """What an exception holds that has no text."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr for you")


@dataclass(frozen=True)
class Frozen(Exception):
    code: int


class Slotted(Exception):
    __slots__ = ("extra",)


class OwnNotes(Exception):
    """A class that spoils what `add_note` needs."""

    __notes__ = "not a list"  # type: ignore[assignment]


class RebuildsAsOther(Exception):
    def __reduce__(self) -> Any:
        return dict, ()


class RebuildFails(Exception):
    def __reduce__(self) -> Any:
        return int, ("not a number",)


class ReduceExits(Exception):
    def __reduce__(self) -> Any:
        raise SystemExit(5)


def _hostile(path: str, pid: int) -> Exception:
    """Harmless on the node; elsewhere it leaves a mark and ends the thread that rebuilds it."""
    if "COMPUTE_POOL" not in os.environ:
        Path(path).write_text("rebuilt on the client")
        raise SystemExit(1)
    return ExitsOnClient(path)


class ExitsOnClient(Exception):
    def __reduce__(self) -> Any:
        return _hostile, (self.args[0], 0)


@pytest.fixture
def fresh() -> Iterator[sky.ComputePool]:
    """A pool for one test alone: what it survives is the question."""
    with sky.ComputePool(console=False, grace=1) as opened:
        yield opened


def raiser(exc: Callable[[], BaseException]) -> Any:
    def body() -> None:
        raise exc()

    return call(body)


def notes(exc: BaseException) -> str:
    return "\n".join(getattr(exc, "__notes__", []))


def test_type_attributes_and_place_of_an_exception_come_home(pool: sky.ComputePool) -> None:
    """Row 6: the user's line, node, call and attempt in a note."""

    @sky.compute
    def named_body() -> None:
        raise Plain("broken", 42)  # the user's line

    with pytest.raises(Plain) as caught:
        named_body() >> pool
    assert type(caught.value) is Plain
    assert (caught.value.args, caught.value.code) == (("broken", 42), 42)
    text = notes(caught.value)
    assert "node " in text
    assert "named_body" in text
    assert "attempt 1" in text
    assert "# the user's line" in text
    assert "Plain: ('broken', 42)" in text


def test_the_note_names_the_node_that_raised(pool: sky.ComputePool) -> None:
    """Row 6."""

    @sky.compute
    def body() -> None:
        info = sky.instance_info()
        assert info is not None
        if info.node == 1:
            raise Plain(f"{info.task_id}")

    with pytest.raises(Plain) as caught:
        body() @ pool
    assert "node 1" in notes(caught.value)
    assert caught.value.args[0] in notes(caught.value)
    assert "rank 1 of 2" in notes(caught.value)


def test_frames_of_ours_are_not_shown_in_the_remote_traceback(pool: sky.ComputePool) -> None:
    """Row 6: it begins where the user's code does."""
    with pytest.raises(ZeroDivisionError) as caught:
        call(lambda: 1 // 0) >> pool
    assert "runner.py" not in notes(caught.value)


def test_cause_and_context_are_kept(pool: sky.ComputePool) -> None:
    """Row 6."""

    def chained() -> None:
        try:
            try:
                raise KeyError("root")
            except KeyError:
                raise Plain("middle", 1)  # noqa: B904 - the context is what is tested
        except Plain as exc:
            raise ValueError("top") from exc

    with pytest.raises(ValueError, match="top") as caught:
        call(chained) >> pool
    assert isinstance(caught.value.__cause__, Plain)
    assert caught.value.__cause__.code == 1
    assert isinstance(caught.value.__cause__.__context__, KeyError)
    assert caught.value.__cause__.__cause__ is None


def test_raise_from_none_stays_so(pool: sky.ComputePool) -> None:
    """Row 6."""

    def hidden() -> None:
        try:
            raise KeyError("hidden")
        except KeyError:
            raise ValueError("shown") from None

    with pytest.raises(ValueError, match="shown") as caught:
        call(hidden) >> pool
    assert caught.value.__suppress_context__
    assert caught.value.__cause__ is None


def test_a_cause_that_cannot_travel_does_not_cost_the_exception_its_type(pool: sky.ComputePool) -> None:
    """Rows 6 and 7."""

    def chained() -> None:
        try:
            raise HoldsLock("inner")
        except HoldsLock as exc:
            raise Plain("outer", 3) from exc

    with pytest.raises(Plain) as caught:
        call(chained) >> pool
    assert caught.value.code == 3
    assert "inner" in notes(caught.value)


def test_a_chain_that_is_a_circle_or_very_long_arrives(fresh: sky.ComputePool) -> None:
    """Row 6."""

    def circle() -> None:
        one, two = ValueError("one"), ValueError("two")
        one.__cause__, two.__cause__ = two, one
        raise one

    def long() -> None:
        exc: Exception = ValueError("0")
        for i in range(1, 500):
            new = ValueError(str(i))
            new.__context__ = exc
            exc = new
        raise exc

    with pytest.raises(ValueError, match="one"):
        call(circle) >> fresh
    with pytest.raises(ValueError, match="499"):
        call(long) >> fresh


def test_an_exception_group_arrives_with_its_members(pool: sky.ComputePool) -> None:
    """Row 6."""

    def grouped() -> None:
        raise ExceptionGroup("several", [Plain("a", 1), ExceptionGroup("inner", [KeyError("b")])])

    with pytest.raises(ExceptionGroup) as caught:
        call(grouped) >> pool
    assert caught.group_contains(Plain)
    assert caught.group_contains(KeyError, depth=2)
    assert caught.value.exceptions[0].code == 1  # type: ignore[union-attr]


def test_notes_of_the_user_are_kept(pool: sky.ComputePool) -> None:
    """Row 6."""

    def noted() -> None:
        exc = ValueError("x")
        exc.add_note("my own note")
        raise exc

    with pytest.raises(ValueError, match="x") as caught:
        call(noted) >> pool
    assert caught.value.__notes__[0] == "my own note"
    assert "remote traceback" in caught.value.__notes__[-2]
    assert caught.value.__notes__[-1].startswith("`sky replay ")


def test_an_exception_class_made_in_the_body_arrives(pool: sky.ComputePool) -> None:
    """Row 7."""

    def local_class() -> None:
        class Own(ValueError):
            pass

        raise Own("made there")

    with pytest.raises(Exception, match="made there") as caught:
        call(local_class) >> pool
    assert type(caught.value).__name__ in ("Own", "RemoteError")


def test_an_exception_class_that_exists_only_on_the_node_becomes_text(pool: sky.ComputePool, tmp_path: Path) -> None:
    """Row 7."""
    (tmp_path / "only_there.py").write_text("class Strange(Exception):\n    pass\n")

    def strange(directory: str) -> None:
        import sys

        sys.path.insert(0, directory)
        try:
            import only_there
        finally:
            sys.path.remove(directory)
        raise only_there.Strange("from afar")

    with pytest.raises(Exception, match="from afar") as caught:
        call(functools.partial(strange, str(tmp_path))) >> pool
    assert "only_there" not in sys.modules
    assert "Strange" in (notes(caught.value) + str(caught.value))
    if isinstance(caught.value, RemoteError):
        assert caught.value.type_name == "only_there.Strange"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: OddInit("left", "right"), "left-right"),
        (lambda: KeywordOnly(name="ada"), "name is ada"),
        (lambda: HoldsLock("locked"), "locked"),
        (lambda: RebuildsAsOther("other"), "other"),
        (lambda: RebuildFails("fails"), "fails"),
        (lambda: ReduceExits("exits"), "exits"),
        (lambda: Slotted("slots"), "slots"),
        (lambda: Frozen(7), "7"),
        (lambda: OwnNotes("spoilt"), "spoilt"),
        (lambda: ValueError(Shy()), ""),
    ],
    ids=["init", "kwonly", "lock", "other", "fails", "exits", "slots", "frozen", "notes", "shy"],
)
def test_an_exception_of_odd_shape_arrives_as_itself_or_as_text(
    fresh: sky.ComputePool, make: Callable[[], Exception], words: str
) -> None:
    """Row 7: never a hang, never another error in its place."""
    name = type(make()).__name__
    future = raiser(make) > fresh
    error = future.exception(45)
    assert error is not None
    assert type(error).__name__ in (name, "RemoteError")
    if isinstance(error, RemoteError):
        assert error.type_name.endswith(name)
        assert words in error.message
        assert name in error.traceback
    elif words:
        assert words in str(error) + repr(error)
    assert name in notes(error)
    assert (echo(1) > fresh).result(45) == 1


def test_an_exception_that_has_no_text_arrives(fresh: sky.ComputePool) -> None:
    """Row 7."""
    for make in (NoStr, NoRepr):
        error = (raiser(make) > fresh).exception(45)
        assert type(error).__name__ in (make.__name__, "RemoteError")
        assert make.__name__ in notes(error)  # type: ignore[arg-type]


def test_an_exception_of_five_megabytes_arrives_as_text_with_its_tail(pool: sky.ComputePool) -> None:
    """Row 7: capped at 256 KiB, the tail kept."""
    error = (raiser(lambda: ValueError("x" * 5_000_000 + "the end")) > pool).exception(45)
    assert isinstance(error, RemoteError | ValueError)
    assert "the end" in str(error)
    assert len(notes(error)) < 600_000


def test_a_base_exception_arrives_as_itself(pool: sky.ComputePool) -> None:
    """Row 7: BaseException, GeneratorExit, CancelledError are the body's own."""
    import asyncio

    for make in (lambda: Base("mine"), lambda: GeneratorExit("gen"), lambda: asyncio.CancelledError("async")):
        error = (raiser(make) > pool).exception(45)
        assert type(error) is type(make())
    assert echo(1) >> pool == 1


def test_stop_iteration_stays_stop_iteration_wherever_it_is_raised(fresh: sky.ComputePool) -> None:
    """Row 6: generators of ours on the way must not turn it into a RuntimeError."""
    body = raiser(lambda: StopIteration("over"))
    with pytest.raises(StopIteration):
        body >> fresh
    with pytest.raises(StopIteration):
        body @ fresh
    with pytest.raises(StopIteration):
        (body & echo(1)) >> fresh
    with pytest.raises(StopIteration):
        sky.gather(body, echo(1)) >> fresh


def test_an_exception_never_runs_code_on_the_client_that_stops_the_pool(fresh: sky.ComputePool, tmp_path: Path) -> None:
    """SEC-8 and row 7: a class that misbehaves when it is rebuilt here costs its own call only."""
    path = str(tmp_path / "mark")
    error = (raiser(lambda: ExitsOnClient(path)) > fresh).exception(45)
    assert error is not None
    assert (echo(1) > fresh).result(45) == 1


def test_an_exception_is_raised_once_and_the_body_not_run_again(pool: sky.ComputePool, tmp_path: Path) -> None:
    """Contract: an exception is never retried."""
    mark = tmp_path / "mark"

    @sky.compute(retries=5)
    def count() -> None:
        with mark.open("a") as file:
            file.write("x")
        raise ValueError("once")

    with pytest.raises(ValueError, match="once"):
        count() >> pool
    assert mark.read_text() == "x"


class Model:
    def __init__(self) -> None:
        self.weights = [1.0]
        self.lock = threading.Lock()


@pytest.mark.parametrize(
    ("make", "path", "kind"),
    [
        (lambda: {"model": Model(), "score": 1}, "result['model'].lock", "lock"),
        (lambda: [1, [2, {"x": (i for i in range(3))}]], "result[1][1]['x']", "generator"),
        (lambda: open(os.devnull, "w"), "result", "TextIOWrapper"),  # noqa: SIM115
        (lambda: (1, threading.Lock()), "result[1]", "lock"),
        (lambda: sys._getframe(), "result", "frame"),
    ],
    ids=["model", "generator", "file", "tuple", "frame"],
)
def test_a_result_that_cannot_travel_is_named_by_its_path(
    pool: sky.ComputePool, tmp_path: Path, make: Callable[[], Any], path: str, kind: str
) -> None:
    """Row 8: the body is not run again."""
    mark = tmp_path / "mark"

    @sky.compute
    def produce() -> Any:
        with mark.open("a") as file:
            file.write("x")
        return make()

    with pytest.raises(ResultNotSerializable) as caught:
        produce() >> pool
    assert f"{path} cannot" in str(caught.value)
    assert kind in str(caught.value)
    assert "produce" in str(caught.value)
    assert mark.read_text() == "x"
    assert echo(1) >> pool == 1


def test_functions_lambdas_and_classes_come_home(pool: sky.ComputePool) -> None:
    """Row 8: what can travel does."""

    def make() -> Any:
        class Made:
            value = 3

        return (lambda x: x + 1), Made(), Made

    fn, instance, kind = call(make) >> pool
    assert fn(1) == 2
    assert (instance.value, kind.value) == (3, 3)


def test_a_result_whose_class_exists_only_on_the_node_arrives(pool: sky.ComputePool, tmp_path: Path) -> None:
    """Row 8."""
    (tmp_path / "only_on_node.py").write_text("class Thing:\n    value = 1\n")

    def make(directory: str) -> Any:
        import sys

        sys.path.insert(0, directory)
        try:
            import only_on_node
        finally:
            sys.path.remove(directory)
        return only_on_node.Thing()

    future = call(functools.partial(make, str(tmp_path))) > pool
    assert future.result(45).value == 1  # it comes by value
    assert "only_on_node" not in sys.modules


def test_a_result_that_cannot_be_rebuilt_here_fails_the_same_way_each_time(pool: sky.ComputePool) -> None:
    """Row 8."""

    def make() -> Any:
        class Bomb:
            def __init__(self) -> None:
                self.data = bytes(2 << 20)

            def __reduce__(self) -> Any:
                return int, (self.data.hex()[:3] + "not a number" * 300_000,)

        return Bomb()

    future = call(make) > pool
    with pytest.raises(sky.errors.ResultNotSerializable, match="invalid literal"):
        future.result(45)
    with pytest.raises(sky.errors.ResultNotSerializable, match="invalid literal"):
        future.result(45)


def _refused(pool: sky.ComputePool, pending: Any) -> str:
    """The message of a call that is refused here, at once, before anything begins on a node."""
    seen: list[sky.events.Event] = []
    stop = pool.on_event(seen.append)
    began = time.monotonic()
    try:
        with pytest.raises(NotSerializable) as caught:
            pool.submit(pending)
        assert time.monotonic() - began < 10
        assert echo(0) >> pool == 0
    finally:
        stop()
    names = {e.name for e in seen if isinstance(e, sky.events.CallEnded)}
    assert names <= {"echo"}
    return str(caught.value)


def test_an_argument_that_cannot_travel_is_named(pool: sky.ComputePool) -> None:
    """Row 9."""

    @sky.compute
    def body(first: Any, other: Any = None) -> None: ...

    text = _refused(pool, body(1, other={"deep": [threading.Lock()]}))
    assert "other" in text
    assert "['deep'][0]" in text
    assert "lock" in text
    assert "body" in text


def test_a_closure_that_cannot_travel_is_named(pool: sky.ComputePool) -> None:
    """Row 9."""
    my_lock = threading.Lock()

    @sky.compute
    def body() -> None:
        with my_lock:
            pass

    text = _refused(pool, body())
    assert "my_lock" in text
    assert "closure" in text


def test_a_global_that_cannot_travel_is_named(pool: sky.ComputePool) -> None:
    """Row 9."""

    @sky.compute
    def body() -> None:
        with LOCK:
            pass

    text = _refused(pool, body())
    assert "LOCK" in text
    assert "global" in text


def test_a_default_that_cannot_travel_is_named(pool: sky.ComputePool) -> None:
    """Row 9."""

    @sky.compute
    def body(lock: Any = threading.Lock()) -> None: ...  # noqa: B008 - that is the fault

    assert "default" in _refused(pool, body())


def test_the_pool_itself_cannot_be_sent(pool: sky.ComputePool) -> None:
    """Row 40, row 9."""
    assert "pool" in _refused(pool, echo(pool)).lower()


def test_one_bad_call_keeps_a_whole_group_at_home(pool: sky.ComputePool, tmp_path: Path) -> None:
    """Row 9: before anything is sent."""
    mark = tmp_path / "mark"

    @sky.compute
    def body(x: Any) -> None:
        mark.touch()

    with pytest.raises(NotSerializable):
        sky.gather(body(1), body(threading.Lock()), body(2)) >> pool
    assert echo(1) @ pool == [1, 1]
    assert not mark.exists()


def test_a_result_above_the_limit_is_refused_on_the_node() -> None:
    """Row 11."""
    with sky.ComputePool(max_result_bytes=1 << 20, console=False) as pool:
        for make in (lambda: bytes(2 << 20), lambda: [bytes(1 << 19)] * 1 + [bytearray(1 << 20)]):
            with pytest.raises(ResultTooLarge) as caught:
                call(make) >> pool
            assert caught.value.limit == 1 << 20
            assert caught.value.size > 1 << 20
        assert len(call(lambda: bytes(1 << 19)) >> pool) == 1 << 19


HUGE = """
import resource, sys
import skyward as sky

SIZE = 300 << 20

@sky.compute
def huge():
    data = bytearray(SIZE)
    data[-1] = 7
    return data if KIND == "bytearray" else bytes(data)

KIND = sys.argv[1]
with sky.ComputePool(console=False) as pool:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    data = huge() >> pool
    assert len(data) == SIZE and data[-1] == 7
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    print(grown / SIZE)
"""


@pytest.mark.parametrize("kind", ["bytes", "bytearray"])
def test_a_huge_result_arrives_and_the_client_stays_small(
    script: Callable[..., subprocess.Popen[str]], kind: str
) -> None:
    """Row 11: client memory <= 2.2 x result."""
    program = script(HUGE, kind)
    out, err = program.communicate(timeout=120)
    assert program.returncode == 0, err
    assert float(out) <= 2.2


def test_results_that_nobody_asks_for_take_no_room(pool: sky.ComputePool) -> None:
    """Row 11, N17: a blob goes with its future."""
    directory = Path(pool._store.directory)
    future = call(lambda: bytearray(8 << 20)) > pool
    until(future.done)
    del future
    until(lambda: sum(f.stat().st_size for f in directory.rglob("*") if f.is_file()) < 8 << 20)


def test_a_broadcast_in_which_every_rank_raises_leaves_every_slot_usable() -> None:
    """Row 6, N18: the ranks' own verdicts cross the stop that the first failure sends to the others."""
    with sky.ComputePool(nodes=2, console=False, grace=1) as pool:
        for _ in range(10):
            with pytest.raises(ValueError, match="all of us"):
                raiser(lambda: ValueError("all of us")) @ pool
            assert [f.result(45) for f in [echo(i) > pool for i in range(4)]] == [0, 1, 2, 3]


class RebuiltWhenTold(Exception):
    """Unpickling it blocks, on the client, until a file is there."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (self.path,)


def _rebuilt(path: str) -> RebuiltWhenTold:
    import os
    import time

    while "COMPUTE_POOL" not in os.environ and not os.path.exists(path):
        time.sleep(0.01)
    return RebuiltWhenTold(path)


def test_an_exception_is_rebuilt_by_whoever_asks_for_it_and_holds_up_nobody_else(
    pool: sky.ComputePool, tmp_path: Path
) -> None:
    """Rebuilding runs the user's code: not on the thread that reads the links, and under no lock of ours (SEC-8)."""

    @sky.compute
    def fail(path: str) -> None:
        raise RebuiltWhenTold(path)

    @sky.compute
    def double(x: int) -> int:
        return 2 * x

    path = tmp_path / "go"
    failed = fail(str(path)) > pool
    wait([failed], timeout=60)
    group = sky.gather(double(1), fail(str(path))) > pool
    wait([group], timeout=60)
    assert failed.done()
    assert group.done()
    assert [double(i) >> pool for i in range(4)] == [0, 2, 4, 6]
    path.touch()
    for future in (failed, group):
        error = future.exception(30)
        assert isinstance(error, RebuiltWhenTold)
        assert error is future.exception()
        assert any("remote traceback" in note for note in error.__notes__)
