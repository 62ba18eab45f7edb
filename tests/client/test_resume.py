"""What `resume=` keeps and takes, without a pool: items, versions, duplicates, damage, full disks."""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import skyward as sky
from skyward.api.compute import PendingCompute, resume_options
from skyward.client.resume import Resumed
from skyward.history import runs
from skyward.transport.fingerprint import Fingerprints
from skyward.transport.journal import Journal


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SKYWARD_STATE", str(tmp_path / "state"))
    return tmp_path / "state"


def function(source: str = "def train(x): return x * 2") -> Callable[..., Any]:
    made = ModuleType("program")
    exec(source, vars(made))
    return made.train


class Sweep:
    """One use of `resume="grid"`, as a map makes it."""

    def __init__(
        self, items: Sequence[Any], fn: Callable[..., Any] | None = None, changed: Any = None, extra: Any = None
    ) -> None:
        self.said: list[str] = []
        options = resume_options("grid", changed, extra)
        assert options is not None
        train = fn or function()
        calls = [PendingCompute[Any](train, (item,)) for item in items]
        self.run = Resumed(options, calls, {}, lambda text, level: self.said.append(text))
        self.known = dict(self.run.known)

    def compute(self, *results: Any) -> None:
        """Keeps results in the order of the calls that had none."""
        left = [index for index in range(100) if index not in self.known]
        for index, result in zip(left, results, strict=False):
            self.run.keep(index, [result])
        self.run.finish()


def test_what_was_kept_is_taken_and_the_rest_is_left() -> None:
    Sweep([1, 2, 3]).compute("one", "two")
    again = Sweep([3, 2, 1, 0])
    assert again.known == {1: "two", 2: "one"}
    assert again.said == ["2 of 4 taken from grid, 2 to compute."]
    again.compute("three", "zero")
    assert Sweep([0, 1, 2, 3]).known == {0: "zero", 1: "one", 2: "two", 3: "three"}


def test_duplicated_items_are_separate_samples() -> None:
    Sweep([1, 1, 2, 1]).compute("a", "b", "c", "d")
    run = Sweep([1, 2, 1, 1, 1])
    assert run.known == {0: "a", 1: "c", 2: "b", 3: "d"}
    run.run.finish()


def test_another_version_of_the_code_stops_it_and_names_what_has_changed() -> None:
    Sweep([1, 2], function("RATE = 1\ndef helper(x): return x\ndef train(x): return helper(x) + RATE")).compute(1, 2)
    newer = function("RATE = 2\ndef helper(x): return x\ndef train(x): return helper(x) + RATE")
    with pytest.raises(sky.SkywardError) as found:
        Sweep([1, 2, 3], newer)
    text = str(found.value)
    assert "2 of the kept results are from another version of train" in text
    assert "train > RATE" in text
    assert "helper" not in text
    assert 'changed="keep"' in text


def test_changed_keep_takes_them_and_is_asked_once() -> None:
    newer = function("def train(x): return x * 3")
    Sweep([1, 2]).compute("one", "two")
    kept = Sweep([1, 2, 3], newer, changed="keep")
    assert kept.known == {0: "one", 1: "two"}
    kept.compute("three")
    again = Sweep([1, 2, 3], newer)
    assert again.known == {0: "one", 1: "two", 2: "three"}
    again.run.finish()
    with pytest.raises(sky.SkywardError, match="another version"):
        Sweep([1], function("def train(x): return x * 4"))


def test_changed_redo_computes_them_and_the_old_code_finds_its_own_again() -> None:
    newer = function("def train(x): return x * 3")
    Sweep([1, 2]).compute("one", "two")
    redo = Sweep([1, 2], newer, changed="redo")
    assert not redo.known
    assert "2 of them are kept from another version" in redo.said[0]
    redo.compute("new one", "new two")
    for fn, expected in ((newer, {0: "new one", 1: "new two"}), (function(), {0: "one", 1: "two"})):
        run = Sweep([1, 2], fn)
        assert run.known == expected
        run.run.finish()


