"""The page of a pool, its history as lists and as a trace, and a listener that passes metrics on."""

from __future__ import annotations

import time
from collections.abc import Callable

import skyward as sky


@sky.compute
def train(rate: float, steps: int = 20) -> float:
    loss = 1.0
    for step in range(steps):
        time.sleep(0.02)
        loss *= 1 - rate
        sky.progress(step + 1, steps, loss=loss)
    if loss > 0.9:
        raise ValueError(f"rate {rate} is too small")
    return loss


def passed_to(log: Callable[[str, float, int], object]) -> Callable[[sky.events.Event], None]:
    """A listener that calls `log` with the name, value and step of each metric that a body reports."""

    def listen(event: sky.events.Event) -> None:
        if isinstance(event, sky.events.Progress):
            for name, value in event.metrics.items():
                log(f"{name}/rank{event.rank}", value, int(event.step))

    return listen


if __name__ == "__main__":
    with open("metrics.txt", "w") as metrics, sky.ComputePool(nodes=2, name="history-example") as pool:
        pool.on_event(passed_to(lambda name, value, step: print(step, name, value, file=metrics)))
        print(pool.view())
        _ = sky.gather(*(train(rate) for rate in (0.001, 0.1, 0.3)), return_exceptions=True) >> pool
        for call in pool.history().calls():
            print(call.name, call.arguments, call.outcome, f"{call.seconds:.2f} s on node {call.node}")
        pool.trace("run.json")
    print(pool.history())
