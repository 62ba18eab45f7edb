"""Thousands of pools in virtual time: every call ends exactly once, no body runs too often, nothing is kept for ever.

SKYWARD_SIM_SEEDS says how many (`seeds.EVERY_DAY` unless given; `make soak` runs more), SKYWARD_SIM_FIRST where to
begin. A seed that fails is replayed with its trace by `python -m tests.simulation SEED`.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from tests.simulation.mutations import MUTATIONS, PLACES
from tests.simulation.seeds import EVERY_DAY, outcome, run_all
from tests.simulation.world import World

SEEDS = int(os.environ.get("SKYWARD_SIM_SEEDS", EVERY_DAY))
FIRST = int(os.environ.get("SKYWARD_SIM_FIRST", "0"))
ENOUGH = 500  # within so many seeds every mutation is found


@pytest.mark.parametrize(("places", "seeds"), [(1, SEEDS), (2, SEEDS // 3)])
def test_every_promise_holds_for_every_seed(places: int, seeds: int) -> None:
    """The contract of faults.md, rows N18 and N19: 0 hangs, 0 executions too many; `places` ranks a node."""
    text = run_all(FIRST, seeds, places)
    if text:
        seed = int(text.split()[1].rstrip(":"))
        world = World(seed, trace=True, places=places)
        try:
            world.run()
        except Exception:
            pass  # it is told below, with its trace
        trace = "\n".join(list(world.trace or ())[-200:])
        pytest.fail(f"{text}\n\n{trace}\n\nReplay it: python -m tests.simulation {seed} --places {places}")


def test_the_page_for_maintainers_says_how_many_seeds_are_run() -> None:
    page = (Path(__file__).parents[2] / "docs/architecture.md").read_text()
    for figure in (f"{EVERY_DAY} seeds", f"{EVERY_DAY // 3} with two", f"{ENOUGH} seeds"):
        assert figure in page, f"docs/architecture.md does not say {figure}"


def test_a_seed_replays_exactly() -> None:
    def traced(seed: int) -> list[str]:
        world = World(seed, trace=True)
        world.run()
        names = {call.id: f"call {index}" for index, call in enumerate(world.calls)}
        lines = [line.partition(" at 0x")[0] for line in world.trace or ()]
        for call_id, name in names.items():
            lines = [line.replace(call_id, name) for line in lines]
        return lines

    assert traced(17) == traced(17)


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_mistake_in_the_logic_is_found(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulation can fail: each of these mistakes is found within a stated number of seeds."""
    logging.disable(logging.CRITICAL)
    try:
        MUTATIONS[mutation](monkeypatch)
        places = PLACES.get(mutation, 1)
        assert any(outcome(seed, places) for seed in range(ENOUGH)), f"{mutation}: not found in {ENOUGH} seeds"
    finally:
        logging.disable(logging.NOTSET)
