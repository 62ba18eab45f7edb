"""This node's part of the data: nothing lost, nothing twice, types kept."""

from __future__ import annotations

import subprocess
import sys
from array import array
from collections import UserList, deque
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyward.api import sharding
from skyward.api.info import InstanceInfo, Peer
from skyward.api.sharding import shard
from skyward.errors import InvalidArgument


def parts(data: Any, total: int, **options: Any) -> list[Any]:
    return [shard(data, node=node, total_nodes=total, **options) for node in range(total)]


pytestmark = pytest.mark.usefixtures("no_pool")


def enter_pool(monkeypatch: pytest.MonkeyPatch, node: int, total: int) -> None:
    peers = tuple(Peer(i, f"10.0.0.{i + 1}") for i in range(total))
    info = InstanceInfo(node=node, total_nodes=total, head_addr="10.0.0.1", head_port=1, job_id="p", peers=peers)
    monkeypatch.setenv("COMPUTE_POOL", info.to_json())


@given(st.integers(0, 200), st.integers(1, 9), st.booleans(), st.integers(-(2**40), 2**40))
def test_the_parts_are_the_whole_without_overlap(length: int, total: int, shuffle: bool, seed: int) -> None:
    """S1-30, S1-32."""
    found = parts(list(range(length)), total, shuffle=shuffle, seed=seed)
    assert sorted(chain(*found)) == list(range(length))
    assert max(map(len, found)) - min(map(len, found)) <= 1


