"""This process's part of the data; needs no framework."""

from __future__ import annotations

import operator
import random
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, TypeAlias, TypeVar, TypeVarTuple, cast, overload

from skyward.api.checks import check_switches
from skyward.api.info import holds_group, is_head, note_shard, pool_info
from skyward.api.usage_errors import corrects_call
from skyward.errors import InvalidArgument

__all__ = ["shard"]

A = TypeVar("A")
B = TypeVar("B")
Rest = TypeVarTuple("Rest")
Indices: TypeAlias = "range | array[int]"  # a text: array takes no parameter at run time before 3.12
BUILT_IN: tuple[type, ...] = (list, tuple, str, bytes, bytearray, array)


@overload
def shard(
    data: A,
    /,
    *,
    shuffle: bool = False,
    seed: int = 0,
    drop_last: bool = False,
    pad: bool = False,
    node: int | None = None,
    total_nodes: int | None = None,
) -> A: ...


@overload
def shard(
    first: A,
    second: B,
    /,
    *rest: *Rest,
    shuffle: bool = False,
    seed: int = 0,
    drop_last: bool = False,
    pad: bool = False,
    node: int | None = None,
    total_nodes: int | None = None,
) -> tuple[A, B, *Rest]: ...


@corrects_call("sky.shard", {"rank": "`node=`", "world_size": "`total_nodes=`", "num_shards": "`total_nodes=`"})
def shard(  # pyright: ignore[reportInconsistentOverload] - `*data: Any` takes any `*rest`; pyright cannot see it
    *data: Any,
    shuffle: bool = False,
    seed: int = 0,
    drop_last: bool = False,
    pad: bool = False,
    node: int | None = None,
    total_nodes: int | None = None,
) -> Any:
    """This rank's part of each of `data`: every N-th element, or with `drop_last` one of N equal blocks.

    A pool has N ranks: one per node, or as many as `processes_per_node` says. All parts together hold every element
    once. If the length is no multiple of N, some parts are longer by one; ranks that train together then wait for each
    other for ever. `drop_last` leaves out the remainder, `pad` repeats elements from the start until all parts are
    equally long.

    `shuffle` permutes first, the same way on every rank for the same `seed` and length. Several arrays must be equally
    long; their parts come as a tuple and still correspond. `node` and `total_nodes` replace the rank and the number of
    ranks. Outside a pool the part is everything.

    The type is kept, and only this part is copied: lists, tuples, strings, arrays and tensors along their first axis,
    objects of pandas and pyarrow, Hugging Face datasets (each split of a `DatasetDict`). Without `shuffle` and `pad`, a
    part of a numpy array or a torch tensor is a view: copy it before you change it in place. Another sequence is sliced
    if its slices keep its type, else the part is a list.
    """
    check_switches(shuffle=shuffle, drop_last=drop_last, pad=pad)
    if len(data) == 1 and _is(data[0], "datasets", "DatasetDict"):
        options: dict[str, Any] = {"shuffle": shuffle, "seed": seed, "drop_last": drop_last, "pad": pad}
        options |= {"node": node, "total_nodes": total_nodes}
        return type(data[0])({name: shard(split, **options) for name, split in data[0].items()})
    if not data:
        raise InvalidArgument("shard() got nothing to divide: pass the data, as in sky.shard(x, y).")
    lengths = [_length(item) for item in data]
    if len(set(lengths)) > 1:
        raise InvalidArgument(
            f"shard() got data of different lengths ({', '.join(map(str, lengths))}): their parts would not "
            "correspond. Cut them to one length, or call shard() for each."
        )
    if drop_last and pad:
        raise InvalidArgument("shard() got drop_last=True and pad=True: leave elements out or repeat some, not both.")
    explicit = node is not None and total_nodes is not None
    node, total_nodes = _place(node, total_nodes)
    indices = _indices(lengths[0], node, total_nodes, _seed(seed) if shuffle else None, drop_last, pad)
    if lengths[0] % total_nodes and not (drop_last or pad or explicit):
        _warn_uneven(lengths[0], total_nodes)
        note_shard(lengths[0], total_nodes, len(indices))
    parts = tuple(_take(item, indices) for item in data)
    return parts[0] if len(parts) == 1 else parts


def _place(node: int | None, total_nodes: int | None) -> tuple[int, int]:
    given = f"node={node!r}, total_nodes={total_nodes!r}"
    if node is None or total_nodes is None:
        info = pool_info()
        if info is None and (node is not None or total_nodes is not None):
            raise InvalidArgument(
                f"shard() got {given}: outside a pool, one is meaningless without the other. Give both, or neither."
            )
        here, nodes = (info.rank, info.world_size) if info else (0, 1)
    else:
        here, nodes = node, total_nodes
    try:
        node = operator.index(here if node is None else node)
        total_nodes = operator.index(nodes if total_nodes is None else total_nodes)
    except TypeError:
        raise InvalidArgument(f"shard() got {given}: both must be whole numbers.") from None
    if not 0 <= node < total_nodes:
        raise InvalidArgument(
            f"shard() cannot take the part of node {node} out of {total_nodes} (called with {given}): nodes count "
            "from 0 to total_nodes - 1, and what is not given comes from the pool. Give both."
        )
    return node, total_nodes


def _seed(seed: int) -> int:
    try:
        return operator.index(seed)
    except TypeError:
        raise InvalidArgument(
            f"shard() got seed={seed!r}: the nodes would permute differently. Give a whole number, the same on each."
        ) from None


_warned: set[tuple[int, int]] = set()


