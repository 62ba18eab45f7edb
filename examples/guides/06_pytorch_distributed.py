"""Train one network on several nodes with DistributedDataParallel: which of two spirals does a point belong to?"""

import skyward as sky


@sky.compute
@sky.integrations.torch
def train(epochs: int, points: int) -> dict:
    """Train on this node's part of the points; the averages over all nodes, and this node's weights as one number."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)  # the same points on every node; DDP itself takes care of the first weights
    angle = 6 * torch.rand(points) + 1
    label = torch.randint(2, (points,))

    model = nn.Sequential(
        nn.Linear(2, 64),
        nn.ReLU(),
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Linear(64, 2),
    ).to(device)
    model = DistributedDataParallel(model) if dist.is_initialized() else model

    turned = angle + torch.pi * label
    places = torch.stack([angle * turned.cos(), angle * turned.sin()], dim=1) / 7 + 0.01 * torch.randn(points, 2)
    dataset = TensorDataset(places, label)
    sampler = DistributedSampler(dataset) if dist.is_initialized() else None
    loader = DataLoader(dataset, batch_size=64, sampler=sampler, shuffle=sampler is None)

    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loss_of = nn.CrossEntropyLoss()
    info = sky.instance_info()

    seen = accuracy = 0.0
    for epoch in range(epochs):
        if sampler is not None:
            sampler.set_epoch(epoch)  # another order every time
        loss_sum = correct = seen = 0.0

        for batch, wanted in loader:
            batch, wanted = batch.to(device), wanted.to(device)
            scores = model(batch)
            loss = loss_of(scores, wanted)

            optimizer.zero_grad()
            loss.backward()  # gradients are averaged over the nodes here
            optimizer.step()

            loss_sum += loss.item() * len(batch)
            correct += (scores.argmax(dim=1) == wanted).sum().item()
            seen += len(batch)

        # So far these numbers are about this node's part.

        totals = torch.tensor([loss_sum, correct, seen], device=device)
        dist.all_reduce(totals, op=dist.ReduceOp.SUM)
        mean_loss = (totals[0] / totals[2]).item()
        accuracy = (totals[1] / totals[2]).item()

        if sky.is_head():
            sky.progress(epoch + 1, epochs, loss=mean_loss, accuracy=accuracy)
            print(f"epoch {epoch + 1}: loss {mean_loss:.4f}, accuracy {accuracy:.1%} on all {info.total_nodes} nodes")

    weights = sum(parameter.double().sum().item() for parameter in model.parameters())
    return {"rank": dist.get_rank(), "seen": seen, "accuracy": accuracy, "weights": weights}


def main() -> None:
    """Open the nodes, train, and see that all of them hold the same network."""
    import argparse

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--provider", choices=["local"], default="local")
    parser.add_argument("--nodes", type=int, default=2)
    args = parser.parse_args()

    provider, image = {"local": sky.Local}[args.provider](), sky.Image(pip=["torch"])
    with sky.ComputePool(provider=provider, nodes=args.nodes, image=image) as pool:
        results = train(epochs=6, points=4000) @ pool

    for result in results:
        print("rank {rank}: {seen:.0f} points, accuracy {accuracy:.1%}, sum of weights {weights:.6f}".format(**result))
    if len({result["weights"] for result in results}) > 1 or results[0]["accuracy"] < 0.9:
        raise SystemExit("something is wrong: the nodes disagree, or they did not learn")


if __name__ == "__main__":
    main()
