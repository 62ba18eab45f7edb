"""Four nodes learn together: each trains on its own part of the data, and the averaged model goes into the next round.

The task: does a point lie inside a tilted ellipse? A logistic regression learns it from 100,000 noisy examples, all in
plain Python, so that nothing has to be installed. `python examples/hello_nodes.py`, or `make demo`.
"""

from __future__ import annotations

import math
import os
import random
import time

import skyward as sky

NODES, ROUNDS, EPOCHS = 4, 10, 4
FILES, POINTS_PER_FILE = 400, 250
LEARNING_RATE = 0.00006

Point = tuple[tuple[float, ...], int]


def read_file(number: int) -> list[Point]:
    """Points with their features and label; each file is always the same, here and on every node."""
    chance = random.Random(number)
    points: list[Point] = []
    for _ in range(POINTS_PER_FILE):
        x, y = chance.uniform(-1, 1), chance.uniform(-1, 1)
        inside = (x + 0.5 * y) ** 2 / 0.9 + (y - 0.4 * x) ** 2 / 0.55 < 1
        label = inside if chance.random() > 0.02 else not inside
        points.append(((1.0, x, y, x * x, y * y, x * y), int(label)))
    return points


def predict(weights: list[float], features: tuple[float, ...]) -> float:
    """How likely it is that the point lies inside."""
    return 1 / (1 + math.exp(-sum(w * f for w, f in zip(weights, features, strict=True))))


@sky.compute
def fit(weights: list[float], number: int) -> tuple[list[float], int, str]:
    """Train on this node's files; the new weights, how many points they saw, and where that was."""
    info = sky.instance_info()
    points = [point for file in sky.shard(range(FILES)) for point in read_file(file)]
    for epoch in range(EPOCHS):
        loss = 0.0
        for features, label in points:
            likely = predict(weights, features)
            loss -= math.log(likely if label else 1 - likely)
            step = LEARNING_RATE * (label - likely)
            weights = [w + step * f for w, f in zip(weights, features, strict=True)]
        print(f"round {number} epoch {epoch + 1}: loss {loss / len(points):.4f}")
    return weights, len(points), f"node {info.node} of {info.total_nodes}, process {os.getpid()} on {info.hostname}"


def accuracy(weights: list[float], points: list[Point]) -> float:
    """The share of points that are on the side where the model believes them to be."""
    return sum((predict(weights, features) > 0.5) == label for features, label in points) / len(points)


def main() -> None:
    """Open four nodes on this computer, train for some rounds, say what came of it."""
    unseen = [point for file in range(FILES, FILES + 20) for point in read_file(file)]
    weights = [0.0] * 6
    before, began = accuracy(weights, unseen), time.perf_counter()

    with sky.ComputePool(nodes=NODES) as pool:
        for number in range(1, ROUNDS + 1):
            learned = fit(weights, number) @ pool
            weights = [sum(column) / NODES for column in zip(*(new for new, _, _ in learned), strict=True)]
            print(f"round {number} of {ROUNDS}: accuracy on unseen points {accuracy(weights, unseen):.1%}")

    print(f"\n{NODES} nodes trained together for {time.perf_counter() - began:.1f} s:")
    for _, seen, where in learned:
        print(f"  {where}: {seen:,} points of its own")
    after = accuracy(weights, unseen)
    print(f"accuracy on {len(unseen):,} points that none of them saw: {before:.1%} before, {after:.1%} after")
    if len({where for _, _, where in learned}) != NODES or after < 0.9:
        raise SystemExit("something is wrong: not every node took part, or they did not learn")


if __name__ == "__main__":
    main()
