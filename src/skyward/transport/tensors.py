"""Tensors and arrays of torch, jax and numpy as buffers.

Frameworks are not imported here: reducers are registered once they are loaded.

    torch    a storage becomes one buffer, however many tensors share it
    jax      an array becomes the numpy array that it is on the host
    numpy    only what numpy itself would copy into the pickle: types of other packages (bfloat16), arrays with gaps
"""

from __future__ import annotations

import copyreg
import importlib
import pickle
import sys
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["INLINE", "TABLE", "is_plain", "local", "note_loaded_frameworks"]

TABLE: dict[type, Callable[[Any], Any]] = {complex: copyreg.dispatch_table[complex]}  # the only plain type in there

_PLAIN: dict[type, Callable[[Any], bool]] = {}

INLINE = 2 << 10  # bytes; below this, a buffer of its own costs more than a copy
_ALIGNED = 64
_STAGE = 32 << 20  # bytes of pinned memory, twice, through which large tensors leave a GPU


class _Local(threading.local):
    room: Callable[[int], memoryview] | None = None


local = _Local()
"""`room` returns memory for what leaves a GPU while this thread packs."""


def note_loaded_frameworks() -> None:
    for name in _frameworks.keys() & sys.modules.keys():
        module = sys.modules.get(name)
        if getattr(getattr(module, "__spec__", None), "_initializing", False):
            continue  # it is being imported
        add = _frameworks.pop(name, None)
        if add is not None and module is not None:
            add(module)


def is_plain(value: object) -> bool:
    """Whether a C pickler with the table is enough: nothing in it may be user code."""
    kind = type(value)
    if kind not in _PLAIN:
        note_loaded_frameworks()
    check = _PLAIN.get(kind)
    return check is not None and check(value)


def _module(name: str) -> Any:
    found = sys.modules.get(name)
    if found is None or getattr(found.__spec__, "_initializing", False):
        return importlib.import_module(name)
    return found


# torch


def _add_torch(torch: Any) -> None:
    if hasattr(torch, "UntypedStorage"):
        _PLAIN[torch.Tensor] = _is_plain_tensor
        TABLE[torch.Tensor] = _reduce_tensor
        TABLE[torch.UntypedStorage] = _reduce_storage
        TABLE[torch.storage.TypedStorage] = _reduce_typed_storage


def _is_plain_tensor(tensor: Any) -> bool:
    return (
        tensor.is_cpu
        and tensor.layout is sys.modules["torch"].strided
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_nested or tensor.__dict__)
        and not (tensor.is_conj() or tensor.is_neg())
    )


def _reduce_tensor(tensor: Any) -> Any:
    if _is_plain_tensor(tensor):
        shape = tuple(tensor.shape), tensor.stride()
        return _tensor, (tensor.untyped_storage(), tensor.dtype, tensor.storage_offset(), *shape)
    torch = sys.modules["torch"]
    made = tensor.__reduce_ex__(5)
    if made[0] is getattr(torch._utils, "_rebuild_tensor_v3", None):
        # its newest types have untyped storages, which it cannot rebuild by itself
        storage = torch.storage.TypedStorage(wrap_storage=made[1][0], dtype=torch.uint8, _internal=True)
        return (made[0], (storage, *made[1][1:]), *made[2:])
    return made


def _tensor(storage: Any, dtype: Any, *view: Any) -> Any:
    return _module("torch").empty(0, dtype=dtype, device="cpu").set_(storage, *view)


def _reduce_typed_storage(storage: Any) -> Any:
    # each tensor makes one of these for itself; what tensors share is the untyped one
    return _typed_storage, (storage._untyped_storage, storage.dtype)


def _typed_storage(untyped: Any, dtype: Any) -> Any:
    torch = _module("torch")
    return torch.storage.TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)


def _reduce_storage(storage: Any) -> Any:
    torch = sys.modules["torch"]
    device = storage.device
    if device.type == "meta":
        return storage.__reduce__()
    if device.type == "cpu":
        data = _memory(storage)
    else:
        data = _on_host(torch, torch.empty(0, dtype=torch.uint8, device=device).set_(storage))
    return _storage, (bytes(data) if data.nbytes < INLINE else pickle.PickleBuffer(data), str(device))


