"""Train a network on machines of Amazon EC2 that exist while the training lasts.

    python 12_aws.py                           says what would be launched and what it costs, and launches nothing
    python 12_aws.py --yes                     launches it, trains, and gives everything back
    python 12_aws.py --accelerator T4 --yes    the same with a GPU in each machine

It needs an AWS login: `aws configure` or `aws sso login`. For a `train` of your own, this is enough:

    import skyward as sky
    from mine import train
    image = sky.Image(pip=["torch==2.13.0", "numpy"])
    with sky.ComputePool(provider=sky.AWS(), accelerator="T4", nodes=2, image=image, max_hourly_cost=2) as pool:
        model = (sky.compute(sky.integrations.torch(train))() @ pool)[0]
"""

import argparse
from typing import Any

import skyward as sky


@sky.compute
@sky.integrations.torch
def train(epochs: int) -> tuple[float, Any]:
    """Learn a curve from points of it, a part on each machine: the final error, and the network."""
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

    error = torch.zeros(1)
    for epoch in range(epochs):
        for batch in torch.randperm(len(mine), device=device).split(200):
            loss = (shared(mine[batch]) - wanted[batch]).square().mean()
            optimizer.zero_grad()
            loss.backward()  # gradients are averaged over the machines here
            optimizer.step()
        error = (model(mine) - wanted).detach().square().mean()
        dist.all_reduce(error)
        error /= dist.get_world_size()
        if sky.is_head() and epoch % 10 == 9:
            print(f"epoch {epoch + 1}: error {error.item():.5f} on {dist.get_world_size()} machines with {device}")

    return error.item(), model.cpu()


def main() -> None:
    """Say what would be launched, or do it, train, and see that all machines hold the same network."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--yes", action="store_true", help="launch machines, which costs money")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--accelerator", help='such as "T4" or "A100:8"; machines without one if left out')
    parser.add_argument("--max-hourly-cost", type=float, default=5.0, help="dollars an hour for all of them")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--region", default="us-east-1")
    parser.add_argument("--ssh-from", help="the address that may log in, if it cannot be found out")
    parser.add_argument("--username", default="ubuntu", help="the image's user")
    args = parser.parse_args()

    pool = sky.ComputePool(
        provider=sky.AWS(region=args.region, ssh_from=args.ssh_from, username=args.username),
        nodes=args.nodes,
        accelerator=args.accelerator,
        max_hourly_cost=args.max_hourly_cost,
        image=sky.Image(pip=["torch==2.13.0", "numpy"]),
        ttl=3600,
    )
    if not args.yes:
        print(pool.plan())
        print("Nothing was launched. Say --yes to do it.")
        return

    with pool:
        results = train(args.epochs) @ pool

    print(pool.receipt)
    models = [model.state_dict() for _, model in results]
    if any(not value.equal(models[0][name]) for other in models for name, value in other.items()):
        raise SystemExit("something is wrong: the machines disagree")
    if results[0][0] > 0.01:
        raise SystemExit("something is wrong: the network did not learn")


if __name__ == "__main__":
    main()
