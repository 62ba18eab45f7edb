"""A program for `sky run --detach`, which runs in the same way without it; and a function for `sky.detach`."""

import sys

import skyward as sky


@sky.compute
def square(x: int) -> int:
    return x * x


def squares(count: int) -> int:
    return sum(sky.gather(*[square(n) for n in range(count)]) >> sky)


if __name__ == "__main__" and "--detach" in sys.argv:
    run = sky.detach(squares, 4, pool=sky.ComputePool(nodes=2), name="squares")
    print(run.status.stage, run.result())
elif __name__ == "__main__":
    with sky.ComputePool(nodes=2) as pool:
        print(pool.map(square, range(4)))
