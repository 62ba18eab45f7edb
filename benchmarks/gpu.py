"""A machine with a GPU: the examples, training in a pool, a large module or tensor there and back; asserts nothing.

    python benchmarks/gpu.py                      everything
    python benchmarks/gpu.py examples train       some of it: examples train module tensor
    python benchmarks/gpu.py --quick              small, also without a GPU: shows that it works, not how fast

It needs torch; examples whose packages are not there are left out, and the table says so. From a source tree, without
installing Skyward: `PYTHONPATH=src python benchmarks/gpu.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import contest
from contest import Row

__all__ = ["main"]

ROOT = Path(__file__).parents[1]
PARTS = ("examples", "train", "module", "tensor")
ROUNDS = 3
NEEDS = {
    "02_joblib_concurrency.py": ("joblib",),
    "03_scikit_grid_search.py": ("sklearn", "joblib"),
    "05_keras_training.py": ("keras", "jax"),
    "06_pytorch_distributed.py": ("torch",),
    "07_torch_model_roundtrip.py": ("torch",),
    "08_huggingface_finetuning.py": ("torch", "transformers", "datasets", "accelerate"),
    "09_jax.py": ("jax",),
    "17_many_gpus.py": ("torch",),
}
ELSEWHERE = {"11_your_own_machines.py": "hosts that answer ssh", "12_aws.py": "an account of AWS"}


def main() -> int:
    """Does the parts that are named, or all; 1 if an example failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"{', '.join(PARTS)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="small: shows that it works, not how fast")
    parser.add_argument("--only", help="with examples: those whose names have this in them")
    parser.add_argument("--contender", nargs=2, help=argparse.SUPPRESS)  # one round, in this process
    args = parser.parse_args()
    if args.contender:
        name, into = args.contender
        Path(into).write_text(json.dumps(CONTENDERS[name](args.quick)))
        return 0
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    parts = args.parts or PARTS
    print(_surroundings(), flush=True)
    failed = _examples(args.only) if "examples" in parts else 0
    rows = {"train": _training_rows, "module": _module_rows, "tensor": _tensor_rows}
    if any(part in parts for part in rows):
        print("\nratio = skyward / peer, medians of interleaved rounds", contest.HEADER, sep="\n\n", flush=True)
    for part, measure in rows.items():
        if part in parts:
            for row in measure(args.quick):
                print(contest.line(row), flush=True)
    return 1 if failed else 0


def _surroundings() -> str:
    import torch

    cards = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
    return f"torch {torch.__version__}, GPUs: {', '.join(cards) or 'none'}, CUDA_VISIBLE_DEVICES: {visible}"


# the examples


def _examples(only: str | None) -> int:
    """Runs every example as a user would; how many failed."""
    programs = sorted([*(ROOT / "examples").glob("*.py"), *(ROOT / "examples" / "guides").glob("*.py")])
    print(f"\n{'example':34}{'ended':>8}{'seconds':>9}  last words", flush=True)
    failed = 0
    for program in programs:
        if only and only not in program.name:
            continue
        missing = [module for module in NEEDS.get(program.name, ()) if find_spec(module) is None]
        why = ELSEWHERE.get(program.name) or ", ".join(missing)
        if why:
            print(f"{program.name:34}{'-':>8}{'-':>9}  left out: needs {why}", flush=True)
            continue
        began = time.perf_counter()
        done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=600, cwd=ROOT)
        took = time.perf_counter() - began
        words = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
        print(f"{program.name:34}{done.returncode:>8}{took:>9.1f}  {words[-1] if words else ''}", flush=True)
        told = [line for line in done.stderr.splitlines() if "share" in line or "no GPU" in line]
        for line in told if done.returncode == 0 else words[-25:]:
            print(f"{'':34}  | {line}", flush=True)
        failed += done.returncode != 0
    print(f"{failed} of them failed", flush=True)
    return failed


# training on one GPU