def test_what_else_results_depend_on_is_part_of_the_version() -> None:
    Sweep([1], extra={"data": "v1"}).compute("one")
    with pytest.raises(sky.SkywardError, match="resume_with"):
        Sweep([1], extra={"data": "v2"})
    run = Sweep([1], extra={"data": "v1"})
    assert run.known == {0: "one"}
    run.run.finish()


def test_functions_of_other_names_do_not_meet() -> None:
    Sweep([1]).compute("one")
    other = function("def other(x): return x\ntrain = other")
    run = Sweep([1], other)
    assert not run.known
    assert "the results there (1) are of other calls" in run.said[0]
    run.run.finish()


class Named:
    def __init__(self, value: Any) -> None:
        self.value = value


def test_results_of_every_kind_come_back() -> None:
    class Local:
        def __eq__(self, other: object) -> bool:
            return type(other).__name__ == "Local"

        __hash__ = None  # type: ignore[assignment]

    values = [None, float("inf"), Named(1), Local(), np.arange(10), np.arange(300_000), b"x" * 3_000_000, lambda: 5]
    Sweep(range(8)).compute(*values)
    found = Sweep(range(8)).known
    assert type(found[2]) is Named
    assert found[3] == Local()
    assert (found[5] == values[5]).all()
    assert found[6] == values[6]
    assert found[7]() == 5


def test_a_damaged_result_is_computed_again_and_a_line_says_so(state: Path) -> None:
    Sweep(range(6)).compute(*(np.full(300_000, number) for number in range(3)), 3, 4, 5)
    folder = state / "runs" / "grid"
    files = sorted((folder / "results").iterdir())
    assert len(files) == 3
    files[0].write_bytes(files[0].read_bytes()[:-100])
    data = bytearray(files[1].read_bytes())
    data[5000] ^= 1
    files[1].write_bytes(data)
    files[2].unlink()
    lines = (folder / "journal").read_bytes().split(b"\n")
    at = next(number for number, line in enumerate(lines) if b'"fact":"result"' in line and b'"value"' in line)
    lines[at] = lines[at][:-5] + b"xxxxx"
    (folder / "journal").write_bytes(b"\n".join(lines))
    run = Sweep(range(6))
    assert run.known == {4: 4, 5: 5}
    assert "3 cannot be read, and are computed again" in run.said[0]
    assert re.search(r"damaged lines in \S*/runs/grid/journal, whose results are missing: 1\.$", run.said[0])
    run.compute(0, 1, 2, 3)
    again = Sweep(range(6))
    assert again.known == {number: number for number in range(6)}
    assert "damaged" not in again.said[0]
    again.run.finish()


def test_what_a_killed_program_has_left_half_written_is_removed(state: Path) -> None:
    Sweep([1]).compute(b"x" * 3_000_000)
    folder = state / "runs" / "grid" / "results"
    whole = set(folder.iterdir())
    (folder / ".123-456.part").write_bytes(bytes(1000))
    Sweep([1]).run.finish()
    assert set(folder.iterdir()) == whole


def test_every_moment_at_which_the_journal_is_cut_leaves_a_run_that_goes_on(state: Path) -> None:
    Sweep(range(3)).compute("a", "b", "c")
    path = state / "runs" / "grid" / "journal"
    whole = path.read_bytes()
    for cut in range(0, len(whole), 7):
        path.write_bytes(whole[:cut])
        run = Sweep(range(3))
        assert all(run.known[index] == "abc"[index] for index in run.known)
        assert list(run.known) == list(range(len(run.known)))
        run.compute(*"abc"[len(run.known) :])
        again = Sweep(range(3))
        assert again.known == {0: "a", 1: "b", 2: "c"}
        again.run.finish()


