"""scikit-learn on a real pool: searches and ensembles equal to a local run, with the fits on the nodes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.datasets import make_classification
from sklearn.ensemble import RandomForestClassifier, StackingClassifier
from sklearn.experimental import enable_halving_search_cv  # noqa: F401 - makes HalvingGridSearchCV importable
from sklearn.feature_selection import RFECV
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import (
    GridSearchCV,
    HalvingGridSearchCV,
    RandomizedSearchCV,
    cross_val_predict,
    cross_val_score,
)
from sklearn.svm import SVC
from sklearn.tree import DecisionTreeClassifier

import skyward as sky

X, y = make_classification(n_samples=240, n_features=8, n_informative=4, random_state=3)
GRID = {"C": [0.1, 1, 10], "kernel": ["linear", "rbf"]}


@pytest.fixture(scope="module")
def pool() -> Iterator[sky.ComputePool]:
    with sky.integrations.ScikitLearnPool(nodes=2, concurrency=2, console=False) as opened:
        yield opened


class Where(ClassifierMixin, BaseEstimator):
    """An estimator that scores by the process it was fitted in."""

    def __init__(self, number: int = 0) -> None:
        self.number = number

    def fit(self, X: Any, y: Any) -> Where:
        self.classes_ = np.unique(y)
        self.pid_ = os.getpid()
        self.writeable_ = X.flags.writeable
        return self

    def predict(self, X: Any) -> Any:
        return np.zeros(len(X))

    def score(self, X: Any, y: Any) -> float:
        return float(self.pid_)


def same_results(here: dict[str, Any], there: dict[str, Any]) -> None:
    """All of cv_results_ but the times."""
    assert here.keys() == there.keys()
    for key in here:
        if not key.endswith("_time"):
            assert np.asarray(here[key], object).tolist() == np.asarray(there[key], object).tolist(), key


@pytest.mark.parametrize(
    "search",
    [
        GridSearchCV(SVC(random_state=0), GRID, cv=5),
        RandomizedSearchCV(SVC(random_state=0), {"C": np.logspace(-2, 2, 20)}, n_iter=6, cv=3, random_state=0),
        HalvingGridSearchCV(SVC(random_state=0), GRID, cv=3, random_state=0),
    ],
    ids=lambda search: type(search).__name__,
)
def test_a_search_equals_a_local_one(pool: sky.ComputePool, search: Any) -> None:
    """S0-47, S0-48."""
    here = search.set_params(n_jobs=1).fit(X, y)
    best, score, results = here.best_params_, here.best_score_, here.cv_results_
    there = search.set_params(n_jobs=-1).fit(X, y)
    assert (best, score) == (there.best_params_, there.best_score_)
    same_results(results, there.cv_results_)


def test_scores_equal_local_ones(pool: sky.ComputePool) -> None:
    """S0-47."""
    tree = DecisionTreeClassifier(random_state=1)
    assert list(cross_val_score(tree, X, y, cv=5)) == list(cross_val_score(tree, X, y, cv=5, n_jobs=-1))
    assert list(cross_val_predict(tree, X, y)) == list(cross_val_predict(tree, X, y, n_jobs=-1))


def test_selected_features_equal_local_ones(pool: sky.ComputePool) -> None:
    """S0-47."""
    here = RFECV(LogisticRegression(), cv=3).fit(X, y)
    there = RFECV(LogisticRegression(), cv=3, n_jobs=-1).fit(X, y)
    assert list(here.ranking_) == list(there.ranking_)
    same_results(here.cv_results_, there.cv_results_)


def test_ensembles_equal_local_ones(pool: sky.ComputePool) -> None:
    """S0-47: any estimator with n_jobs."""
    here = RandomForestClassifier(n_estimators=12, random_state=2).fit(X, y)
    there = RandomForestClassifier(n_estimators=12, random_state=2, n_jobs=-1).fit(X, y)
    assert np.array_equal(here.predict_proba(X), there.predict_proba(X))
    parts = [("tree", DecisionTreeClassifier(random_state=0)), ("svc", SVC(random_state=0))]
    local = StackingClassifier(parts, LogisticRegression(), cv=3).fit(X, y)
    spread = StackingClassifier(parts, LogisticRegression(), cv=3, n_jobs=-1).fit(X, y)
    assert np.array_equal(local.predict_proba(X), spread.predict_proba(X))


def test_the_fits_happen_on_the_nodes(pool: sky.ComputePool) -> None:
    """S0-49: the scores are the numbers of the processes that fitted."""
    scores = cross_val_score(Where(), X, y, cv=8, n_jobs=-1)
    assert os.getpid() not in scores
    assert len(set(scores)) > 1


def test_a_large_table_travels_once_for_all_fits(pool: sky.ComputePool) -> None:
    """S0-48: thirty fits, one blob of X."""
    blobs = pool._store._index._blobs
    held = set(blobs)
    wide = np.random.default_rng(0).normal(size=(4_000, 50))
    labels = np.arange(4_000) % 2
    search = GridSearchCV(Where(), {"number": list(range(10))}, cv=3, refit=False, n_jobs=-1).fit(wide, labels)
    assert len(search.cv_results_["params"]) == 10
    assert [blobs[name][1] for name in set(blobs) - held] == [wide.nbytes]


def test_pandas_tables_work(pool: sky.ComputePool) -> None:
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame(X, columns=[f"f{i}" for i in range(8)])
    tree = DecisionTreeClassifier(random_state=1)
    assert list(cross_val_score(tree, table, y, n_jobs=-1)) == list(cross_val_score(tree, table, y))


def test_a_fit_that_fails_raises_as_it_would_here(pool: sky.ComputePool) -> None:
    with pytest.raises(ValueError, match="All the 5 fits failed"):
        GridSearchCV(SVC(), {"C": [-1]}, n_jobs=-1).fit(X, y)
    assert cross_val_score(SVC(), X, y, n_jobs=-1).shape == (5,)


def test_the_plugin_adds_scikit_learn_and_joblib() -> None:
    """S0-46, S1-28, T10."""
    import joblib
    import sklearn

    cluster = sky.Cluster("p", 1, sky.Worker(), sky.Spec())
    image = sky.Image(includes=["a"], pip=["pandas"])
    made = sky.plugins.sklearn().transform(image, cluster)  # type: ignore[misc]
    assert made.pip[:3] == ("pandas", f"scikit-learn=={sklearn.__version__}", f"joblib=={joblib.__version__}")
    assert made.includes == ("a",)
    assert "scikit-learn>=1.5" in sky.plugins.sklearn(">=1.5").transform(image, cluster).pip  # type: ignore[misc]
    pool = sky.integrations.ScikitLearnPool(nodes=2, concurrency=3, sklearn_version="1.7", vcpus=4)
    assert [p.name for p in pool.plugins] == ["sklearn"]
    assert (pool.nodes, pool.worker) == (2, sky.Worker(3, "process"))


def test_an_open_pool_takes_a_search() -> None:
    """S0-50, S0-51: on a pool of the user's own."""
    with sky.ComputePool(provider=sky.Local(), nodes=2, console=False) as mine:
        with sky.integrations.sklearn_backend(mine):
            there = GridSearchCV(SVC(), GRID, cv=3, n_jobs=-1).fit(X, y)
        assert mine.is_active
    same_results(GridSearchCV(SVC(), GRID, cv=3).fit(X, y).cv_results_, there.cv_results_)
