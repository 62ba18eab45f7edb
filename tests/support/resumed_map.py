"""A program with a map that is resumed: it sends itself a signal when so many results are kept, and says how many were
left.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import skyward as sky

COUNT = 1000


@sky.compute
def sample(number: int) -> tuple[int, str]:
    with Path("samples").open("a") as file:  # where the program was started
        file.write(f"{number}\n")
    time.sleep(0.001)
    return number * number, "x" * (number % 50)


def end_self(journal: Path, kept: int, number: int) -> None:
    while True:
        time.sleep(0.001)
        if journal.exists() and journal.read_bytes().count(b'"fact":"result"') >= kept:
            os.kill(os.getpid(), number)
            return


def main(kept: int, number: int) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what it starts in the background
    journal = Path(os.environ["SKYWARD_STATE"]) / "runs" / "sweep" / "journal"
    with sky.ComputePool(nodes=2, console=False) as pool:
        left: list[int] = []
        pool.on_event(lambda e: isinstance(e, sky.events.Notice) and left.append(_left(e.text)))
        if kept < COUNT:
            threading.Thread(target=end_self, args=(journal, kept, number), daemon=True).start()
        found = pool.map(sample, range(COUNT), resume="sweep")
    assert found == [(number * number, "x" * (number % 50)) for number in range(COUNT)]
    print(max(left))


def _left(text: str) -> int:
    return int(text.split(", ")[-1].split()[0]) if "taken from sweep" in text else -1


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