def train(steps: int, width: int) -> dict[str, float]:
    """Trains a network on the first GPU; steps per second."""
    import torch
    from torch import nn

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(width, width), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(width, 10)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs, labels = torch.randn(512, width, device=device), torch.randint(10, (512,), device=device)

    def run(count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
        loss.item()  # waits for the GPU
        return time.perf_counter() - began

    run(max(3, steps // 10))
    return {"rate": steps / run(steps)}


def _plain(quick: bool) -> dict[str, float]:
    return train(*(_SMALL if quick else _LARGE))


def _pool(quick: bool) -> dict[str, float]:
    import skyward as sky

    with sky.ComputePool(nodes=1, console=False) as pool:
        return sky.compute(train)(*(_SMALL if quick else _LARGE)) >> pool


_SMALL, _LARGE = (20, 256), (1500, 4096)
CONTENDERS = {"plain": _plain, "pool": _pool}


def _training_rows(quick: bool) -> Iterator[Row]:
    rates: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for _ in range(1 if quick else ROUNDS):
        for name, seen in rates.items():
            with tempfile.TemporaryDirectory() as directory:
                into = Path(directory) / "seen.json"
                command = [sys.executable, __file__, "--contender", name, str(into)]
                subprocess.run([*command, *(["--quick"] if quick else [])], check=True)
                seen.append(json.loads(into.read_text())["rate"])
    ours, theirs = (statistics.median(rates[name]) for name in ("pool", "plain"))
    yield Row("training on one GPU in a pool, steps/s", ours, "plain Python", theirs, "/s", at_least=0.995)


# a module of 1 GiB


def _module_rows(quick: bool) -> Iterator[Row]:
    import torch

    import skyward as sky

    side = 512 if quick else 16384  # of 4-byte numbers: 1 GiB
    floor = _floor(side)
    with sky.ComputePool(nodes=1, console=False) as pool:
        sky.compute(touched)(torch.nn.Linear(4, 4)) >> pool  # torch and CUDA are loaded
        for returned in ("as it is", ".cpu()"):
            took: list[float] = []
            for _ in range(ROUNDS):
                model = torch.nn.Linear(side, side, bias=False)  # new content each time
                began = time.perf_counter()
                back = sky.compute(touched)(model, returned == ".cpu()") >> pool
                took.append(time.perf_counter() - began)
                assert back.weight.device.type == "cpu" or torch.cuda.is_available()
                del back, model
            what = f"1 GiB module to the GPU and back ({returned})"
            yield Row(f"{what}, first", took[0], "floor: four copies", floor, "s")
            yield Row(f"{what}, later", statistics.median(took[1:]), "floor: four copies", floor, "s")


def touched(model: object, to_cpu: bool = False) -> object:
    """The module, moved to the GPU and changed there."""
    import torch

    assert isinstance(model, torch.nn.Module)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.no_grad():
        moved = model.to(device)
        for parameter in moved.parameters():
            parameter.add_(1)
    return moved.cpu() if to_cpu else moved


def _floor(side: int) -> float:
    """Seconds for what cannot be left out: a copy into shared memory, to the GPU, from it, and out of shared memory."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    source = torch.randn(side, side)
    torch.ones(1, device=device)
    times: list[float] = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        shared = source.clone()
        on_gpu = shared.to(device, copy=True)
        home = on_gpu.to("cpu", copy=True)
        home.clone()
        times.append(time.perf_counter() - began)
        del shared, on_gpu, home
    return statistics.median(times)


# a tensor of 1 GiB that lies on the GPU


def _tensor_rows(quick: bool) -> Iterator[Row]:
    """There and back, changed there, against copying it down and up in one process, in turns."""
    import torch

    import skyward as sky

    device = "cuda" if torch.cuda.is_available() else "cpu"
    count = 1 << (18 if quick else 28)  # of 4-byte numbers
    ours, theirs = list[float](), list[float]()
    changed = sky.compute(one_more)
    with sky.ComputePool(nodes=1, console=False) as pool:
        changed(torch.zeros(1, device=device)) >> pool  # torch and CUDA are loaded
        for turn in range(1 + ROUNDS):
            tensor = torch.full((count,), float(turn), device=device)
            for times, act in ((ours, lambda given: changed(given) >> pool), (theirs, copied)):
                _finish(torch)
                began = time.perf_counter()
                back = act(tensor)
                _finish(torch)
                times.append(time.perf_counter() - began)
                assert back.device == tensor.device
                assert back[0] == turn + (times is ours)
                del back
            assert tensor[-1] == turn, "what was sent is as it was"
    what = f"1 GiB tensor from the {device} to a node's and back"
    yield Row(f"{what}, first", ours[0], "copied down and up", theirs[0], "s", at_most=1.3)
    later = statistics.median(ours[1:]), statistics.median(theirs[1:])
    yield Row(f"{what}, later", later[0], "copied down and up", later[1], "s", at_most=1.3)


def one_more(tensor: Any) -> Any:
    """The tensor, changed where it arrived."""
    return tensor.add_(1)


def copied(tensor: Any) -> Any:
    """Down to the CPU and up again."""
    return tensor.to("cpu", copy=True).to(tensor.device, copy=True)


def _finish(torch: Any) -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    sys.exit(main())
