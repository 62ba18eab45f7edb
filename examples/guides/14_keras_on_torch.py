"""Train one Keras model on several nodes with PyTorch: the model is a torch module, so DDP averages its gradients."""

import argparse

import numpy as np

import skyward as sky


def points(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Points of a plane with some noise, and their height."""
    chance = np.random.default_rng(seed)
    where = chance.normal(size=(count, 3)).astype("float32")
    height = where @ np.array([[2.0], [-1.0], [0.5]]) + chance.normal(0, 0.05, (count, 1))
    return where, height.astype("float32")


@sky.compute
@sky.stdout(only="head")
def train(where: np.ndarray, height: np.ndarray, epochs: int) -> list[float]:
    """Learn the plane from this node's points, together with the other nodes; its slopes."""
    import keras
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    x, y = (torch.from_numpy(part) for part in sky.shard(where, height, drop_last=True))
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
    device = next(model.parameters()).device  # Keras chooses it
    shared = DistributedDataParallel(model) if dist.is_initialized() else model
    optimizer = torch.optim.SGD(shared.parameters(), lr=0.1)
    for epoch in range(epochs):
        loss = (shared(x.to(device)) - y.to(device)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"epoch {epoch + 1}: loss {loss.item():.4f}")
    return model.get_weights()[0].ravel().tolist()


def main() -> None:
    """Train, and see that all nodes hold the same model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--provider", choices=["local"], default="local")
    parser.add_argument("--nodes", type=int, default=2)
    args = parser.parse_args()

    provider = {"local": sky.Local}[args.provider]()
    plugins = [sky.plugins.torch(), sky.plugins.keras(backend="torch")]
    with sky.ComputePool(provider=provider, nodes=args.nodes, plugins=plugins) as pool:
        slopes = train(*points(1000, seed=0), 30) @ pool

    print(
        f"slopes {', '.join(f'{slope:.2f}' for slope in slopes[0])}, the same on every node: {slopes[0] == slopes[-1]}"
    )
    if any(other != slopes[0] for other in slopes) or not np.allclose(slopes[0], [2, -1, 0.5], atol=0.05):
        raise SystemExit("something is wrong: the nodes disagree, or did not learn")


if __name__ == "__main__":
    main()