def _storage(data: Any, device: str) -> Any:
    torch = _module("torch")
    view = memoryview(data)
    flat = None if view.readonly or not view.nbytes else torch.frombuffer(view, dtype=torch.uint8)
    if flat is None or flat.data_ptr() % _ALIGNED:
        flat = torch.empty(view.nbytes, dtype=torch.uint8, device="cpu")
        _memory(flat.untyped_storage())[:] = view
    if device != "cpu" and _is_here(torch, torch.device(device)):
        flat = flat.to(device)
    return flat.untyped_storage()


def _memory(storage: Any) -> memoryview:
    """Not through numpy: torch would then forbid for ever to resize the storage."""
    import ctypes

    size: int = storage.nbytes()
    if not size:
        return memoryview(bytearray())
    array: Any = (ctypes.c_char * size).from_address(storage.data_ptr())
    array.storage = storage
    return memoryview(array).cast("B")


def _is_here(torch: Any, device: Any) -> bool:
    backend = getattr(torch, device.type, None)
    if backend is None or not backend.is_available():
        return False
    count = getattr(backend, "device_count", None)
    return count is None or (device.index or 0) < count()


def _on_host(torch: Any, flat: Any) -> memoryview:
    """Large ones through pinned memory."""
    size: int = flat.numel()
    if not size:
        return memoryview(b"")
    memory = local.room(size) if local.room is not None else torch.empty(size, dtype=torch.uint8, device="cpu").numpy()
    target = torch.frombuffer(memory, dtype=torch.uint8)
    if flat.device.type != "cuda" or size < 2 * _STAGE:
        target.copy_(flat)
        return memory
    with torch.cuda.device(flat.device):
        stages = [torch.empty(_STAGE, dtype=torch.uint8, device="cpu", pin_memory=True) for _ in range(2)]
        copied = [torch.cuda.Event() for _ in range(2)]
        starts = range(0, size, _STAGE)
        for number in range(len(starts) + 1):
            if number < len(starts):
                part = flat[starts[number] : starts[number] + _STAGE]
                stages[number % 2][: part.numel()].copy_(part, non_blocking=True)
                copied[number % 2].record()
            if number:
                copied[(number - 1) % 2].synchronize()
                part = target[starts[number - 1] : starts[number - 1] + _STAGE]
                part.copy_(stages[(number - 1) % 2][: part.numel()])
    return memory


# jax


def _add_jax(jax: Any) -> None:
    found = sys.modules.get("jax._src.array")
    if found is not None and hasattr(found, "ArrayImpl"):
        TABLE[found.ArrayImpl] = _reduce_jax_array
        _PLAIN[found.ArrayImpl] = _is_plain_jax_array


def _is_plain_jax_array(array: Any) -> bool:
    return not array.weak_type


def _reduce_jax_array(array: Any) -> Any:
    if array.weak_type:
        return array.__reduce__()  # a number, most often
    return _jax_array, (sys.modules["numpy"].asarray(array),)


def _jax_array(array: Any) -> Any:
    return _module("jax").device_put(array)  # on the CPU, it uses the array's memory


# numpy


def _add_numpy(numpy: Any) -> None:
    TABLE[numpy.ndarray] = _reduce_array
    _PLAIN[numpy.ndarray] = _is_plain_array
    numbers: set[type] = {kind for kind in numpy.sctypeDict.values() if issubclass(kind, numpy.number | numpy.bool_)}
    _PLAIN.update(dict.fromkeys(numbers, lambda number: True))


def _is_plain_array(array: Any) -> bool:
    dtype = array.dtype
    return not dtype.hasobject and dtype.isbuiltin != 2  # a type of another package


def _reduce_array(array: Any) -> Any:
    dtype, flags = array.dtype, array.flags
    if dtype.hasobject or not array.size or not dtype.itemsize:
        return array.__reduce_ex__(5)
    whole = flags.c_contiguous or flags.f_contiguous
    if dtype.isbuiltin != 2:  # a type of numpy's
        return (array if whole or _is_transposed(array) else array.copy()).__reduce_ex__(5)
    # the type of another package, which no memoryview knows
    order = "F" if flags.fnc else "C"
    data = (array if whole else array.copy()).reshape(-1, order=order).view("u1")
    return _array_of_type, (data, dtype, array.shape, order)


def _is_transposed(array: Any) -> bool:
    return array.transpose(sorted(range(array.ndim), key=lambda axis: -array.strides[axis])).flags.c_contiguous


def _array_of_type(data: Any, dtype: Any, shape: Any, order: str) -> Any:
    return data.view(dtype).reshape(shape, order=order)


_frameworks: dict[str, Callable[[Any], None]] = {"torch": _add_torch, "jax": _add_jax, "numpy": _add_numpy}
