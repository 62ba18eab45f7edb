"""A pytest plugin: one pool for the session, and joblib's process backends replaced by ours in the peers' tests.

`peers.run` loads it and tells it in the environment what to skip: a JSON object of {part of a test's id: reason}.
"""

from __future__ import annotations

import json
import os
from contextlib import ExitStack

import joblib
import pytest

import skyward as sky
from skyward.plugins._joblib import register

__all__: list[str] = []

PROCESS_BACKENDS = {"loky", "multiprocessing", "skyward"}
NAMES = {"backend", "parent_backend", "outer_backend"}

_stack = ExitStack()


def pytest_configure(config: pytest.Config) -> None:
    worker = sky.Worker(concurrency=2, executor="process")
    pool = _stack.enter_context(sky.ComputePool(nodes=2, worker=worker, console=False))
    register()
    if os.environ["SKYWARD_PEERS_ACTIVE"] == "1":
        _stack.enter_context(sky.integrations.joblib_backend(pool))
        _stack.enter_context(joblib.parallel_config(n_jobs=-1))  # tests that leave n_jobs out go through the pool too


def pytest_unconfigure(config: pytest.Config) -> None:
    _stack.close()


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Where a test is run on joblib's process backends, run it on ours instead."""
    marks = metafunc.definition.own_markers
    for index, mark in enumerate(marks):
        if mark.name != "parametrize" or mark.args[0] not in NAMES:
            continue
        if PROCESS_BACKENDS.intersection(v for v in mark.args[1] if isinstance(v, str)):
            marks[index] = pytest.mark.parametrize(mark.args[0], ["skyward"], **mark.kwargs).mark


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reasons: dict[str, str] = json.loads(os.environ["SKYWARD_PEERS_SKIP"])
    for item in items:
        for part, reason in reasons.items():
            if part in item.nodeid:
                item.add_marker(pytest.mark.skip(reason=reason))
