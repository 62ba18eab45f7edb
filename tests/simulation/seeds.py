"""Runs seeds of the simulation, one or many, in this process or in several."""

from __future__ import annotations

import logging
import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from tests.simulation.world import Broken, World

__all__ = ["EVERY_DAY", "first_broken", "outcome", "run_all"]

EVERY_DAY = 900
"""How many seeds the tests run with one rank per node, and a third of them with two."""

_BATCH = 50


def outcome(seed: int, places: int = 1) -> str:
    """What is wrong with a seed; empty if all holds. Nodes have `places` ranks each."""
    try:
        World(seed, places=places).run()
    except Broken as exc:
        return str(exc)
    except Exception as exc:  # the logic itself has failed
        return f"seed {seed}: {exc!r}"
    return ""


def first_broken(first: int, count: int, places: int = 1) -> str:
    """What the first seed of a batch that breaks a promise has to say; empty if all hold."""
    logging.disable(logging.CRITICAL)
    return next(filter(None, (outcome(seed, places) for seed in range(first, first + count))), "")


def run_all(first: int, count: int, places: int = 1) -> str:
    """What the first seed of many that breaks a promise has to say; a process for every core."""
    firsts = range(first, first + count, _BATCH)
    counts = [min(_BATCH, first + count - start) for start in firsts]
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=get_context("spawn")) as pool:
        return next(filter(None, pool.map(first_broken, firsts, counts, [places] * len(counts))), "")
