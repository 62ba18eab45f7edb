"""Runs the peers' own tests on our backend: `python tests/peers/run.py`, one after the other."""

from __future__ import annotations

import sys

import run_joblib
import run_sklearn

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(max(run_joblib.main(), run_sklearn.main()))