def test_a_full_disk_stops_nothing_and_what_waits_is_written_when_there_is_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Sweep(range(4))
    run.run.keep(0, ["a"])
    write = Journal.append_lines

    def full(self: Journal, lines: bytes, sync: bool = True) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Journal, "append_lines", full)
    run.run.keep(1, ["b"])
    run.run.keep(2, ["c"])
    assert sum("No space left on device" in text for text in run.said) == 1
    monkeypatch.setattr(Journal, "append_lines", write)
    run.run.keep(3, ["d"])
    run.run.finish()
    again = Sweep(range(4))
    assert again.known == {0: "a", 1: "b", 2: "c", 3: "d"}
    again.run.finish()


def test_a_secret_in_a_result_or_an_argument_is_written_nowhere(state: Path) -> None:
    run = Sweep([sky.Secret("hunter2-of-the-item")], extra=sky.Secret("hunter2-of-the-run"))
    run.compute({"token": sky.Secret("hunter2-of-the-result")})
    assert any("Secret are not kept" in text for text in run.said)
    assert not [path for path in state.rglob("*") if path.is_file() and b"hunter2" in path.read_bytes()]


def test_what_cannot_be_resumed_is_refused_with_words() -> None:
    def stream(x: int) -> Any:
        yield x

    with pytest.raises(sky.SkywardError, match="is a generator"):
        Sweep([1], stream)
    with pytest.raises(sky.SkywardError, match="iterator, which can be read once"):
        Sweep([iter([1])])
    with pytest.raises(sky.SkywardError, match="changed= needs resume="):
        sky.gather(changed="keep")
    with pytest.raises(sky.SkywardError, match=r'"keep" takes results of other code'):
        sky.gather(resume="grid", changed="always")  # type: ignore[call-overload]
    for name in (3, "", "a b", "../grid"):
        with pytest.raises(sky.SkywardError, match="a name for the results"):
            sky.gather(resume=name)  # type: ignore[call-overload]
    assert not runs.runs()


def test_the_second_of_two_programs_is_told_who_holds_the_name() -> None:
    run = Sweep([1])
    with pytest.raises(sky.SkywardError, match=rf"run 'grid' is in use by process {os.getpid()} "):
        Sweep([1])
    run.run.finish()
    Sweep([1]).run.finish()


def test_a_run_that_stops_lets_go_of_its_name() -> None:
    Sweep([1]).compute("one")
    for _ in range(2):
        with pytest.raises(sky.SkywardError, match="another version"):
            Sweep([1], function("def train(x): return x * 3"))


def cpu_seconds(act: Callable[[], Any]) -> float:
    """Of this thread: what others do on the machine does not count."""
    began = time.thread_time()
    act()
    return time.thread_time() - began


def test_keeping_results_takes_less_than_3_percent_of_a_map_of_10_ms_items() -> None:
    def sweep() -> None:
        run = Sweep(range(1000)).run
        for first in range(0, 1000, 20):
            run.keep(first, list(range(20)))
        run.finish()

    assert cpu_seconds(sweep) < 0.03 * 1000 * 0.010


def test_a_hundred_thousand_results_are_loaded_in_seconds() -> None:
    first = Sweep(range(100_000)).run
    first.keep(0, range(100_000))
    first.finish()
    again: list[Sweep] = []
    assert cpu_seconds(lambda: again.append(Sweep(range(100_000)))) < 10
    assert again[0].known == dict(enumerate(range(100_000)))
    again[0].run.finish()


def test_the_key_of_a_buffer_of_a_megabyte_takes_less_than_a_millisecond() -> None:
    prints, arrays = Fingerprints(), [np.full(1 << 17, number) for number in range(50)]
    train = function()
    calls = [PendingCompute[Any](train, (array,)) for array in arrays]
    assert min(cpu_seconds(lambda call=call: prints.item(call, "train")) for call in calls) < 0.001


def test_results_are_written_in_one_piece_for_each_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Sweep(range(1000))
    writes: list[int] = []
    write = Journal.append_lines
    monkeypatch.setattr(
        Journal, "append_lines", lambda self, lines, sync=True: (writes.append(sync), write(self, lines, sync))
    )
    for start in range(0, 1000, 100):
        run.run.keep(start, list(range(100)))
    assert writes == [False] * 10
    run.run.finish()
