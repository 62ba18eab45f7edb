"""A training program that uses a group where there is one, and runs alone where there is none."""

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def world_size():
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def average(value):
    total = torch.tensor(float(value))
    if world_size() > 1:
        dist.all_reduce(total)
    return (total / world_size()).item()


class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.net1 = nn.Linear(10, 10)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5)

    def forward(self, x):
        return self.net2(self.relu(self.net1(x)))


def main(epochs=2):
    distributed = dist.is_available() and dist.is_initialized()
    generator = torch.Generator().manual_seed(1)
    dataset = TensorDataset(torch.randn(40, 10, generator=generator), torch.randn(40, 5, generator=generator))
    sampler = DistributedSampler(dataset, shuffle=True) if distributed else None
    loader = DataLoader(dataset, batch_size=10, sampler=sampler)
    torch.manual_seed(torch.initial_seed() % 1000)  # different first weights on every rank
    model = ToyModel()
    if distributed:
        model = DistributedDataParallel(model)
    loss_fn = nn.MSELoss()
    optimizer = optim.SGD(model.parameters(), lr=0.001)
    history = []
    for epoch in range(epochs):
        if sampler is not None:
            sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = loss_fn(model(inputs), labels)
            loss.backward()
            optimizer.step()
        history.append(average(loss.item()))
    return history, sum(p.double().sum().item() for p in model.parameters())


if __name__ == "__main__":
    main()
