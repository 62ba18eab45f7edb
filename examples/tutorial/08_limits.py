"""Step 8: a call that takes too long, and a process that dies."""

import os
import time

import skyward as sky


@sky.compute(timeout=1.0)
def sleepy() -> None:
    time.sleep(60)


@sky.compute
def broken() -> None:
    os._exit(3)


if __name__ == "__main__":
    with sky.ComputePool(nodes=2) as pool:
        for call in (sleepy(), broken()):
            try:
                _ = call >> pool
            except sky.errors.TaskError as error:
                print(type(error).__name__, "-", error)
