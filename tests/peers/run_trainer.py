"""Runs a Hugging Face Trainer, and accelerate's usual loop, on two nodes; torchrun says what should come out."""

from __future__ import annotations

from figures import Figures, tried
from torchrun import launched

import skyward as sky
from tests.support.training import check_ranks, train_with_accelerate, train_with_trainer

__all__ = ["main"]


def main() -> Figures:
    """Both bodies, by plugin and by decorators, against the same bodies under torchrun."""
    bodies = (train_with_trainer, train_with_accelerate)
    with (
        sky.ComputePool(nodes=2, plugins=[sky.plugins.torch()], console=False) as grouped,
        sky.ComputePool(nodes=2, console=False) as plain,
    ):
        doors = {
            "plugin": (lambda fn: fn, grouped),
            "torch decorator": (sky.integrations.torch(), plain),
            "transformers decorator": (sky.integrations.transformers(), plain),
        }

        def run(body: object, door: str) -> None:
            decorate, pool = doors[door]
            results = sky.compute(decorate(body))() @ pool
            check_ranks(results)
            wanted = expected(body)
            assert results[0]["losses"] == wanted[0]["losses"], (results[0]["losses"], wanted[0]["losses"])
            assert results[0]["weights"] == wanted[0]["weights"]

        known: dict[object, list[dict]] = {}

        def expected(body: object) -> list[dict]:
            if body not in known:
                known[body] = launched("tests.support.training", body.__name__)
                check_ranks(known[body], local=2)
            return known[body]

        tests = [(f"{body.__name__}, {door}", lambda b=body, d=door: run(b, d)) for body in bodies for door in doors]
        return tried("Trainer and accelerate's loop", tests)


if __name__ == "__main__":
    print(main())
