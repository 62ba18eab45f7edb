"""Train one network on nodes of a Slurm cluster, for as long as that takes and no longer.

    python 13_slurm.py --nodes 2 --time 0:30:00                   on a login node
    python 13_slurm.py --login ada@login.example.org --nodes 2    from your own computer, over ssh
    python 13_slurm.py --partition gpu --accelerator A100         with a GPU in each node

Slurm decides where and when; why the job waits is shown until it starts. For a `train` of your own, this is enough:

    import skyward as sky
    from mine import train
    image = sky.Image(pip=["torch==2.13.0", "numpy"])
    with sky.ComputePool(provider=sky.Slurm(partition="gpu"), nodes=2, accelerator="A100", image=image) as pool:
        model = (sky.compute(sky.integrations.torch(train))() @ pool)[0]
"""

import argparse
import socket
from typing import Any

import skyward as sky


@sky.compute
@sky.integrations.torch
def train(epochs: int) -> tuple[str, float, Any]:
    """Learn a curve from points of it, a part on each node: the node, the final error, and the network."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    points = 6 * torch.rand(4000, 1) - 3
    mine, wanted = (part.to(device) for part in sky.shard(points, points.sin(), drop_last=True))

    model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1)).to(device)
    shared = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(shared.parameters(), lr=0.02)

    error = torch.zeros(1, device=device)
    for _epoch in range(epochs):
        for batch in torch.randperm(len(mine), device=device).split(200):
            loss = (shared(mine[batch]) - wanted[batch]).square().mean()
            optimizer.zero_grad()
            loss.backward()  # gradients are averaged over the nodes here
            optimizer.step()
        error = (model(mine) - wanted).detach().square().mean()
        dist.all_reduce(error)
        error /= dist.get_world_size()
        if sky.preempted():
            break  # the job's time is nearly over, or somebody else gets the node: return what there is

    return socket.gethostname(), error.item(), model.cpu()


def main() -> None:
    """Submit a job, train on its nodes, and see that all of them hold the same network, which is now here too."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--partition", help="where the job is queued; without it, the site's default")
    parser.add_argument("--account", help="which account is charged")
    parser.add_argument("--time", help='the time limit, as Slurm writes it: "0:30:00"')
    parser.add_argument("--accelerator", help='a GPU in each node, such as "A100", or several: "A100:4"')
    parser.add_argument("--login", help="the login node, as ssh takes it; without it, this computer is one")
    parser.add_argument("--epochs", type=int, default=40)
    args = parser.parse_args()

    slurm = sky.Slurm(partition=args.partition, account=args.account, time=args.time, login=args.login)
    image = sky.Image(pip=["torch==2.13.0", "numpy"])
    with sky.ComputePool(provider=slurm, nodes=args.nodes, accelerator=args.accelerator, image=image) as pool:
        results = train(args.epochs) @ pool

    for rank, (node, error, model) in enumerate(results):
        weights = sum(parameter.double().sum().item() for parameter in model.parameters())
        print(f"rank {rank} on {node}: error {error:.5f}, sum of weights {weights:.6f}")
    if results[0][1] > 0.01:
        raise SystemExit("something is wrong: the network did not learn")


if __name__ == "__main__":
    main()