@given(st.integers(0, 200), st.integers(1, 9), st.booleans())
def test_drop_last_gives_equal_contiguous_blocks(length: int, total: int, shuffle: bool) -> None:
    """S1-35, D6."""
    found = parts(list(range(length)), total, drop_last=True, shuffle=shuffle)
    assert {len(part) for part in found} == {length // total}
    whole = shard(list(range(length)), shuffle=shuffle)
    assert list(chain(*found)) == whole[: length // total * total]


def test_the_split_strides() -> None:
    """S1-35, T16."""
    assert parts(list("abcdefg"), 3) == [["a", "d", "g"], ["b", "e"], ["c", "f"]]


def test_the_pool_says_which_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """S1-29, S1-30."""
    enter_pool(monkeypatch, 1, 3)
    assert shard(range(7)) == range(1, 7, 3)
    assert shard([0, 1, 2, 3, 4], node=2) == [2]
    assert shard([0, 1, 2, 3, 4], total_nodes=2) == [1, 3]
    assert shard([0, 1, 2, 3, 4], node=0, total_nodes=1) == [0, 1, 2, 3, 4]


def test_the_processes_of_a_node_get_different_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    peers = tuple(Peer(i, f"10.0.0.{i + 1}") for i in range(2))
    parts: list[list[int]] = []
    for node, worker in ((0, 0), (0, 1), (1, 0), (1, 1)):
        info = InstanceInfo(
            node=node,
            worker=worker,
            total_nodes=2,
            workers_per_node=2,
            head_addr="10.0.0.1",
            head_port=1,
            job_id="p",
            peers=peers,
        )
        monkeypatch.setenv("COMPUTE_POOL", info.to_json())
        parts.append(shard(list(range(10))))
    assert parts == [[0, 4, 8], [1, 5, 9], [2, 6], [3, 7]]


def test_outside_a_pool_the_part_is_everything() -> None:
    """D6."""
    assert shard([3, 1, 2]) == [3, 1, 2]
    assert sorted(shard([3, 1, 2], shuffle=True, seed=4)) == [1, 2, 3]


def test_the_permutation_depends_on_the_seed_alone() -> None:
    """S1-32."""
    data = list(range(50))
    first = shard(data, shuffle=True, seed=1)
    assert first == shard(data, shuffle=True, seed=1)
    assert first != shard(data, shuffle=True, seed=2)
    assert first != data


def test_the_permutation_needs_no_numpy() -> None:
    """S1-29, S1-32: a node without numpy agrees with one that has it."""
    script = (
        "import sys; from skyward.api.sharding import shard;"
        "print(shard(list(range(30)), shuffle=True, seed=5, node=1, total_nodes=3), 'numpy' in sys.modules)"
    )
    import skyward.api.sharding

    source = str(Path(skyward.api.sharding.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", script], env={"PYTHONPATH": source}, capture_output=True, text=True, check=True
    )
    here = shard(np.arange(30), shuffle=True, seed=5, node=1, total_nodes=3)
    assert done.stdout == f"{here.tolist()} False\n"


def test_several_arrays_stay_aligned() -> None:
    """S1-33, S3-21."""
    x, y = np.arange(20).reshape(10, 2), [row * 2 for row in range(10)]
    for node in range(3):
        part_x, part_y, part_z = shard(x, y, tuple(y), shuffle=True, seed=42, node=node, total_nodes=3)
        assert isinstance(part_x, np.ndarray)
        assert [int(row[0]) for row in part_x] == part_y
        assert part_z == tuple(part_y)


def test_unequal_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match=r"different lengths \(3, 2\)"):
        shard([1, 2, 3], [1, 2])


class Squares(Sequence[int]):
    """Has no slices, and remembers what was asked of it."""

    def __init__(self, length: int) -> None:
        self.length, self.asked = length, set[int]()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, int):
            raise KeyError(index)
        if index >= self.length:
            raise IndexError(index)
        self.asked.add(index)
        return index * index


class Names(list[str]):
    pass


@pytest.mark.parametrize(
    ("data", "part", "shuffled"),
    [
        ([0, 1, 2, 3, 4], [1, 3], list),
        ((0, 1, 2, 3, 4), (1, 3), tuple),
        (range(5), range(1, 5, 2), list),
        ("abcde", "bd", str),
        (b"abcde", b"bd", bytes),
        (bytearray(b"abcde"), bytearray(b"bd"), bytearray),
        (array("h", range(5)), array("h", [1, 3]), array),
        (Names("abcde"), ["b", "d"], list),
        (UserList("abcde"), UserList("bd"), list),
        (deque("abcde"), ["b", "d"], list),
        (Squares(5), [1, 9], list),
    ],
)
def test_the_type_of_a_sequence_is_kept(data: Any, part: Any, shuffled: type) -> None:
    """S1-31."""
    found = shard(data, node=1, total_nodes=2)
    assert found == part
    assert type(found) is type(part)
    mixed = parts(data, 2, shuffle=True, seed=3)
    assert {type(some) for some in mixed} == {shuffled}
    assert sorted(chain(*mixed)) == sorted(data)


def test_only_this_nodes_part_is_read() -> None:
    """Issue: nothing but the part is copied."""
    data = Squares(100)
    shard(data, node=1, total_nodes=10, shuffle=True)
    assert len(data.asked) == 10


def test_an_array_is_a_view_or_a_copy_of_its_part() -> None:
    """S1-31."""
    data = np.arange(12.0).reshape(6, 2)
    view = shard(data, node=1, total_nodes=2)
    assert view.tolist() == data[1::2].tolist()
    assert np.shares_memory(view, data)
    mixed = shard(data, node=1, total_nodes=2, shuffle=True)
    assert not np.shares_memory(mixed, data)
    assert (mixed.dtype, mixed.shape) == (data.dtype, (3, 2))
    assert shard(np.empty((0, 3)), shuffle=True).shape == (0, 3)
    assert shard(np.ma.masked_array([1, 2], [True, False]), shuffle=True).mask.sum() == 1


def test_more_nodes_than_elements_leave_some_with_nothing() -> None:
    assert parts("ab", 3) == ["a", "b", ""]
    assert [len(part) for part in parts(np.arange(2), 3, shuffle=True)] == [1, 1, 0]
    assert parts([1, 2], 3, drop_last=True) == [[], [], []]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({1, 2}, "sorted"),
        (frozenset((1, 2)), "sorted"),
        ({"a": 1}.keys(), "sorted"),
        ({"a": 1}, "items"),
        ((i for i in range(3)), "list"),
        (iter([1]), "list"),
        (map(str, [1]), "list"),
        (3, "single value"),
        (3.5, "single value"),
        (None, "single value"),
        (np.float64(3), "single value"),
        (np.array(3), "single value"),
    ],
)
def test_what_cannot_be_divided_is_refused_in_words(data: object, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        shard(data)
    assert type(data).__name__ in str(caught.value)


def test_a_map_style_dataset_is_sharded_by_its_indices() -> None:
    class Pictures:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> int:
            return index

    with pytest.raises(ValueError, match="indices"):
        shard(Pictures())


@pytest.mark.parametrize(
    "options",
    [
        {"node": 0},
        {"total_nodes": 2},
        {"node": 2, "total_nodes": 2},
        {"node": -1, "total_nodes": 2},
        {"node": 0, "total_nodes": 0},
        {"node": "0", "total_nodes": 2},
        {"node": 0.0, "total_nodes": 2},
        {"shuffle": True, "seed": None},
        {"shuffle": True, "seed": 0.5},
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="shard"):
        shard([1, 2, 3], **options)


def test_a_node_outside_the_given_total_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    enter_pool(monkeypatch, 3, 4)
    with pytest.raises(ValueError, match="Give both"):
        shard([1, 2, 3], total_nodes=2)


def test_nothing_to_divide_is_an_error() -> None:
    """D6."""
    with pytest.raises(ValueError, match="nothing"):
        shard()  # type: ignore[call-overload]


def test_tables_keep_their_type_and_index() -> None:
    """S1-31: pandas."""
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame({"x": range(5), "y": list("abcde")}, index=list("vwxyz"))
    part = shard(frame, node=1, total_nodes=2)
    assert part.equals(frame.iloc[[1, 3]])
    x, y = shard(frame["x"], frame["y"], shuffle=True, node=0, total_nodes=2)
    assert isinstance(x, pd.Series)
    assert list(x.index) == list(y.index)
    assert list(shard(frame.index, node=1, total_nodes=2)) == ["w", "y"]


def test_tensors_stay_tensors() -> None:
    """S1-31: torch."""
    torch = pytest.importorskip("torch")
    data = torch.arange(12).reshape(6, 2)
    assert shard(data, node=1, total_nodes=2).tolist() == data[1::2].tolist()
    found = parts(data, 4, shuffle=True)
    assert sorted(torch.cat(found)[:, 0].tolist()) == [0, 2, 4, 6, 8, 10]
    assert shard(torch.empty(0, 3), shuffle=True).shape == (0, 3)
    with pytest.raises(ValueError, match="single value"):
        shard(torch.tensor(3))


def test_jax_arrays_stay_jax_arrays() -> None:
    """S1-31: jax."""
    jax = pytest.importorskip("jax")
    data = jax.numpy.arange(7)
    assert isinstance(shard(data, node=1, total_nodes=2), jax.Array)
    found = parts(data, 2, shuffle=True)
    assert all(isinstance(part, jax.Array) for part in found)
    assert sorted(chain(*(part.tolist() for part in found))) == list(range(7))


def test_hugging_face_datasets_stay_datasets() -> None:
    """S1-31: datasets."""
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"x": list(range(7))})
    found = parts(data, 2, shuffle=True)
    assert all(isinstance(part, datasets.Dataset) for part in found)
    assert sorted(chain(*(part["x"] for part in found))) == list(range(7))
    assert list(shard(data, node=1, total_nodes=2, drop_last=True)["x"]) == [3, 4, 5]


