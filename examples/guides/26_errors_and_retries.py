"""Errors and retries: what a failure looks like, what had finished, what is started again, and what is safe to repeat.

python examples/guides/26_errors_and_retries.py
"""

import os
import random
import sys
import tempfile
import time
from pathlib import Path

import skyward as sky


@sky.compute
def parse(line: str) -> int:
    """Fails as ordinary code does: with an exception of its own."""
    return int(line)


@sky.compute
def crash() -> None:
    """Stands for a body that takes its process with it: a fault in C code, an assertion in a driver."""
    print("the driver gives up", file=sys.stderr)
    os._exit(3)


@sky.compute(timeout=0.5)
def hang() -> None:
    """Stands for a body that waits for something that never comes."""
    try:
        time.sleep(60)
    finally:
        print("finally blocks run")


@sky.compute
def fetch(url: str) -> str:
    """Tries again by itself, since only the body knows which failures are worth it."""
    for attempt in range(1, 6):
        try:
            return download(url)
        except ConnectionError:
            if attempt == 5:
                raise
            time.sleep(0.01 * 2**attempt * random.random())
    raise AssertionError("not reached")


calls = 0


def download(url: str) -> str:
    """Stands for a server that refuses at first."""
    global calls
    calls += 1
    if calls < 3:
        raise ConnectionError(f"{url} refused")
    return f"{url} answered at try {calls}"


@sky.compute
def simulate(seed: int, folder: str) -> str:
    """Safe to repeat: what is done is not done again, and a file is there as a whole or not at all."""
    result = Path(folder, f"{seed}.txt")
    if result.exists():
        return f"{seed}: was there"
    value = random.Random(seed).random()
    unfinished = result.with_suffix(f".{os.getpid()}")
    unfinished.write_text(f"{value}\n")
    unfinished.rename(result)
    return f"{seed}: made at attempt {sky.instance_info().attempt}"


def one_failure(pool: sky.ComputePool) -> None:
    try:
        parse("12 apples") >> pool
    except ValueError as error:
        print(f"{type(error).__name__}: {error}")
        print(error.__notes__[0].partition(",")[0])


def several(pool: sky.ComputePool) -> None:
    lines = ["1", "2", "three", "4"]
    try:
        pool.map(parse, lines)
    except ValueError as error:
        finished: dict[int, int] = getattr(error, "partial", {})
        print(f"finished before it: {sorted(finished)}")

    results = pool.map(parse, lines, return_exceptions=True)
    failed = [line for line, result in zip(lines, results, strict=True) if isinstance(result, BaseException)]
    print(f"failed: {failed}")
    print(f"again, mended: {pool.map(parse, [line.replace('three', '3') for line in failed])}")


def no_result(pool: sky.ComputePool) -> None:
    for call in (crash(), hang()):
        try:
            call >> pool
        except sky.errors.TaskTimeout as error:
            print(f"stopped after {error.seconds:g} s")
        except sky.errors.TaskCrashed as error:
            print(f"exit status {error.exit_code}, last lines: {error.stderr.strip()}")
    print(f"the pool goes on: {parse('7') >> pool}")


def repeated(pool: sky.ComputePool) -> None:
    print(fetch("http://data.example") >> pool)
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):
            print(simulate(4, folder).with_retries(5) >> pool)


if __name__ == "__main__":
    with sky.ComputePool(nodes=2) as pool:
        one_failure(pool)
        several(pool)
        no_result(pool)
        repeated(pool)
