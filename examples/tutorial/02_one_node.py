"""Step 2: one result, and a result that comes later."""

import skyward as sky


@sky.compute
def largest_factor(number: int) -> int:
    return max(d for d in range(1, number // 2 + 1) if number % d == 0)


if __name__ == "__main__":
    with sky.ComputePool(nodes=2) as pool:
        now = largest_factor(360_360) >> pool
        later = largest_factor(720_720) > pool
        print(now, later.result())
