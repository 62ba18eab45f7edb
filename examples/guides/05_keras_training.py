"""Train one Keras model on several nodes with JAX: which shape is drawn in a small, noisy picture?"""

import argparse

import numpy as np

import skyward as sky

SHAPES = ("bar", "column", "diagonal", "cross")
SIDE = 12


def pictures(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Pictures with one of four shapes each, and the number of the shape."""
    chance = np.random.default_rng(seed)
    images = chance.normal(0, 0.6, (count, SIDE, SIDE)).astype("float32")
    labels = chance.integers(len(SHAPES), size=count)
    along = np.arange(SIDE)
    for image, label, at in zip(images, labels, chance.integers(2, SIDE - 2, size=count), strict=True):
        if label in (0, 3):
            image[at] += 1
        if label in (1, 3):
            image[:, at] += 1
        if label == 2:
            image[along, along] += 1
    return images, labels


@sky.compute
@sky.stdout(only="head")
def train(images: np.ndarray, labels: np.ndarray, epochs: int) -> dict:
    """Train on this node's share of the pictures, together with the other nodes."""
    import keras
    from keras import layers

    x, y = sky.shard(images, labels, shuffle=True, seed=42, drop_last=True)
    model = keras.Sequential(
        [
            layers.Input((SIDE, SIDE)),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dropout(0.2),
            layers.Dense(len(SHAPES), activation="softmax"),
        ]
    )
    model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    history = model.fit(x, y, epochs=epochs, batch_size=64, verbose=2)

    _, accuracy = model.evaluate(*pictures(512, seed=1), batch_size=64, verbose=0)
    return {
        "pictures": len(x),
        "losses": history.history["loss"],
        "accuracy": accuracy,
        "weights": model.get_weights(),
    }


def main() -> None:
    """Open the nodes, train, and see that all of them hold the same model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--provider", choices=["local"], default="local")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=12)
    args = parser.parse_args()

    images, labels = pictures(4096, seed=0)
    provider = {"local": sky.Local}[args.provider]()
    plugins = [sky.plugins.jax(), sky.plugins.keras(backend="jax", seed=42)]
    with sky.ComputePool(provider=provider, nodes=args.nodes, plugins=plugins) as pool:
        results = train(images, labels, args.epochs) @ pool

    head = results[0]
    equal = all(
        np.array_equal(mine, other)
        for result in results
        for mine, other in zip(head["weights"], result["weights"], strict=True)
    )
    print(f"{len(results)} nodes, {head['pictures']} pictures each: accuracy {head['accuracy']:.1%} on unseen ones")
    print(f"loss {head['losses'][0]:.3f} -> {head['losses'][-1]:.3f}, the same on every node: {equal}")
    if not equal or head["accuracy"] < 0.8:
        raise SystemExit("something is wrong: the nodes disagree, or did not learn")


if __name__ == "__main__":
    main()
