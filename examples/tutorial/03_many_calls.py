"""Step 3: many calls, spread over the nodes."""

import skyward as sky


@sky.compute
def area(radius: float) -> float:
    return 3.14159 * radius**2


if __name__ == "__main__":
    with sky.ComputePool(nodes=4) as pool:
        areas = pool.map(area, range(1000))
        print(f"{len(areas)} areas, the last one {areas[-1]:.0f}")
