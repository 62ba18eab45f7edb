"""Runs the peers' own tests on pools, one part after the other: `python tests/peers/run.py [part ...]`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # for tests.support

import run_accelerate
import run_joblib
import run_keras
import run_sklearn
import run_torch
import run_trainer
from figures import table

__all__: list[str] = []

PARTS = {
    "joblib": run_joblib.main,
    "sklearn": run_sklearn.main,
    "torch": run_torch.main,
    "accelerate": run_accelerate.main,
    "trainer": run_trainer.main,
    "keras": run_keras.main,
}

if __name__ == "__main__":
    found = [PARTS[name]() for name in sys.argv[1:] or PARTS]
    print(f"\n{table(found)}")
    sys.exit(any(each.failures for each in found))
