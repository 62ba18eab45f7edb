"""A pool of machines that join by themselves: any scheduler, or a person, runs the command that the pool prints.

    python 23_join.py 4

Without a number it uses two nodes of this computer, so that there is nothing to run elsewhere.
"""

import argparse
import os
import random
import socket

import skyward as sky


@sky.compute
def inside(seed: int, points: int = 200_000) -> tuple[int, str]:
    """How many of some random points lie in a quarter of a circle, and on which machine they were counted."""
    chance = random.Random(seed)
    count = sum(chance.random() ** 2 + chance.random() ** 2 < 1 for _ in range(points))
    return count, f"{socket.gethostname()}, process {os.getpid()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("machines", nargs="?", type=int, default=0, help="how many machines will join")
    parser.add_argument("--login", help="user@host at which we meet them, if they cannot connect to this computer")
    args = parser.parse_args()

    provider = sky.Join(nodes=args.machines, login=args.login) if args.machines else sky.Local()
    with sky.ComputePool(provider=provider, nodes=args.machines or 2) as pool:
        parts = list(pool.map(inside, range(20)))
    print(f"pi is about {4 * sum(count for count, _ in parts) / (200_000 * len(parts)):.4f}")
    print(*sorted({where for _, where in parts}), sep="\n")


if __name__ == "__main__":
    main()
