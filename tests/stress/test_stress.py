"""Real pools under stress, by a seed: calls end, results are right, no body starts too often, no slot is lost.

SKYWARD_STRESS_SECONDS    for all modes together; 30 unless given, 900 in `make soak`
SKYWARD_STRESS_LIMIT      seconds within which a call has to end; 60 unless given
SKYWARD_STRESS_SEED       the seed of an earlier run: the same calls and faults, at about the same moments
"""

from __future__ import annotations

import os
import random
import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

import skyward as sky
from tests.stress.modes import MODES, Mode
from tests.stress.report import report
from tests.stress.trial import Failed, Trial, within
from tests.support.leftovers import leftover_files, leftover_processes
from tests.support.waiting import until

SECONDS = float(os.environ.get("SKYWARD_STRESS_SECONDS", "30")) / len(MODES)
LIMIT = float(os.environ.get("SKYWARD_STRESS_LIMIT", "60"))
SEED = os.environ.get("SKYWARD_STRESS_SEED") or secrets.token_hex(4)


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    until(lambda: not leftover_processes())
    assert leftover_files() == []


@pytest.mark.timeout(SECONDS + 8 * LIMIT + 120)
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name.replace(" ", "-"))
def test_every_call_ends_and_no_slot_is_lost(mode: Mode, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    rounds = calls = 0
    with mode.beside():
        while not rounds or time.monotonic() - began < SECONDS:
            with ExitStack() as opened:
                trials = [_open(opened, mode, tmp_path / f"{rounds}-{number}") for number in range(mode.pools)]
                for _ in range(mode.rounds):
                    rounds += 1
                    _round(mode, trials, rounds)
                    if time.monotonic() - began >= SECONDS:
                        break
            for trial in trials:
                trial.check_starts()
                calls += trial.calls
    with capsys.disabled():
        print(f" {rounds} rounds, {calls} calls", end="", flush=True)


def _open(opened: ExitStack, mode: Mode, directory: Path) -> Trial:
    directory.mkdir()
    pool = opened.enter_context(sky.ComputePool(nodes=2, grace=2, console=False, **mode.options))
    trial = Trial(pool, directory, LIMIT, mode.rough)
    trial.check()
    return trial


def _round(mode: Mode, trials: list[Trial], number: int) -> None:
    for index, trial in enumerate(trials):
        trial.rng = random.Random(f"{SEED} {mode.name} {number} {index}")

    def act(trial: Trial) -> None:
        mode.round(trial)
        trial.check()

    try:
        if len(trials) == 1:
            act(trials[0])
            return
        within(4 * LIMIT, "a round in several pools", lambda: _together(act, trials))
    except Exception as exc:
        where = f"mode {mode.name!r}, round {number}, SKYWARD_STRESS_SEED={SEED}"
        print(f"{where}: {exc}", *(report(trial.pool) for trial in trials), sep="\n")
        raise Failed(f"{where}: {exc}") from exc


def _together(act: Callable[[Trial], None], trials: list[Trial]) -> None:
    with ThreadPoolExecutor(len(trials)) as threads:
        list(threads.map(act, trials))
