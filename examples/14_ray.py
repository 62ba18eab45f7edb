"""Train one network on nodes of a Ray cluster, beside whatever else it does.

    python 14_ray.py --address http://head:8265 --nodes 2    neither Ray nor the cluster's Python is needed here
    python 14_ray.py --nodes 2                               on a machine of the cluster
    python 14_ray.py --accelerator A100:2                    with two GPUs in each node

Ray decides where, and counts CPUs and GPUs. For a `train` of your own, this is enough:

    import skyward as sky
    from mine import train
    image = sky.Image(pip=["torch==2.13.0", "numpy"])
    with sky.ComputePool(provider=sky.Ray("http://head:8265"), nodes=2, accelerator="A100", image=image) as pool:
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
            break  # Ray takes this machine away: return what there is

    return socket.gethostname(), error.item(), model.cpu()


def main() -> None:
    """Ask Ray for nodes, train on them, and see that all of them hold the same network, which is now here too."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--address", default="auto", help="http://head:8265, or on the cluster: auto")
    parser.add_argument("--strategy", default="STRICT_SPREAD", help="how Ray places the nodes")
    parser.add_argument("--accelerator", help='a GPU in each node, such as "A100", or several: "A100:4"')
    parser.add_argument("--epochs", type=int, default=40)
    args = parser.parse_args()

    ray = sky.Ray(args.address, strategy=args.strategy)
    image = sky.Image(pip=["torch==2.13.0", "numpy"])
    with sky.ComputePool(provider=ray, nodes=args.nodes, accelerator=args.accelerator, image=image) as pool:
        results = train(args.epochs) @ pool

    for rank, (node, error, model) in enumerate(results):
        weights = sum(parameter.double().sum().item() for parameter in model.parameters())
        print(f"rank {rank} on {node}: error {error:.5f}, sum of weights {weights:.6f}")
    if results[0][1] > 0.01:
        raise SystemExit("something is wrong: the network did not learn")


if __name__ == "__main__":
    main()
