"""A function that runs detached, and what it returns."""

import skyward as sky


@sky.compute
def square(x: int) -> int:
    return x * x


def squares(count: int) -> int:
    return sum(sky.gather(*[square(n) for n in range(count)]) >> sky)


if __name__ == "__main__":
    run = sky.detach(squares, 4, pool=sky.ComputePool(nodes=2), name="squares")
    print(run.status.stage, run.result())
