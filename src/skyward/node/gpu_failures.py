"""What a failed body leaves on the GPU: a broken context, or unused memory.

Broken contexts are recognised by exception type and text. Standard library only; frameworks only if loaded.
"""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Iterator
from typing import Any

from skyward.transport import exceptions

__all__ = ["clean_up", "is_dead", "mark"]

_PACKAGES = frozenset(("torch", "jax", "jaxlib", "tensorflow", "triton", "cupy", "cupy_backends", "numba", "pycuda"))
_CUDA = re.compile(
    r"\b(?:CUDA|HIP) error: .*|\b(?:CUDA_ERROR|hipError|cudaError)_?[A-Z].*|\bCuda failure .*|\bunhandled cuda error.*"
    r"|\b(?:CUBLAS|CUDNN)_STATUS_(?:EXECUTION_FAILED|INTERNAL_ERROR).*"
)
_ABORTED = re.compile(r"communicator was aborted|NCCL [^\n]*\babort", re.I)
_OUT_OF_MEMORY = re.compile(r"out of memory|OUT_OF_MEMORY|RESOURCE_EXHAUSTED|ALLOC_FAILED|MemoryAllocation", re.I)
# The GPU has refused a call, and takes the next one.
_REFUSED = re.compile(
    r"invalid (argument|value|configuration|device|resource handle)|INVALID_(VALUE|DEVICE|HANDLE)|InvalidValue"
    r"|no kernel image|NO_BINARY_FOR_GPU|not supported|NOT_SUPPORTED|NOT_INITIALIZED|no CUDA-capable|NO_DEVICE"
    r"|driver version|stream is capturing|too many resources|peer access|busy or unavailable",
    re.I,
)
_REPLACED = (
    "node: after this error nothing works in its process any more, so the process was replaced. The next call works"
)
_LATE = ". CUDA reports such errors late: sky.Image(env={'CUDA_LAUNCH_BLOCKING': '1'}) has the traceback show the line"
_LONGEST_CHAIN = 16

_dead = False


def mark(error: BaseException) -> None:
    global _dead
    for each in _chain(error):
        if (kind := _fatal(each)) is not None:
            _dead = True
            exceptions.noted(error, _REPLACED + (_LATE if kind == "cuda" else "") + ".")
            return


def is_dead() -> bool:
    return _dead


def clean_up() -> None:
    """Frees GPU memory and checks that the GPU works. Call when the exception, whose frames hold tensors, is gone."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is None or _dead:
        return
    try:
        if cuda.is_initialized():
            devices = range(cuda.device_count())
            if any(map(cuda.memory_reserved, devices)):
                gc.collect()  # an exception and its frames often hold each other
            unused = any(cuda.memory_reserved(device) > cuda.memory_allocated(device) for device in devices)
            if unused and not _in_group(torch):
                cuda.empty_cache()
            cuda.current_stream().query()  # raises if the context is dead
    except Exception as exc:  # the body's own error is on its way; this one matters only if the GPU is lost
        mark(exc)


def _in_group(torch: Any) -> bool:
    """Freeing memory synchronizes: the GPU may wait for other ranks."""
    group = getattr(torch, "distributed", None)
    return group is not None and group.is_available() and group.is_initialized() and group.get_world_size() > 1


def _fatal(error: BaseException) -> str | None:
    kinds = type(error).__mro__
    if type(error) is not RuntimeError and not any(k.__module__.partition(".")[0] in _PACKAGES for k in kinds):
        return None
    try:
        text = str(error)
    except Exception:  # a class of the user's
        return None
    if any(kind.__name__ == "OutOfMemoryError" for kind in kinds) or _OUT_OF_MEMORY.search(text):
        return None
    if any(not _REFUSED.search(found) for found in _CUDA.findall(text)):
        return "cuda"
    return "nccl" if _ABORTED.search(text) else None


def _chain(error: BaseException) -> Iterator[BaseException]:
    waiting, seen = [error], set[int]()
    while waiting and len(seen) < _LONGEST_CHAIN:
        each = waiting.pop(0)
        if id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        waiting += [other for other in (each.__cause__, each.__context__) if other is not None]
        waiting += each.exceptions if isinstance(each, BaseExceptionGroup) else ()
