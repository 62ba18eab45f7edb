"""Step 9: what all nodes share."""

import skyward as sky


@sky.compute
def work(steps: int) -> None:
    done = sky.counter("steps")
    for _ in range(steps):
        done.add(1)
    sky.barrier("end").wait()


if __name__ == "__main__":
    with sky.ComputePool(nodes=3) as pool:
        _ = work(10) @ pool
        print("steps done by all nodes:", pool.counter("steps").value)
