"""Against the NVML of a machine with a GPU: skipped elsewhere. Also a program: `python tests/gpu/test_real_gpu.py`."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec

import skyward as sky
from skyward import events
from skyward.accelerators import CATALOG
from skyward.api.hardware import Gpu
from skyward.api.matching import described, models_of
from skyward.node import gpus
from skyward.node.gpu_meter import GpuMeter
from skyward.node.gpus import Nvml, NvmlError
from skyward.view.overview import gpu_cell

CUDA = "CUDA_VISIBLE_DEVICES"


@cache
def present() -> tuple[Gpu, ...]:
    """The GPUs of this machine, whichever may be used."""
    return gpus.look({}).gpus


try:
    import pytest
except ImportError:  # on the machine with the GPU
    pass
else:
    pytestmark = pytest.mark.skipif(not present(), reason="this machine has no GPU")


@contextmanager
def variable(value: str | None) -> Iterator[None]:
    before = os.environ.pop(CUDA, None)
    if value is not None:
        os.environ[CUDA] = value
    try:
        yield
    finally:
        os.environ.pop(CUDA, None)
        if before is not None:
            os.environ[CUDA] = before


@sky.compute
def torch_devices() -> tuple[int, str] | None:
    try:
        import torch
    except ImportError:
        return None
    return torch.cuda.device_count(), torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""


@sky.compute
def burn(seconds: float) -> None:
    try:
        import torch
    except ImportError:
        time.sleep(seconds)
        return
    x = torch.rand(4096, 4096, device="cuda")
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        x = torch.nn.functional.normalize(x @ x)
        torch.cuda.synchronize()


def test_nvml_names_every_gpu_with_uuid_and_memory() -> None:
    began = time.monotonic()
    with Nvml() as nvml:
        opened = time.monotonic() - began
        cards = nvml.cards()
    print(
        f"  NVML: {described([card.gpu for card in cards])}; init {opened:.3f} s, all {time.monotonic() - began:.3f} s"
    )
    for card in cards:
        assert card.gpu.uuid.startswith("GPU-")
        assert card.gpu.memory > 1 << 30
        assert card.gpu.name


def test_each_way_to_ask_names_the_same_gpus() -> None:
    whole = [(card.gpu.index, card.gpu.uuid, card.gpu.name) for card in gpus._from_nvml()]
    for other in (gpus._from_smi(), gpus._from_proc()):
        if other:  # not every container has them
            assert [(card.gpu.index, card.gpu.uuid, card.gpu.name) for card in other] == whole


def test_the_catalogue_knows_this_gpu() -> None:
    (model,) = models_of(present()[0].name)
    print(f"  {present()[0].name} is {model.name}")
    size = present()[0].memory / (1 << 30)
    assert any(0.9 * known <= size <= 1.08 * known for known in model.sizes), (size, model.sizes)


def test_visible_devices_by_index_uuid_prefix_or_none() -> None:
    first = present()[0]
    for value in ("0", first.uuid, first.uuid[:12]):
        with variable(value):
            assert [gpu.uuid for gpu in gpus.visible_gpus()] == [first.uuid], value
    for value in ("", "-1", "99", "GPU-ffffffff", f"0,{first.uuid}"):
        with variable(value):
            assert gpus.visible_gpus() == (), value
            assert gpus.count_accelerators() == 0


def test_the_meter_reads_figures_and_is_quick() -> None:
    names = [str(n) for n in range(len(present()))]
    meter = GpuMeter(present(), names)
    meter.watch(names)
    end = time.monotonic() + 30
    while not (samples := meter.take()[0]) and time.monotonic() < end:
        time.sleep(0.05)
    began = time.perf_counter()
    for _ in range(1000):
        meter.take()
    print(f"  {samples[0]}\n  {gpu_cell(samples)}\n  take(): {(time.perf_counter() - began) * 1000:.1f} us")
    assert len(samples) == len(present())
    for sample in samples:
        assert sample.utilization is not None
        assert 0 <= sample.utilization <= 100
        assert sample.memory_used is not None
        assert sample.memory_total is not None
        assert 0 <= sample.memory_used <= sample.memory_total
        assert sample.temperature is None or 10 < sample.temperature < 120
        assert sample.power is None or 1 < sample.power < 3000


def test_a_round_of_questions_takes_a_fraction_of_a_second() -> None:
    from skyward.node.gpu_meter import _read

    with Nvml() as nvml:
        handles = [nvml.by_uuid(gpu.uuid) for gpu in present()]
        began = time.monotonic()
        for gpu, handle in zip(present(), handles, strict=True):
            reading = _read(nvml, gpu, handle)
            print(f"  {reading}")
        taken = time.monotonic() - began
        events_set = nvml.listen(handles)
        print(f"  one round: {taken * 1000:.1f} ms; errors are told: {events_set is not None}")
        if events_set is not None:
            assert nvml.xid(events_set, 0.1) is None
    assert taken < 0.5


def test_an_unknown_function_or_gpu_is_an_error_in_words() -> None:
    with Nvml() as nvml:
        for act in (lambda: nvml.by_uuid("GPU-0"), lambda: nvml.call("nvmlNoSuchThing"), lambda: nvml.handle(999)):
            try:
                act()
            except NvmlError as exc:
                print(f"  {exc}")
            else:
                raise AssertionError("accepted")


def refused(accelerator: str) -> str:
    try:
        with sky.ComputePool(accelerator=accelerator, console=False):
            raise AssertionError("accepted")
    except sky.errors.AcceleratorMismatch as exc:
        print(f"  {exc}")
        return str(exc)


def test_another_kind_or_more_of_them_is_refused_and_the_right_one_accepted() -> None:
    (model,) = models_of(present()[0].name)
    other = next(name for name in ("A100", "H100") if CATALOG[name.lower()] is not model)
    for asked in (other, f"{model.name}:{len(present()) + 1}"):
        assert present()[0].name in refused(asked)
    with variable(""):
        assert "CUDA_VISIBLE_DEVICES" in refused(model.name)
    began = time.monotonic()
    with sky.ComputePool(accelerator=model.name, console=False) as pool:
        print(f"  opened in {time.monotonic() - began:.2f} s; torch sees {torch_devices() >> pool}")
        seen = torch_devices() >> pool
        assert seen is None or seen[1] == present()[0].name


def test_a_pool_shows_a_busy_gpu_in_its_samples() -> None:
    samples: list[events.NodeSample] = []
    warnings: list[str] = []
    busy = threading.Event()

    def listen(event: events.Event) -> None:
        if isinstance(event, events.NodeSample) and event.gpus:
            samples.append(event)
            if (event.gpus[0].utilization or 0) > 50:
                busy.set()
        elif isinstance(event, events.Notice) and event.level == "warning":
            warnings.append(event.text)

    pool = sky.ComputePool(console=False)
    pool.on_event(listen)
    with pool:
        future = burn(6.0) > pool
        busy.wait(30)
        future.result(60)
    assert samples, "no figures came"
    print(
        f"  {len(samples)} samples; {gpu_cell(max(samples, key=lambda s: s.gpus[0].utilization or 0).gpus)}; {warnings}"
    )
    assert re.match(r"(\d+ )?GPU ", gpu_cell(samples[-1].gpus))
    assert busy.is_set() or find_spec("torch") is None


def test_nodes_of_this_computer_show_the_gpus_that_they_have() -> None:
    seen: dict[int, set[int]] = {}
    pool = sky.ComputePool(nodes=2, console=False)

    def listen(event: events.Event) -> None:
        if isinstance(event, events.NodeSample) and event.gpus:
            seen.setdefault(event.node, set()).update(gpu.index for gpu in event.gpus)

    pool.on_event(listen)
    with pool:
        end = time.monotonic() + 30
        while len(seen) < 2 and time.monotonic() < end:
            time.sleep(0.1)
    print(f"  {seen}")
    assert set(seen) == {0, 1}


@sky.compute
def wrong_index() -> float:
    import torch

    return torch.zeros(4, device="cuda")[torch.tensor([9], device="cuda")].sum().item()


@sky.compute
def fill(gib: int, fails: bool) -> None:
    import torch

    kept = torch.empty(gib << 30, dtype=torch.uint8, device="cuda")
    if fails:
        raise ValueError(f"{len(kept)} bytes")


@sky.compute
def on_gpu() -> tuple[int, float, int]:
    """This process, what it has computed, and how many bytes torch keeps for itself."""
    import torch

    total = torch.ones(8, device="cuda").sum().item()
    return os.getpid(), total, torch.cuda.memory_reserved() - torch.cuda.memory_allocated()


def error_of(call: Callable[[], object]) -> BaseException:
    try:
        call()
    except Exception as exc:
        return exc
    raise AssertionError("no error")


def test_after_a_device_side_assert_the_next_call_works_in_a_fresh_process() -> None:
    if find_spec("torch") is None:
        return
    with sky.ComputePool(console=False) as pool:
        before, total, _ = on_gpu() >> pool
        error = error_of(lambda: wrong_index() >> pool)
        print(f"  {type(error).__name__}: {getattr(error, '__notes__', [''])[0]}")
        assert "device-side assert" in str(error)
        assert any("the process was replaced" in note for note in error.__notes__)
        after, again, _ = on_gpu() >> pool
        assert (total, again) == (8.0, 8.0)
        assert after != before


def test_a_group_is_formed_again_after_a_device_side_assert() -> None:
    if find_spec("torch") is None:
        return
    options = {"processes_per_node": "gpu", "plugins": [sky.plugins.torch()]}
    with sky.ComputePool(console=False, **options) as pool:
        assert group() @ pool == [("nccl", len(present()))] * len(present())
        assert "device-side assert" in str(error_of(lambda: wrong_index() @ pool))
        assert group() @ pool == [("nccl", len(present()))] * len(present())


@sky.compute
def group() -> tuple[str, float]:
    import torch
    import torch.distributed as dist

    value = torch.ones(1, device="cuda")
    dist.all_reduce(value)
    return dist.get_backend(), value.item()


def test_after_a_failed_body_the_memory_of_the_gpu_is_free_for_others() -> None:
    if find_spec("torch") is None:
        return
    with sky.ComputePool(console=False) as pool:
        before, *_ = on_gpu() >> pool
        assert "bytes" in str(error_of(lambda: fill(2, True) >> pool))
        process, _, kept = on_gpu() >> pool
        assert process == before
        assert kept < 64 << 20, kept
        error = error_of(lambda: fill(100_000, False) >> pool)
        assert type(error).__name__ == "OutOfMemoryError"
        process, _, kept = on_gpu() >> pool
        assert process == before  # an out-of-memory error costs no process
        assert kept < 64 << 20, kept


def test_nodes_that_share_a_gpu_share_its_memory() -> None:
    @sky.compute
    def share() -> float:
        return float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", "nan"))

    nodes = 2 * len(present())
    with sky.ComputePool(nodes=nodes, console=False) as pool:
        shares = share() @ pool
    print(f"  {shares}")
    assert shares == [0.45] * nodes


def main() -> int:
    """Runs all of it, one after the other."""
    if not present():
        print(f"this machine has no GPU: {gpus.look({})}")
        return 0
    tests: list[tuple[str, Callable[[], None]]] = [(n, f) for n, f in globals().items() if n.startswith("test_")]
    failed = 0
    for name, test in tests:
        began = time.monotonic()
        print(f"{name[5:].replace('_', ' ')}", flush=True)
        try:
            test()
        except BaseException as exc:
            import traceback

            failed += 1
            traceback.print_exception(exc)
            print("  FAILED", flush=True)
        else:
            print(f"  ok ({time.monotonic() - began:.1f} s)", flush=True)
    print(f"{len(tests) - failed} of {len(tests)} passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
