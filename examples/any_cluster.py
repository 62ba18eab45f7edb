"""One program, wherever the machines are: python examples/any_cluster.py [local|ssh|slurm|ray|dask|join|aws] [where].

python examples/any_cluster.py                             two nodes of this computer
python examples/any_cluster.py ssh gpu1,user@10.0.0.7      two hosts
python examples/any_cluster.py slurm gpu                   two nodes of a partition, from a login node
python examples/any_cluster.py dask tcp://10.0.0.5:8786    two machines that have dask workers
"""

import argparse
import socket

import skyward as sky

PROVIDERS = {
    "local": lambda given: sky.Local(),
    "ssh": lambda given: sky.SSH(hosts=given.split(",")),
    "slurm": lambda given: sky.Slurm(partition=given or None),
    "ray": lambda given: sky.Ray(given or "auto"),
    "dask": lambda given: sky.Dask(given),
    "join": lambda given: sky.Join(),
    "aws": lambda given: sky.AWS(),
}


@sky.compute
def count_primes(numbers: range) -> tuple[str, int]:
    mine = sky.shard(numbers, shuffle=True)
    return socket.gethostname(), sum(all(n % d for d in range(2, int(n**0.5) + 1)) for n in mine)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", nargs="?", choices=PROVIDERS, default="local")
    parser.add_argument("where", nargs="?", default="")
    parser.add_argument("--nodes", type=int, default=2)
    args = parser.parse_args()
    with sky.ComputePool(provider=PROVIDERS[args.kind](args.where), nodes=args.nodes) as pool:
        parts = count_primes(range(2, 50_000)) @ pool
    for host, found in parts:
        print(f"{host}: {found} primes")
    print(f"{sum(found for _, found in parts):,} primes below 50,000")


if __name__ == "__main__":
    main()
