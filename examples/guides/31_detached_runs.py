"""A program for `sky run --detach`, which runs in the same way without it."""

import json
import os
import sys
import time
from pathlib import Path

import skyward as sky


@sky.compute
def train(epoch: int) -> float:
    time.sleep(1)
    return 1 / (1 + epoch + sky.instance_info().node)


def save(losses: list[list[float]]) -> None:
    if folder := os.environ.get("SKYWARD_RUN_FOLDER"):
        part = Path(folder, "results", "losses.json.part")
        part.write_text(json.dumps(losses))
        part.rename(part.with_suffix(""))


if __name__ == "__main__":
    losses: list[list[float]] = []
    with sky.ComputePool(nodes=2) as pool:
        for epoch in range(int(sys.argv[1]) if len(sys.argv) > 1 else 3):
            losses.append(train(epoch) @ pool)
            save(losses)
            print(f"epoch {epoch}: {losses[-1]}")
