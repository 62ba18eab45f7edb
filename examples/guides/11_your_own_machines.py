"""Train a network on your own machines: hosts that answer to `ssh` become the nodes of a pool.

    python 11_your_own_machines.py gpu1 user@10.0.0.7:2222

Without hosts it trains on two nodes of this computer. For a `train` of your own, five lines are enough:

    import skyward as sky
    from mine import train
    hosts = sky.SSH(hosts=["gpu1", "user@10.0.0.7:2222"])
    with sky.ComputePool(provider=hosts, image=sky.Image(pip=["torch==2.13.0", "numpy"])) as pool:
        model = (sky.compute(sky.integrations.torch(train))() @ pool)[0]
"""

import argparse
import socket
from typing import Any

import skyward as sky


@sky.compute
@sky.integrations.torch
def train(epochs: int = 40, points: int = 6000) -> tuple[str, float, Any]:
    """Learn a landscape from points of it, a part on each host: where this ran, the final error, and the network."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    places = 4 * torch.rand(points, 2) - 2
    heights = (places[:, :1] * 2).sin() * places[:, 1:].cos()
    mine, wanted = (part.to(device) for part in sky.shard(places, heights, drop_last=True))

    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)).to(device)
    shared = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(shared.parameters(), lr=0.01)

    error = torch.zeros(1)
    for epoch in range(epochs):
        order = torch.randperm(len(mine), device=device)
        for batch in order.split(256):
            loss = (shared(mine[batch]) - wanted[batch]).square().mean()
            optimizer.zero_grad()
            loss.backward()  # gradients are averaged over the hosts here
            optimizer.step()

        error = (model(mine) - wanted).detach().square().mean()
        dist.all_reduce(error)
        error /= dist.get_world_size()
        if sky.is_head() and epoch % 10 == 9:
            print(f"epoch {epoch + 1}: error {error.item():.5f} on {dist.get_world_size()} hosts")

    return socket.gethostname(), error.item(), model.cpu()


def main() -> None:
    """Open the hosts, train, and see that all of them hold the same network, which is now here too."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hosts", nargs="*", help="as ssh takes them, or user@host:port; without any, this computer")
    parser.add_argument("--epochs", type=int, default=40)
    args = parser.parse_args()

    provider, nodes = (sky.SSH(hosts=args.hosts), None) if args.hosts else (sky.Local(), 2)
    image = sky.Image(pip=["torch==2.13.0", "numpy"])
    with sky.ComputePool(provider=provider, nodes=nodes, image=image) as pool:
        results = train(args.epochs) @ pool

    for rank, (host, error, model) in enumerate(results):
        weights = sum(parameter.double().sum().item() for parameter in model.parameters())
        print(f"rank {rank} on {host}: error {error:.5f}, sum of weights {weights:.6f}")
    models = [model.state_dict() for _, _, model in results]
    if any(not value.equal(models[0][name]) for other in models for name, value in other.items()):
        raise SystemExit("something is wrong: the hosts disagree")
    if results[0][1] > 0.01:
        raise SystemExit("something is wrong: the network did not learn")


if __name__ == "__main__":
    main()