def test_each_split_of_a_dataset_dict_is_sharded() -> None:
    """What `load_dataset("x")` returns."""
    datasets = pytest.importorskip("datasets")
    splits = {"train": list(range(7)), "test": list(range(3))}
    data = datasets.DatasetDict({name: datasets.Dataset.from_dict({"x": rows}) for name, rows in splits.items()})
    found = parts(data, 2, shuffle=True, pad=True)
    assert {type(part) for part in found} == {datasets.DatasetDict}
    for name, rows in splits.items():
        assert sorted(set(chain(*(part[name]["x"] for part in found)))) == rows
    with pytest.raises(InvalidArgument, match=r"DatasetDict. Shard its items"):
        shard(data, [1, 2])


def test_arrow_data_keeps_its_type() -> None:
    pa = pytest.importorskip("pyarrow")
    table = pa.table({"x": range(7)})
    for whole in (table, table.to_batches()[0], table["x"], table["x"].combine_chunks()):
        for options in ({}, {"shuffle": True}, {"pad": True}):
            found = parts(whole, 3, **options)
            assert {type(part) for part in found} == {type(whole)}
            numbers = [part["x"] if hasattr(part, "column_names") else part for part in found]
            assert sorted(set(chain(*(part.to_pylist() for part in numbers)))) == list(range(7))
    assert [len(part) for part in parts(table[:2], 3, shuffle=True)] == [1, 1, 0]


