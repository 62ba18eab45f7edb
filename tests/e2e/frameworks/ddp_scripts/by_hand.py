"""A program with `setup` and `cleanup` of its own: it names the meeting place, its rank and their number itself."""

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP


def setup(rank, world_size):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = os.environ.get("BY_HAND_PORT", "12355")
    dist.init_process_group("gloo", rank=rank, world_size=world_size)


def cleanup():
    dist.destroy_process_group()


class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.net1 = nn.Linear(10, 10)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5)

    def forward(self, x):
        return self.net2(self.relu(self.net1(x)))


def demo_basic(rank, world_size):
    setup(rank, world_size)
    torch.manual_seed(rank)
    ddp_model = DDP(ToyModel())
    optimizer = optim.SGD(ddp_model.parameters(), lr=0.001)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.mse_loss(ddp_model(torch.randn(20, 10)), torch.randn(20, 5)).backward()
        optimizer.step()
    weights = [p.detach().clone() for p in ddp_model.module.parameters()]
    cleanup()
    return weights


def demo_checkpoint(rank, world_size, path):
    setup(rank, world_size)
    torch.manual_seed(10 + rank)
    ddp_model = DDP(ToyModel())
    if rank == 0:
        torch.save(ddp_model.state_dict(), path)
    dist.barrier()  # nobody reads before rank 0 has written
    ddp_model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    optimizer = optim.SGD(ddp_model.parameters(), lr=0.001)
    nn.functional.mse_loss(ddp_model(torch.randn(20, 10)), torch.randn(20, 5)).backward()
    optimizer.step()
    weights = [p.detach().clone() for p in ddp_model.module.parameters()]
    dist.barrier()
    if rank == 0:
        os.remove(path)
    cleanup()
    return weights


def main(rank, world_size, path):
    weights = demo_basic(rank, world_size) + demo_checkpoint(rank, world_size, path)
    return {"rank": rank, "weights": weights}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--result", default="")
    parser.add_argument("--snapshot", default=os.path.join(tempfile.gettempdir(), "model.checkpoint"))
    args = parser.parse_args()
    result = main(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), args.snapshot)
    if args.result:
        torch.save(result, f"{args.result}.{result['rank']}")
