"""How much faster is a pool? The same waiting tasks here and on nodes x concurrency slots, compared with the ideal."""

from __future__ import annotations

import argparse
import time

from joblib import Parallel, delayed

import skyward as sky

PROVIDERS = {"local": sky.Local}
TASKS, SECONDS = 80, 0.1


def slow_square(x: int) -> int:
    """Stands for work that takes a while."""
    time.sleep(SECONDS)
    return x * x


def main() -> None:
    """Open a pool, run the tasks on all of its slots, and say how close to the ideal that was."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--provider", choices=PROVIDERS, default="local")
    options.add_argument("--nodes", type=int, default=2)
    options.add_argument("--concurrency", type=int, default=4)
    args = options.parse_args()

    provider = PROVIDERS[args.provider]()
    with sky.integrations.JoblibPool(provider, nodes=args.nodes, concurrency=args.concurrency):
        slots = args.nodes * args.concurrency
        Parallel(n_jobs=-1)(delayed(slow_square)(x) for x in range(slots))  # every process has imported joblib now

        began = time.perf_counter()
        results = Parallel(n_jobs=-1)(delayed(slow_square)(x) for x in range(TASKS))
        took = time.perf_counter() - began

    assert results == [x * x for x in range(TASKS)]
    ideal = TASKS * SECONDS / slots
    print(f"{TASKS} tasks of {SECONDS} s on {args.nodes} x {args.concurrency} slots: {took:.2f} s")
    print(f"one after the other: {TASKS * SECONDS:.1f} s; ideal: {ideal:.2f} s; efficiency {ideal / took:.0%}")


if __name__ == "__main__":
    main()