def _warn_uneven(length: int, total: int) -> None:
    """Once, in a process of a group: such nodes hang in their last step."""
    if not _in_group() or not is_head() or (length, total) in _warned:
        return
    _warned.add((length, total))
    longer = length % total
    info = pool_info()
    ranks = "ranks" if info is not None and info.world_size > info.total_nodes else "nodes"
    print(
        f"sky.shard: {length} elements over {total} {ranks}: {longer} of them get{'s' if longer == 1 else ''} "
        f"{length // total + 1}, the others {length // total}. {ranks.title()} that train together must make equally "
        "many steps, or they wait for each other forever. Write sky.shard(..., drop_last=True), or pad=True.",
        file=sys.stderr,
        flush=True,
    )


def _in_group() -> bool:
    dist: Any = sys.modules.get("torch.distributed")
    return holds_group() or (dist is not None and dist.is_available() and dist.is_initialized())


def _indices(length: int, node: int, total: int, seed: int | None, drop_last: bool, pad: bool) -> Indices:
    order: Indices = range(length)
    if seed is not None:
        order = array("q", order)
        random.Random(seed).shuffle(cast("Any", order))
    if drop_last:
        size = length // total
        return order[node * size : (node + 1) * size]
    part = order[node::total]
    if pad and length and length % total:
        part = array("q", part)  # on every rank, so that their parts are of one type
        if node >= length % total:
            # The elements after the last one are those from the start again, as torch's DistributedSampler has it.
            part.append(order[(length // total * total + node) % length])
    return part


def _length(data: Any) -> int:
    if _is(data, "datasets", "Dataset") or hasattr(data, "iloc") or _is_arrow(data):
        return len(data)
    if _has_rows(data):
        return int(data.shape[0])
    if isinstance(data, Sequence):
        return len(cast("Sequence[object]", data))
    name = type(data).__name__
    if isinstance(data, Mapping):
        advice = "Shard its items (sky.shard(list(d.items()))) or each value (sky.shard(*d.values()))"
    elif isinstance(data, Set):
        advice = "A set has no order that all nodes agree on: shard sorted(data)"
    elif isinstance(data, Iterator) or (hasattr(data, "__iter__") and not hasattr(data, "__len__")):
        advice = "It has no length: make a list of it, or take every N-th item with itertools.islice"
    elif hasattr(data, "__getitem__") and hasattr(data, "__len__") and not hasattr(data, "shape"):
        advice = "It is not a Sequence: shard its indices, sky.shard(range(len(data))), and pick those"
    else:
        advice = "It is a single value: pass a list, an array, a table or another sequence"
    raise InvalidArgument(f"shard() cannot divide a value of type {name}. {advice}.")


def _take(data: Any, indices: Indices) -> Any:
    if _is(data, "datasets", "Dataset"):
        return data.select(indices if isinstance(indices, range) else indices.tolist())
    if hasattr(data, "iloc"):
        return data.iloc[_key(indices)]
    if not isinstance(indices, range):
        if _is_arrow(data):
            return data.take(sys.modules["pyarrow"].array(indices, "int64"))
        if any(_is(data, "tensorflow", kind) for kind in ("Tensor", "Variable", "RaggedTensor")):
            return sys.modules["tensorflow"].gather(data, _key(indices))
        if _is(data, "pandas", "RangeIndex"):  # pandas makes one of some selections, and a plain Index of others
            return sys.modules["pandas"].Index(data.start + data.step * _key(indices), name=data.name)
        if isinstance(data, memoryview):
            return _rows_of_memory(cast("memoryview[int]", data), indices)
    if _has_rows(data) or _is_arrow(data):
        return data[_key(indices, tensor=_is(data, "torch", "Tensor"))]
    # The built-in type, also for a subclass: that is what its slices are.
    kind: Any = next((kind for kind in BUILT_IN if issubclass(type(data), kind)), None)
    if isinstance(indices, range):
        part = _slice(data, indices)
        return part if isinstance(part, kind or type(data)) else [data[i] for i in indices]
    items = (data[i] for i in indices)
    if kind is str:
        return "".join(items)
    if kind is array:
        part = data[:0]
        part.extend(items)
        return part
    return (kind or list)(items)


def _slice(data: Any, indices: range) -> Any:
    try:
        part = data[_key(indices)]
        return part if len(part) == len(indices) else None
    except Exception:  # a sequence need not know slices; one that is broken says so when its items are taken
        return None


def _key(indices: Indices, *, tensor: bool = False) -> Any:
    if isinstance(indices, range):
        return slice(indices.start, indices.stop, indices.step)
    if tensor:
        torch = sys.modules["torch"]
        # frombuffer refuses an empty buffer
        return torch.frombuffer(indices, dtype=torch.int64) if indices else torch.empty(0, dtype=torch.int64)
    numpy = sys.modules.get("numpy")
    return numpy.asarray(indices) if numpy else indices.tolist()


def _rows_of_memory(data: memoryview[int], indices: array[int]) -> memoryview[int]:
    if not indices:
        return data[:0]  # a cast knows no shape with a zero
    rows: Any = memoryview(bytearray().join(data[i : i + 1].tobytes() for i in indices))
    part: memoryview[int] = rows.cast(data.format, (len(indices), *(data.shape or ())[1:]))
    return part.toreadonly() if data.readonly else part


def _has_rows(data: Any) -> bool:
    return bool(getattr(data, "shape", None)) and hasattr(data, "__getitem__") and not isinstance(data, Mapping)


def _is_arrow(data: object) -> bool:
    return any(_is(data, "pyarrow", kind) for kind in ("Table", "RecordBatch", "Array", "ChunkedArray"))


def _is(data: object, module: str, name: str) -> bool:
    kind = getattr(sys.modules.get(module), name, None)
    return isinstance(kind, type) and isinstance(data, kind)
