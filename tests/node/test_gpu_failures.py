"""Which errors of a GPU cost the process, and what is returned after those that do not."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from skyward.node import gpu_failures

LATE = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
    "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\nCompile with `TORCH_USE_CUDA_DSA` to enable "
    "device-side assertions.\n"
)


def kind(name: str, module: str, base: type[Exception] = RuntimeError) -> type[Exception]:
    return type(name, (base,), {"__module__": module})


Accelerator = kind("AcceleratorError", "torch")
OutOfMemory = kind("OutOfMemoryError", "torch")
Xla = kind("XlaRuntimeError", "jaxlib._jax")
Backend = kind("DistBackendError", "torch.distributed")
Cupy = kind("CUDARuntimeError", "cupy_backends.cuda.api.runtime")
Own = kind("TrainingError", "__main__", Exception)


@pytest.fixture(autouse=True)
def alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_failures, "_dead", False)


def raised_from(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


def raised_while(error: Exception, context: Exception) -> Exception:
    error.__context__ = context
    return error


@pytest.mark.parametrize(
    "error",
    [
        Accelerator("CUDA error: device-side assert triggered\nSearch for `cudaErrorAssert' in" + LATE),
        RuntimeError("CUDA error: device-side assert triggered" + LATE),
        RuntimeError("CUDA error: an illegal memory access was encountered" + LATE),
        RuntimeError("CUDA error: uncorrectable ECC error encountered" + LATE),
        RuntimeError("CUDA error: unspecified launch failure" + LATE),
        RuntimeError("CUDA error: the launch timed out and was terminated" + LATE),
        RuntimeError("HIP error: an illegal memory access was encountered"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle, opa, opb)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
        Xla("INTERNAL: CUDA error: Could not synchronize CUDA stream: CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory"),
        Xla("INTERNAL: Failed to launch CUDA kernel: fusion: CUDA_ERROR_ASSERT: device-side assert triggered"),
        Cupy("cudaErrorIllegalAddress: an illegal memory access was encountered"),
        Backend("NCCL error in: NCCLUtils.cpp:94, unhandled cuda error\nCuda failure 700 'an illegal memory access'"),
        raised_from(Own("epoch 3 failed"), RuntimeError("CUDA error: device-side assert triggered")),
        raised_while(ValueError("no"), RuntimeError("CUDA error: device-side assert triggered")),
        ExceptionGroup("two", [ValueError("a"), RuntimeError("CUDA error: device-side assert triggered")]),
    ],
    ids=lambda error: f"{type(error).__name__}: {str(error)[:50]}",
)
def test_after_an_error_that_kills_the_context_the_process_is_replaced_and_the_error_says_so(error: Exception) -> None:
    gpu_failures.mark(error)
    assert gpu_failures.is_dead()
    (note,) = error.__notes__
    assert "the process was replaced" in note
    assert "CUDA_LAUNCH_BLOCKING" in note


def test_an_aborted_communicator_costs_the_process_too() -> None:
    error = Backend("NCCL communicator was aborted on rank 0. Original reason for failure was: timeout")
    gpu_failures.mark(error)
    assert gpu_failures.is_dead()
    assert "CUDA_LAUNCH_BLOCKING" not in error.__notes__[0]


def endless() -> Exception:
    error = ValueError("around")
    error.__context__ = KeyError("and around")
    error.__context__.__context__ = error
    return error


class Odd(RuntimeError):
    __module__ = "torch.odd"

    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize(
    "error",
    [
        OutOfMemory("CUDA out of memory. Tried to allocate 120.00 GiB. GPU 0 has a total capacity of 139.72 GiB"),
        RuntimeError("CUDA error: out of memory" + LATE),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("CUDA error: invalid device ordinal" + LATE),
        RuntimeError("CUDA error: no kernel image is available for execution on the device" + LATE),
        RuntimeError("CUDA error: invalid argument" + LATE),
        Xla("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 137438953472 bytes."),
        Xla("INTERNAL: CUDA error: Failed to allocate: CUDA_ERROR_OUT_OF_MEMORY: out of memory"),
        Xla("INTERNAL: Generated function failed: CpuCallback error: ValueError: no"),
        Backend("NCCL error in: NCCLUtils.cpp:94, unhandled cuda error\nCuda failure 2 'out of memory'"),
        Backend("[1] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d: Socket Timeout"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 2x3)"),
        AssertionError("Torch not compiled with CUDA enabled"),
        Own("CUDA error: device-side assert triggered, says a test"),
        ValueError("CUDA error: device-side assert triggered"),
        endless(),
        Odd(),
        KeyboardInterrupt(),
    ],
    ids=lambda error: f"{type(error).__name__}: {'' if isinstance(error, Odd) else str(error)[:50]}",
)
def test_after_any_other_error_the_process_stays(error: BaseException) -> None:
    gpu_failures.mark(error)
    assert not gpu_failures.is_dead()
    assert not hasattr(error, "__notes__")


class FakeCuda:
    """torch.cuda, with so many bytes reserved and in use on each of its devices."""

    def __init__(self, reserved: list[int], used: list[int], initialized: bool = True) -> None:
        self.reserved, self.used, self.initialized = reserved, used, initialized
        self.emptied = 0
        self.error: Exception | None = None

    def is_initialized(self) -> bool:
        return self.initialized

    def device_count(self) -> int:
        return len(self.reserved)

    def memory_reserved(self, device: int) -> int:
        return self.reserved[device]

    def memory_allocated(self, device: int) -> int:
        return self.used[device]

    def empty_cache(self) -> None:
        self.emptied += 1

    def current_stream(self) -> FakeCuda:
        return self

    def query(self) -> bool:
        if self.error is not None:
            raise self.error
        return True


def clean_up(monkeypatch: pytest.MonkeyPatch, cuda: Any, **more: Any) -> None:
    monkeypatch.setitem(gpu_failures.sys.modules, "torch", SimpleNamespace(cuda=cuda, **more) if cuda else None)
    gpu_failures.clean_up()


@pytest.mark.parametrize(
    ("cuda", "emptied"),
    [
        (FakeCuda([20 << 30], [0]), 1),
        (FakeCuda([1 << 20, 20 << 30], [1 << 20, 5 << 30]), 1),
        (FakeCuda([1 << 20], [1 << 20]), 0),
        (FakeCuda([20 << 30], [0], initialized=False), 0),
    ],
)
def test_memory_that_nobody_uses_is_returned(monkeypatch: pytest.MonkeyPatch, cuda: FakeCuda, emptied: int) -> None:
    clean_up(monkeypatch, cuda)
    assert cuda.emptied == emptied


@pytest.mark.parametrize(
    ("available", "in_group", "ranks"), [(True, True, 2), (True, True, 1), (True, False, 0), (False, False, 0)]
)
def test_a_rank_that_fails_frees_nothing_while_its_gpu_may_wait_for_the_others(
    monkeypatch: pytest.MonkeyPatch, available: bool, in_group: bool, ranks: int
) -> None:
    cuda = FakeCuda([20 << 30], [0])
    cuda.error = Accelerator("CUDA error: device-side assert triggered")
    group = SimpleNamespace(is_available=lambda: available)
    if available:
        group.is_initialized = lambda: in_group
        group.get_world_size = lambda: ranks
    clean_up(monkeypatch, cuda, distributed=group)
    assert cuda.emptied == (0 if ranks > 1 else 1)
    assert gpu_failures.is_dead(), "it is asked all the same whether the GPU works"


@pytest.mark.parametrize(("reserved", "collected"), [(0, 0), (1 << 20, 1)])
def test_garbage_is_collected_only_if_it_may_hold_memory_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch, reserved: int, collected: int
) -> None:
    collections: list[int] = []
    monkeypatch.setattr(gpu_failures, "gc", SimpleNamespace(collect=lambda: collections.append(1)))
    clean_up(monkeypatch, FakeCuda([0, reserved], [0, reserved]))
    assert len(collections) == collected


def test_tensors_that_an_error_and_its_frames_hold_in_a_circle_are_dropped_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Tensor:
        pass

    cuda = FakeCuda([1], [0])
    found: list[weakref.ref[Tensor]] = []

    def body() -> None:
        tensor = Tensor()
        found.append(weakref.ref(tensor))
        try:
            raise ValueError("no")
        except ValueError as exc:
            kept = exc  # its traceback holds this frame, and this frame holds it
            assert kept

    gc.disable()
    try:
        body()
        assert found[0]() is not None
        clean_up(monkeypatch, cuda)
    finally:
        gc.enable()
    assert found[0]() is None


def test_without_torch_or_with_half_of_it_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    clean_up(monkeypatch, None)
    clean_up(monkeypatch, SimpleNamespace())
    assert not gpu_failures.is_dead()


def test_a_context_that_turns_out_to_be_dead_after_another_error_costs_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = FakeCuda([0], [0])
    cuda.error = Accelerator("CUDA error: device-side assert triggered")
    clean_up(monkeypatch, cuda)
    assert gpu_failures.is_dead()
