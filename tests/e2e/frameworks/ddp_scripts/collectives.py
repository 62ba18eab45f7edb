"""A program for torchrun that sends and gathers, with a time limit of its own, subgroups, and two groups in a row."""

import argparse
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def pass_on(rank, size):
    """Every rank sends its number to the next one."""
    token = torch.tensor([float(rank)])
    received = torch.zeros(1)
    request = dist.isend(token, (rank + 1) % size)
    dist.recv(received, (rank - 1) % size)
    request.wait()
    return received.item()


def gather_objects(rank, size):
    everything = [None] * size
    dist.all_gather_object(everything, {"rank": rank, "text": "x" * rank})
    shared = [f"from {rank}" if rank == 0 else None]
    dist.broadcast_object_list(shared, src=0)
    return everything, shared


def averaged(rank, size):
    model = nn.Linear(3, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float(rank))
            dist.all_reduce(parameter, op=dist.ReduceOp.SUM)
            parameter /= size
    return model.weight.detach().flatten().tolist()


def uneven(rank):
    """Every rank has another number of batches; `join` lets the others go on."""
    torch.manual_seed(0)
    model = DDP(nn.Linear(1, 1))
    with model.join():
        for _ in range(3 + rank):
            model(torch.ones(4, 1)).sum().backward()
    return model.module.weight.grad.flatten().tolist()


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    rank, size = dist.get_rank(), dist.get_world_size()
    pairs = dist.new_group(list(range(size)), timeout=timedelta(seconds=60))
    total = torch.ones(1)
    dist.all_reduce(total, group=pairs)
    result = {
        "rank": rank,
        "passed": pass_on(rank, size),
        "objects": gather_objects(rank, size),
        "averaged": averaged(rank, size),
        "total": total.item(),
        "joined": uneven(rank),
    }
    dist.monitored_barrier()
    dist.destroy_process_group(pairs)
    dist.destroy_process_group()

    dist.init_process_group("gloo")  # a second one in the same program
    total = torch.full((1,), float(rank + 1))
    dist.all_reduce(total)
    dist.destroy_process_group()
    return result | {"again": total.item()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--result", default="")
    parser.add_argument("--snapshot", default="")
    args = parser.parse_args()
    result = main()
    if args.result:
        torch.save(result, f"{args.result}.{result['rank']}")
