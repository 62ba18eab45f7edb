"""Step 4: a sweep in which some calls fail."""

import skyward as sky


@sky.compute
def train(rate: float) -> float:
    if rate > 1:
        raise ValueError(f"a rate of {rate} does not converge")
    return 1 / (1 + rate)


if __name__ == "__main__":
    with sky.ComputePool(nodes=2) as pool:
        results = pool.map(train, [0.1, 0.5, 2.0, 1.0], return_exceptions=True)
    for result in results:
        print("failed:" if isinstance(result, Exception) else "loss:", result)
