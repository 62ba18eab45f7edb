"""Checkpoints: training that goes on where it was, after a failure, on another node, or in tomorrow's program.

python examples/guides/28_checkpoints.py                                in a folder for this run
python examples/guides/28_checkpoints.py --checkpoints DIRECTORY        run it again, and it goes on
"""

import argparse
import json
import os
import tempfile
from pathlib import Path

import skyward as sky


def load_checkpoint(folder: str) -> tuple[int, float]:
    """The first step to do, and the weight before it; the beginning if there is no checkpoint."""
    try:
        kept = json.loads(Path(folder, "last.json").read_text())
    except FileNotFoundError:
        return 0, 1.0
    return kept["step"], kept["weight"]


def save_checkpoint(folder: str, step: int, weight: float) -> None:
    """Writes beside the last one, then renames: whoever reads sees the old one or the new one, as a whole."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    unfinished = Path(folder, f"last.json.{os.getpid()}")
    unfinished.write_text(json.dumps({"step": step, "weight": weight}))
    unfinished.rename(Path(folder, "last.json"))


@sky.compute(retries=5)
def train(steps: int, folder: str, fail_at: int | None = None) -> float:
    """Stands for a training; `fail_at` for the bug that stops it in the night."""
    first, weight = load_checkpoint(folder)
    print(f"from step {first}")
    for step in range(first, steps):
        if step == fail_at:
            raise RuntimeError(f"step {step}: the loss is not a number")
        weight *= 0.9
        if (step + 1) % 10 == 0 or sky.preempted():
            save_checkpoint(folder, step + 1, weight)
        sky.progress(step + 1, steps, weight=weight)
        if sky.preempted():
            raise sky.Preempted  # the checkpoint is written: another node continues from it
    return weight


def main(folder: str) -> None:
    """Fails once, goes on, and brings the last checkpoint here."""
    with sky.ComputePool(nodes=2) as pool:
        try:
            train(50, folder, fail_at=35) >> pool
        except RuntimeError as error:
            print(f"stopped: {error}")
        weight = train(50, folder) >> pool
        print(f"the weight is {weight:.6f}, as it is without a stop: {0.9**50:.6f}")
        pool.pull(f"{folder}/last.json", f"{folder}/mine.json", node=0)
        print(f"brought here: {Path(folder, 'mine.json').read_text()}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoints", metavar="DIRECTORY", help="one that all nodes see (default: for this run)")
    given = parser.parse_args().checkpoints
    if given:
        main(os.path.abspath(given))
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(folder)
