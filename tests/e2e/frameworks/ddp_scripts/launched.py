"""A training program as it is written for torchrun: it forms and ends its group itself, from the environment."""

import os

import torch
import torch.nn.functional as F
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Pairs(Dataset):
    def __init__(self, size):
        torch.manual_seed(0)
        self.data = [(torch.rand(20), torch.rand(1)) for _ in range(size)]

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self.data[index]


class Trainer:
    def __init__(self, model, loader, optimizer):
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.rank = int(os.environ["RANK"])
        self.model = DDP(model)
        self.loader = loader
        self.optimizer = optimizer
        self.losses = []

    def run_batch(self, source, targets):
        self.optimizer.zero_grad()
        loss = F.mse_loss(self.model(source), targets)
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())

    def train(self, epochs):
        for epoch in range(epochs):
            self.loader.sampler.set_epoch(epoch)
            print(f"[rank {self.rank}] epoch {epoch} | steps {len(self.loader)}")
            for source, targets in self.loader:
                self.run_batch(source, targets)


def main(epochs, batch_size):
    init_process_group(backend="gloo")
    dataset = Pairs(64)
    model = torch.nn.Linear(20, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    loader = DataLoader(dataset, batch_size=batch_size, shuffle=False, sampler=DistributedSampler(dataset))
    trainer = Trainer(model, loader, optimizer)
    trainer.train(epochs)
    weights = model.weight.detach().clone()
    destroy_process_group()
    return trainer.rank, len(trainer.losses), weights


if __name__ == "__main__":
    main(2, 8)
