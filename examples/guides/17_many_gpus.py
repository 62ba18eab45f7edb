"""Train one network on every GPU of every node, its weights split among them (FSDP) or copied to each (DDP)."""

import argparse
from typing import TYPE_CHECKING

import skyward as sky

if TYPE_CHECKING:
    from torch import Tensor, nn


def network() -> "nn.Sequential":
    """A network of equal blocks."""
    from torch import nn

    blocks = [nn.Sequential(nn.Linear(128, 128), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(nn.Linear(1, 128), nn.Tanh(), *blocks, nn.Linear(128, 1))


def curve(count: int) -> "tuple[Tensor, Tensor]":
    """Points of a curve that the network learns."""
    import torch

    x = torch.linspace(-2, 2, count).unsqueeze(1)
    return x, torch.sin(3 * x) * x


@sky.compute
def train(strategy: str, steps: int) -> dict:
    """A program as it is written for torchrun: it asks the variables and the group who it is."""
    import os

    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group()
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if dist.get_backend() == "nccl" else torch.device("cpu")

    torch.manual_seed(0)
    model = network().to(device)
    if strategy == "fsdp":
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for block in model:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        model = DistributedDataParallel(model)
    kept = sum(getattr(p, "to_local", lambda p=p: p)().numel() for p in model.parameters())

    x, y = (part.to(device) for part in sky.shard(*curve(4096), shuffle=True, seed=0, drop_last=True))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    for step in range(steps):
        loss = torch.nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 40 == 0:
            print(f"step {step}: loss {loss.item():.4f}")

    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=whole)  # on rank 0; the others get an empty one with FSDP
    dist.destroy_process_group()
    return {
        "place": f"rank {rank} is number {local_rank} of node {sky.instance_info().node}, on {device}",
        "kept": kept,
        "weights": weights if rank == 0 else {},
    }


def main() -> None:
    """Open the nodes, train on all their processes, and try the network here."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--provider", choices=["local"], default="local")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--processes", default="2", help='processes a node; "gpu": one for each GPU')
    parser.add_argument("--strategy", choices=["fsdp", "ddp"], default="fsdp")
    args = parser.parse_args()

    provider = {"local": sky.Local}[args.provider]()
    processes = "gpu" if args.processes == "gpu" else int(args.processes)
    with sky.ComputePool(
        provider=provider, nodes=args.nodes, processes_per_node=processes, plugins=[sky.plugins.torch()]
    ) as pool:
        results = train(args.strategy, steps=80) @ pool

    import torch

    model = network()
    model.load_state_dict(results[0]["weights"])
    whole = sum(parameter.numel() for parameter in model.parameters())
    for result in results:
        print(f"{result['place']}: it kept {result['kept']} of {whole} weights")
    x, y = curve(1000)
    with torch.no_grad():
        error = torch.nn.functional.mse_loss(model(x), y).item()
    print(f"here, on {len(x)} points: error {error:.4f}")
    if error > 0.1:
        raise SystemExit("something is wrong: the network did not learn, or came home broken")


if __name__ == "__main__":
    main()
