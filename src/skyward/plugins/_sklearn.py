"""scikit-learn on a pool: its packages on the nodes, and the joblib backend that its `n_jobs` goes through."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from skyward.api.plugin import Plugin
from skyward.plugins._joblib import install, joblib

__all__ = ["sklearn"]


def sklearn(version: str | None = None, *, max_inflight: int | None = None, progress: bool = True) -> Plugin:
    """scikit-learn on the nodes, and every `n_jobs` of it sent there while the pool is open.

    Args:
        version: a number or a constraint such as ">=1.5". Default: this computer's version.
        max_inflight: how many batches are with the nodes at a time, at most. Default: as many as keep them busy.
        progress: whether to show how many tasks are done, how many a second, and the time left. Default: yes.
    """
    packages = {"scikit-learn": version, "joblib": None}
    return replace(
        joblib(max_inflight=max_inflight, progress=progress), name="sklearn", transform=partial(install, packages)
    )
