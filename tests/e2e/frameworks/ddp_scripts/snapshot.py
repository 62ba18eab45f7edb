"""A training program for torchrun that saves a snapshot on rank 0, and goes on from there when it is started again."""

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def load_data(batch_size):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(50, 6, generator=generator)  # no multiple of ranks and batches
    dataset = TensorDataset(x, x.sum(dim=1, keepdim=True))
    return DataLoader(dataset, batch_size=batch_size, sampler=DistributedSampler(dataset))


class Trainer:
    def __init__(self, snapshot_path):
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.global_rank = int(os.environ["RANK"])
        torch.manual_seed(100 + self.global_rank)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
        self.epochs_run = 0
        self.snapshot_path = snapshot_path
        if os.path.exists(snapshot_path):
            self.load_snapshot()
        self.model = DDP(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)

    def load_snapshot(self):
        snapshot = torch.load(self.snapshot_path, map_location="cpu")
        self.model.load_state_dict(snapshot["MODEL_STATE"])
        self.epochs_run = snapshot["EPOCHS_RUN"]
        print(f"[rank {self.global_rank}] goes on at epoch {self.epochs_run}")

    def save_snapshot(self, epoch):
        snapshot = {"MODEL_STATE": self.model.module.state_dict(), "EPOCHS_RUN": epoch + 1}
        torch.save(snapshot, self.snapshot_path)

    def run_epoch(self, loader, epoch):
        loader.sampler.set_epoch(epoch)
        total = torch.zeros(1)
        for source, targets in loader:
            self.optimizer.zero_grad()
            loss = nn.functional.mse_loss(self.model(source), targets)
            loss.backward()
            self.optimizer.step()
            total += loss.detach()
        dist.all_reduce(total, op=dist.ReduceOp.SUM)
        return total.item() / (len(loader) * dist.get_world_size())

    def train(self, loader, max_epochs, save_every):
        losses = []
        for epoch in range(self.epochs_run, max_epochs):
            losses.append(self.run_epoch(loader, epoch))
            if self.global_rank == 0 and (epoch + 1) % save_every == 0:
                self.save_snapshot(epoch)
            dist.barrier()
        return losses


def main(snapshot_path, total_epochs=4, save_every=2, batch_size=5):
    dist.init_process_group(backend="gloo")
    trainer = Trainer(snapshot_path)
    losses = trainer.train(load_data(batch_size), total_epochs, save_every)
    weights = [p.detach().clone() for p in trainer.model.module.parameters()]
    dist.destroy_process_group()
    return {"rank": trainer.global_rank, "losses": losses, "weights": weights}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="simple distributed training job")
    parser.add_argument("--result", default="")
    parser.add_argument("--snapshot", default=os.path.join(tempfile.gettempdir(), "snapshot.pt"))
    args = parser.parse_args()
    result = main(args.snapshot)
    if args.result:
        torch.save(result, f"{args.result}.{result['rank']}")
