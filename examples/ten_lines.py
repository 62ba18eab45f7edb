"""The shortest tour: a plain function, four nodes, one line to run it on all of them."""

import skyward as sky


@sky.compute
def count_primes(numbers: range) -> int:
    mine = sky.shard(numbers, shuffle=True)
    return sum(all(n % d for d in range(2, int(n**0.5) + 1)) for n in mine)


with sky.ComputePool(nodes=4) as pool:
    parts = count_primes(range(2, 300_000)) @ pool
    print(f"{sum(parts):,} primes below 300,000; the four nodes found {parts} of them")
