"""Send a model to a node, train it there, and go on with it here."""

import argparse
from typing import TYPE_CHECKING

import skyward as sky

if TYPE_CHECKING:
    from torch import Tensor, nn


@sky.compute
def fit(model: "nn.Module", x: "Tensor", y: "Tensor", steps: int) -> "tuple[nn.Module, list[float]]":
    """Train the model where there may be a GPU; it comes home on the CPU, with its losses."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, x, y = model.to(device), x.to(device), y.to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(steps):
        loss = torch.nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model.cpu(), losses


@sky.compute
def error_of(weights: "dict[str, Tensor]", x: "Tensor", y: "Tensor") -> float:
    """How far a model with these weights is off on this node's part of the data."""
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(1, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    model.load_state_dict(weights)
    x, y = sky.shard(x, y)
    with torch.no_grad():
        return torch.nn.functional.mse_loss(model(x), y).item()


def main() -> None:
    """Make a model here, have it trained there, check it here and on every node."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--provider", choices=["local"], default="local")
    parser.add_argument("--nodes", type=int, default=2)
    args = parser.parse_args()

    import torch

    torch.manual_seed(0)
    x = torch.linspace(-3, 3, 512).unsqueeze(1)
    y = torch.sin(2 * x)
    model = torch.nn.Sequential(torch.nn.Linear(1, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))

    provider = {"local": sky.Local}[args.provider]()
    with sky.ComputePool(provider=provider, nodes=args.nodes, plugins=[sky.plugins.torch()]) as pool:
        trained, losses = fit(model, x, y, steps=800) >> pool
        errors = error_of(trained.state_dict(), x, y) @ pool

    with torch.no_grad():
        here = torch.nn.functional.mse_loss(trained(x), y).item()
    print(f"loss {losses[0]:.4f} at first, {losses[-1]:.4f} at the end, {here:.4f} here; on the nodes' parts: {errors}")
    if here > 0.05 or abs(here - sum(errors) / len(errors)) > 1e-4:
        raise SystemExit("something is wrong: the model did not learn, or is another one than it was on the nodes")


if __name__ == "__main__":
    main()
