"""Step 7: how far it is, and how well it does."""

import time

import skyward as sky


@sky.compute
def train(steps: int) -> float:
    loss = 1.0
    for step in range(steps):
        time.sleep(0.01)
        loss *= 0.95
        sky.progress(step + 1, steps, loss=loss)
    return loss


if __name__ == "__main__":
    with sky.ComputePool(nodes=2) as pool:
        losses = train(50) @ pool
        reported = pool.history().metrics()
    print(f"losses {losses}; {sum(metric.name == 'loss' for metric in reported)} points of the curves were kept")
