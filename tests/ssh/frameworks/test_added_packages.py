"""joblib on a plain pool: what its calls need and the hosts lack is added to them when the first such call is made."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

import numpy as np
import pytest

import skyward as sky
from skyward.plugins._joblib import packages_with
from tests.ssh.places import CACHE, left, reached
from tests.support.hosts import Host, Network
from tests.support.waiting import until


def host_and_sum(values: np.ndarray) -> tuple[str, float]:
    return socket.gethostname(), float(values.sum())


def test_a_search_on_a_plain_pool_finds_scikit_learn_on_the_hosts(whole: Network, cache: Path) -> None:
    """S0-50, S0-51, S0-52, S0-40: the pool was opened without a plugin and without an image."""
    from joblib import Parallel, delayed
    from sklearn.datasets import make_classification
    from sklearn.model_selection import GridSearchCV
    from sklearn.svm import SVC

    X, y = make_classification(n_samples=100, n_features=6, random_state=3)
    grid = {"C": [0.1, 1, 10]}
    here = GridSearchCV(SVC(), grid, cv=3).fit(X, y)
    steps: list[str] = []

    def hear(event: sky.events.Event) -> None:
        if isinstance(event, sky.events.NodePhase) and event.phase.startswith("adding"):
            steps.append(event.phase)

    with sky.ComputePool(provider=reached(whole), nodes=3, console=False) as pool:
        pool.on_event(hear)
        with sky.integrations.sklearn_backend(pool):
            search = GridSearchCV(SVC(), grid, cv=3, n_jobs=-1).fit(X, y)
            found = Parallel(n_jobs=-1, batch_size=1)(delayed(host_and_sum)(np.ones(3)) for _ in range(12))
        assert [total for _, total in found] == [3.0] * 12
        assert {host for host, _ in found} <= {"h0", "h1", "h2"}
        with pytest.raises(ModuleNotFoundError, match="nowhere"):  # of no package that could be added
            Parallel(n_jobs=-1, backend="skyward")([delayed(_Nowhere())(1)])
        if "SKYWARD_SOAK" in os.environ:
            come_back(whole[2], pool, cache)
    assert list(search.cv_results_["mean_test_score"]) == list(here.cv_results_["mean_test_score"])
    assert len(steps) == 1, steps
    assert "scikit-learn==" in steps[0]
    for host in whole:
        assert left(host) == []


def come_back(host: Host, pool: sky.ComputePool, cache: Path) -> None:
    """A machine that was set up again has what was added, too."""
    (path,) = pool._add_packages(packages_with("sklearn"))
    home = cache / Path(path).relative_to(CACHE).parents[2]
    assert (home / "bin" / "python").is_symlink()
    host.kill()
    shutil.rmtree(home)
    host.restart()
    until(lambda: pool.current_nodes() == 3, 180)
    assert (home / "bin" / "python").is_symlink()


class _Nowhere:
    """Becomes an object of a module that no node has."""

    def __call__(self, value: int) -> int:
        return value

    def __reduce__(self) -> object:
        return __import__, ("nowhere",)
