"""Runs seeds: `python -m tests.simulation 17` replays one with its trace, `... 0 5000` runs a range."""

from __future__ import annotations

import logging
import sys
import time

from tests.simulation.seeds import outcome
from tests.simulation.world import World

if len(sys.argv) == 2:
    world = World(int(sys.argv[1]), trace=True)
    try:
        world.run()
        print("held")
    except BaseException:
        print("\n".join(world.trace or ()))
        raise
else:
    first, count = int(sys.argv[1]), int(sys.argv[2])
    logging.disable(logging.CRITICAL)
    began = time.monotonic()
    broken = [text for text in map(outcome, range(first, first + count)) if text]
    print("\n".join(text.splitlines()[0] for text in broken[:50]))
    print(f"{count} seeds, {len(broken)} broken, {time.monotonic() - began:.1f} s")
