"""A pool beside the workers of a dask cluster: python examples/15_dask.py [tcp://scheduler:8786] [--nodes N].

Without an address it makes a small cluster of this computer, with a node beside each worker.
"""

import argparse
import os
from typing import Literal

from dask.distributed import Client, LocalCluster

import skyward as sky


@sky.compute
def largest_prime(numbers: range) -> tuple[int, int]:
    """Looks through this node's part, in a process that is none of dask's."""
    mine = sky.shard(numbers)
    found = max((n for n in mine if all(n % d for d in range(2, int(n**0.5) + 1))), default=0)
    return found, os.getpid()


def run(client: Client, nodes: int, per: Literal["machine", "worker"]) -> None:
    with sky.ComputePool(provider=sky.Dask(client, per=per), nodes=nodes) as pool:
        squares = client.map(lambda n: n * n, range(10))  # dask continues with its own work
        results = largest_prime(range(2, 100_000)) @ pool
        workers = set(client.run(os.getpid).values())
    print(f"the largest prime below 100,000 is {max(found for found, _ in results)}")
    print(f"{len(results)} nodes beside {len(workers)} workers, in processes of their own:", end=" ")
    print(workers.isdisjoint(process for _, process in results))
    print(f"dask meanwhile: {sum(client.gather(squares))}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "address", nargs="?", help="where dask's scheduler listens (default: a cluster of this computer)"
    )
    parser.add_argument("--nodes", type=int, default=2)
    args = parser.parse_args()
    if args.address:
        with Client(args.address) as client:
            run(client, args.nodes, "machine")
    else:
        with LocalCluster(n_workers=args.nodes, dashboard_address="127.0.0.1:0") as cluster, Client(cluster) as client:
            run(client, args.nodes, "worker")


if __name__ == "__main__":
    main()
