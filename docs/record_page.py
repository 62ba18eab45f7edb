"""Takes the pictures of the page in docs/pictures, from a real run in a real browser: `python docs/record_page.py`."""

from __future__ import annotations

import random
import time

from photograph import photograph

import skyward as sky


@sky.compute
def train(steps: int, rate: float) -> float:
    loss = 1.0
    for step in range(steps):
        _ = sum(number * number for number in range(150_000))  # something for the curves of the CPU
        loss = 0.97 * loss + 0.001 * random.random()
        print(f"step {step}: loss {loss:.4f}")
        sky.progress(step + 1, steps, loss=loss, accuracy=1 - loss)
        time.sleep(0.02)
    return loss


@sky.compute
def trial(number: int) -> float:
    time.sleep(0.05 + random.random() * 0.3)
    if number % 23 == 7:
        raise ValueError(f"trial {number}: the loss is not a number")
    return random.random()


def main() -> None:
    """Runs something that has a bit of everything, and takes the pictures, light and dark."""
    from tests.support.browser import browser

    with sky.ComputePool(nodes=4, console=False, name="cifar-sweep") as pool:
        _ = train(100, 0.1) @ pool
        _ = sky.gather(*(trial(number) for number in range(60)), return_exceptions=True) >> pool
        future = train(10_000, 0.05) > pool
        for end, dark in ((".png", False), ("-dark.png", True)):
            with browser(1300, 1000, dark) as driver:
                driver.get(str(pool.view()))
                time.sleep(4)  # for some samples of the nodes
                photograph(driver, f"page{end}", height=800)
                driver.execute_script("openTab('metrics')")
                time.sleep(2)
                photograph(driver, f"page-metrics{end}")
        future.cancel()


if __name__ == "__main__":
    main()
