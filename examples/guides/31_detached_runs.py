"""A program for `sky run --detach`: it runs in the same way without."""

import skyward as sky


@sky.compute
def square(x: int) -> int:
    return x * x


if __name__ == "__main__":
    with sky.ComputePool(nodes=2) as pool:
        print(pool.map(square, range(4)))