@pytest.mark.parametrize("whole", [b"0123456", array("h", range(7)), np.arange(14.0).reshape(7, 2)])
def test_memoryviews_stay_memoryviews(whole: Any) -> None:
    data = memoryview(whole)
    for options in ({}, {"shuffle": True}, {"pad": True}):
        found = parts(data, 3, **options)
        assert {(type(part), part.format, part.readonly) for part in found} == {
            (memoryview, data.format, data.readonly)
        }
        rows = [row if isinstance(row, list) else [row] for part in found for row in part.tolist()]
        assert sorted({tuple(row) for row in rows}) == sorted(tuple(row) for row in np.asarray(data).reshape(7, -1))
    assert [len(part) for part in parts(data[:2], 3, shuffle=True)] == [1, 1, 0]


def test_padded_parts_have_one_type_on_all_ranks() -> None:
    pd = pytest.importorskip("pandas")
    for whole in (range(7), UserList(range(7)), pd.Index(range(7)), Squares(7), np.arange(7)):
        found = parts(whole, 3, pad=True)
        assert len({type(part) for part in found}) == 1
        assert [list(part) for part in found] == parts(list(whole), 3, pad=True)


@pytest.mark.parametrize(("length", "total"), [(129, 2), (10, 4), (7, 7), (1, 3), (0, 2), (8, 4)])
@pytest.mark.parametrize("shuffle", [False, True])
def test_padded_parts_are_equally_long_and_hold_everything(length: int, total: int, shuffle: bool) -> None:
    """Nodes that train together make equally many steps; nothing is left out, and no more is repeated than needed."""
    data = list(range(length))
    padded, plain = parts(data, total, shuffle=shuffle, pad=True), parts(data, total, shuffle=shuffle)
    assert {len(part) for part in padded} == {-(-length // total)}
    assert sorted(set(chain(*padded))) == data
    assert sum(map(len, padded)) - length < total
    assert all(part[: len(own)] == own for part, own in zip(padded, plain, strict=True))


def test_padding_keeps_types_and_correspondence() -> None:
    x, y = np.arange(5) * 10, tuple(range(5))
    for node in (0, 1):
        mine, own = shard(x, y, pad=True, node=node, total_nodes=2)
        assert isinstance(mine, np.ndarray)
        assert isinstance(own, tuple)
        assert mine.tolist() == [10 * i for i in own]
        assert len(own) == 3
    assert shard("abc", pad=True, node=1, total_nodes=2) == "ba"


def test_leaving_out_and_repeating_at_once_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="not both"):
        shard([1], drop_last=True, pad=True)


def test_uneven_parts_are_noted_once_where_nodes_form_a_group(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """S3-22: they hang in the step that some nodes do not make."""
    monkeypatch.setattr(sharding, "_warned", set())
    enter_pool(monkeypatch, 0, 2)
    shard(range(129))
    assert capfd.readouterr().err == ""
    monkeypatch.setattr(sharding, "_in_group", lambda: True)
    shard(range(128))
    shard(range(129), drop_last=True)
    shard(range(129), pad=True)
    assert capfd.readouterr().err == ""
    for _ in range(2):
        shard(range(129))
    told = capfd.readouterr().err
    assert told.count("drop_last=True") == 1
    assert "1 of them gets 65, the others 64" in told
