"""One open pool for two things: your own calls, and for a while the searches of scikit-learn."""

import argparse
import os

from sklearn.datasets import load_iris
from sklearn.model_selection import GridSearchCV
from sklearn.neighbors import KNeighborsClassifier

import skyward as sky


@sky.compute
def process() -> int:
    """Which process this is."""
    return os.getpid()


def main() -> None:
    """Search on a pool that is open already, and go on using it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--provider", choices=["local"], default="local")
    parser.add_argument("--nodes", type=int, default=2)
    args = parser.parse_args()

    data, kinds = load_iris(return_X_y=True)
    search = GridSearchCV(KNeighborsClassifier(), {"n_neighbors": [1, 3, 5, 9]}, cv=5, n_jobs=-1)
    provider = {"local": sky.Local}[args.provider]()
    with sky.ComputePool(provider=provider, nodes=args.nodes) as pool:
        with sky.integrations.sklearn_backend(pool):
            search.fit(data, kinds)
        processes = process() @ pool  # the pool is still open

    print(f"best: {search.best_params_}, accuracy {search.best_score_:.3f}, found by {len(processes)} nodes")
    if os.getpid() in processes or search.best_score_ < 0.9:
        raise SystemExit("something is wrong: the calls stayed here, or found nothing")


if __name__ == "__main__":
    main()
