"""What runs on the nodes under stress. Every body that is counted writes a line to the log when it starts."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import skyward as sky

__all__ = ["add", "count", "import_pandas", "meet", "produce", "rank", "share", "speak", "squares", "take"]


def log_start(log: str, key: str) -> None:
    """One line for one start of a body; O_APPEND keeps the lines of several processes apart."""
    file = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.write(file, f"{key}\n".encode())
    os.close(file)


@sky.compute
def speak(log: str, key: str, seconds: float) -> str:
    """Prints in two ways, computes for a while, and returns its key."""
    log_start(log, key)
    print(f"print {key}")
    os.write(1, f"write {key}\n".encode())
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass
    return key


@sky.compute
def meet(path: str, count: int, patience: float) -> tuple[int, int]:
    """Waits until `count` bodies run at the same time; how many came, and the process of this one."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(file, b".")
    os.close(file)
    end = time.monotonic() + patience
    while (came := os.stat(path).st_size) < count and time.monotonic() < end:
        time.sleep(0.005)
    return came, os.getpid()


@sky.compute
def rank(log: str, key: str, seconds: float, failing: int | None) -> int:
    """One body of a broadcast; the rank `failing` raises in the middle, the others would take longer."""
    info = sky.instance_info()
    assert info is not None
    log_start(log, f"{key}.{info.rank}")
    if info.rank == failing:
        time.sleep(seconds / 4)
        raise ValueError(key)
    time.sleep(seconds)
    return info.rank


@sky.compute
def count(log: str, key: str, items: int, pause: float) -> Iterator[int]:
    """Yields numbers."""
    log_start(log, key)
    for i in range(items):
        if pause:
            time.sleep(pause)
        yield i


@sky.compute
def squares(log: str, key: str, numbers: Iterator[int]) -> Iterator[int]:
    """Items go in and come out of one call."""
    log_start(log, key)
    for number in numbers:
        yield number * number


@sky.compute
def add(log: str, key: str, numbers: Iterator[int]) -> int:
    """Items go in."""
    log_start(log, key)
    return sum(numbers)


@sky.compute
def produce(log: str, key: str, size: int) -> bytearray:
    """A result of that many bytes, which is made from its key."""
    log_start(log, key)
    return bytearray((key.encode() * (size // len(key) + 1))[:size])


@sky.compute
def take(log: str, key: str, *kept: bytearray) -> list[bytes]:
    """How the results begin that it was given."""
    log_start(log, key)
    return [bytes(value[:8]) for value in kept]


@sky.compute
def share(log: str, key: str, name: str) -> str:
    """Puts its key into a queue, and counts up under a lock."""
    log_start(log, key)
    with sky.lock(f"{name}-lock"):
        total = sky.dict(f"{name}-dict")
        total["count"] = total.get("count", 0) + 1
    sky.counter(f"{name}-counter").add(1)
    sky.queue(f"{name}-queue").put(key)
    return key


@sky.compute
def import_pandas(log: str, key: str) -> int:
    """Fails if a call before it has left a half-imported package in the process."""
    log_start(log, key)
    import pandas

    return int(pandas.DataFrame({"a": [1, 2, 3]})["a"].sum())
