"""Batch inference: a model that each process loads once, a thousand calls, results written as they come, and resumed.

python examples/guides/27_batch_inference.py --nodes 4
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import skyward as sky


@sky.once
def model(name: str) -> Callable[[list[str]], list[int]]:
    """Stands for weights that take a while to load, and may fill a GPU."""
    print(f"loading {name}")
    time.sleep(0.3)
    words = {"good": 1, "great": 2, "bad": -1}
    return lambda texts: [sum(words.get(word, 0) for word in text.split()) for text in texts]


@sky.compute
def predict(first: int, count: int) -> tuple[int, list[int]]:
    """Reads its batch where it runs, and answers with what is small."""
    return first, model("small")(read(first, count))


def read(first: int, count: int) -> list[str]:
    """Stands for rows of a file, a bucket or a table that every node can read."""
    return [f"a {('good', 'bad', 'great')[row % 3]} text, number {row}" for row in range(first, first + count)]


def missing(results: Path, rows: int, batch: int) -> list[int]:
    """The batches that an earlier run has not written."""
    done = {json.loads(line)["first"] for line in results.open()} if results.exists() else set()
    return [first for first in range(0, rows, batch) if first not in done]


def infer(pool: sky.ComputePool, results: Path, rows: int, batch: int) -> None:
    todo = missing(results, rows, batch)
    calls = [predict(first, min(batch, rows - first)) for first in todo]
    began = time.perf_counter()
    with results.open("a") as file:
        for first, scores in sky.gather(*calls, stream=True, ordered=False) >> pool:
            print(json.dumps({"first": first, "scores": scores}), file=file, flush=True)
    print(f"{len(calls)} batches in {time.perf_counter() - began:.1f} s")


def main() -> None:
    """Twice the same: the second time nothing is left to do."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=2)
    nodes = parser.parse_args().nodes
    with tempfile.TemporaryDirectory() as folder, sky.ComputePool(nodes=nodes) as pool:
        results = Path(folder, "scores.jsonl")
        infer(pool, results, rows=16_000, batch=16)
        infer(pool, results, rows=16_000, batch=16)
        scores = [score for line in results.open() for score in json.loads(line)["scores"]]
        print(f"{len(scores)} texts, of which {sum(score > 0 for score in scores)} are good")


if __name__ == "__main__":
    main()
