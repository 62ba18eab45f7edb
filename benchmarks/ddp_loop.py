"""The training that ddp.py times, by itself on a pool, under torchrun in its processes.

ddp_loop.py [--ranks K] RESULT STEPS
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path


def train(steps: int) -> dict[str, float]:
    """Trains a small network; when its first step was done, steps per second after that, and threads."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs, labels = torch.randn(64, 128), torch.randint(10, (64,))

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()

    step()
    first = time.time()
    for _ in range(50):
        step()
    dist.barrier()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    dist.barrier()
    rate = steps / (time.perf_counter() - began)
    return {"first": first, "rate": rate, "threads": torch.get_num_threads()}


def under_torchrun(steps: int) -> dict[str, float]:
    """As any script that torchrun starts."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    try:
        return train(steps)
    finally:
        dist.destroy_process_group()


def on_a_pool(steps: int, ranks: int) -> dict[str, float]:
    """The same function on two local nodes."""
    import skyward as sky

    plugins = [sky.plugins.torch(backend="gloo")]
    with sky.ComputePool(nodes=2, processes_per_node=ranks, plugins=plugins, console=False) as pool:
        return (sky.compute(train)(steps) @ pool)[0]


def main() -> None:
    """Trains, and has rank 0 write down what it saw."""
    launched = "TORCHELASTIC_RUN_ID" in os.environ
    arguments = sys.argv[1:]
    ranks = 1
    if arguments[0] == "--ranks":
        ranks, arguments = int(arguments[1]), arguments[2:]
    steps = int(arguments[1])
    seen = under_torchrun(steps) if launched else on_a_pool(steps, ranks)
    if os.environ.get("RANK", "0") == "0":
        Path(arguments[0]).write_text(json.dumps(seen))
    if launched:
        os._exit(0)  # gloo's threads abort a process now and then that ends in the usual way


if __name__ == "__main__":
    main()
