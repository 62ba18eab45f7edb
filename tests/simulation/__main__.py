"""Runs seeds: `python -m tests.simulation 17` replays one with its trace, `... 0 5000` runs a range.

With `--places 2` every node has two ranks.
"""

from __future__ import annotations

import logging
import sys
import time

from tests.simulation.seeds import outcome
from tests.simulation.world import World

arguments = sys.argv[1:]
places = 1
if "--places" in arguments:
    at = arguments.index("--places")
    places = int(arguments[at + 1])
    del arguments[at : at + 2]
if len(arguments) == 1:
    world = World(int(arguments[0]), trace=True, places=places)
    try:
        world.run()
        print("held")
    except BaseException:
        print("\n".join(world.trace or ()))
        raise
else:
    first, count = map(int, arguments)
    logging.disable(logging.CRITICAL)
    began = time.monotonic()
    broken = [text for text in (outcome(seed, places) for seed in range(first, first + count)) if text]
    print("\n".join(text.splitlines()[0] for text in broken[:50]))
    print(f"{count} seeds, {len(broken)} broken, {time.monotonic() - began:.1f} s")
