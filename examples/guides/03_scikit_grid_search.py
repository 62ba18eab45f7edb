"""A grid search over a pool: 21 candidates, 5 folds, 105 fits on the nodes, and the result that a local run gives."""

from __future__ import annotations

import argparse
import os

from sklearn.datasets import load_digits
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.svm import SVC

import skyward as sky

PROVIDERS = {"local": sky.Local}
GRID = {"C": [0.01, 0.1, 0.5, 1, 5, 10, 50], "gamma": [0.0005, 0.001, 0.005]}


def main() -> None:
    """Search on the nodes, then show that the best candidate scores the same here."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--provider", choices=PROVIDERS, default="local")
    options.add_argument("--nodes", type=int, default=2)
    args = options.parse_args()

    digits, labels = load_digits(return_X_y=True)
    digits, labels = digits[:600], labels[:600]

    with sky.integrations.ScikitLearnPool(PROVIDERS[args.provider](), nodes=args.nodes, concurrency=2) as pool:
        search = GridSearchCV(SVC(), GRID, cv=5, n_jobs=-1)
        search.fit(digits, labels)
        fits = len(search.cv_results_["params"]) * search.n_splits_
        print(f"{fits} fits on {pool.nodes} x {pool.concurrency} processes, none of them this one ({os.getpid()})")

    print(f"best: {search.best_params_}, accuracy {search.best_score_:.4f}")
    here = cross_val_score(SVC(**search.best_params_), digits, labels, cv=5).mean()
    print(f"the same candidate fitted here: {here:.4f}")
    if abs(here - search.best_score_) > 1e-12:
        raise SystemExit("the nodes and this computer disagree")


if __name__ == "__main__":
    main()
