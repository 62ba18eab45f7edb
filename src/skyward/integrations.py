"""Frameworks on a function: decorators that take effect on the node, below `@sky.compute`; pools for one framework.

Also a listener that tells OpenTelemetry of a pool.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from skyward import plugins
from skyward.accelerators import Accelerator
from skyward.api.image import Image
from skyward.api.plugin import Plugin
from skyward.api.provider import Provider
from skyward.api.spec import Allocation, Worker
from skyward.history.telemetry import opentelemetry
from skyward.plugins._huggingface import transformers
from skyward.plugins._jax import decorated as jax
from skyward.plugins._joblib import joblib_backend
from skyward.plugins._keras import decorated as keras
from skyward.plugins._optuna import optuna
from skyward.plugins._torch import decorated as torch
from skyward.pool.pool import ComputePool

__all__ = [
    "JoblibPool",
    "ScikitLearnPool",
    "jax",
    "joblib_backend",
    "keras",
    "opentelemetry",
    "optuna",
    "sklearn_backend",
    "torch",
    "transformers",
]

sklearn_backend = joblib_backend

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        raise AttributeError(f"module 'skyward.integrations' has no {name!r}; there are {', '.join(__all__)}")


def JoblibPool(
    provider: Provider | None = None,
    *,
    nodes: int | None = None,
    concurrency: int | None = None,
    max_inflight: int | None = None,
    progress: bool = True,
    image: Image | None = None,
    accelerator: str | Accelerator | None = None,
    vcpus: float | None = None,
    memory_gb: float | None = None,
    allocation: Allocation = "spot-if-available",
    provision_timeout: float = 3600,
    joblib_version: str | None = None,
    **options: Any,
) -> ComputePool:
    """A pool that joblib's `Parallel` uses while it is open.

    `provider`, `nodes`, `image`, `accelerator`, `vcpus`, `memory_gb`, `allocation` and all other `options` are those of
    `sky.ComputePool`.

    Args:
        concurrency: how many processes each node runs tasks in. Default: 1.
        max_inflight: how many batches are with the nodes at a time, at most. Default: as many as keep them busy.
        progress: whether to show how many tasks are done, how many a second, and the time left. Default: yes.
        provision_timeout: seconds until machines have to run. Default: 3600.
        joblib_version: a number or a constraint such as ">=1.4". Default: this computer's version.
    """
    return _pool(
        plugins.joblib(joblib_version, max_inflight=max_inflight, progress=progress),
        concurrency,
        options,
        provider=provider,
        nodes=nodes,
        image=image,
        accelerator=accelerator,
        vcpus=vcpus,
        memory_gb=memory_gb,
        allocation=allocation,
        provision_timeout=provision_timeout,
    )


def ScikitLearnPool(
    provider: Provider | None = None,
    *,
    nodes: int | None = None,
    concurrency: int | None = None,
    max_inflight: int | None = None,
    progress: bool = True,
    image: Image | None = None,
    accelerator: str | Accelerator | None = None,
    vcpus: float | None = None,
    memory_gb: float | None = None,
    allocation: Allocation = "spot-if-available",
    provision_timeout: float = 3600,
    sklearn_version: str | None = None,
    **options: Any,
) -> ComputePool:
    """The same as JoblibPool, with scikit-learn on the nodes.

    `provider`, `nodes`, `image`, `accelerator`, `vcpus`, `memory_gb`, `allocation` and all other `options` are those of
    `sky.ComputePool`.

    Args:
        concurrency: how many processes each node runs tasks in. Default: 1.
        max_inflight: how many batches are with the nodes at a time, at most. Default: as many as keep them busy.
        progress: whether to show how many tasks are done, how many a second, and the time left. Default: yes.
        provision_timeout: seconds until machines have to run. Default: 3600.
        sklearn_version: a number or a constraint such as ">=1.5". Default: this computer's version.
    """
    return _pool(
        plugins.sklearn(sklearn_version, max_inflight=max_inflight, progress=progress),
        concurrency,
        options,
        provider=provider,
        nodes=nodes,
        image=image,
        accelerator=accelerator,
        vcpus=vcpus,
        memory_gb=memory_gb,
        allocation=allocation,
        provision_timeout=provision_timeout,
    )


def _pool(plugin: Plugin, concurrency: int | None, options: dict[str, Any], **named: Any) -> ComputePool:
    """Calls of joblib are Python code that would queue for one interpreter's lock: every slot is a process."""
    if options.get("worker") is None:
        options["worker"] = Worker(concurrency=1 if concurrency is None else concurrency, executor="process")
        concurrency = None
    added = [*options.pop("plugins", ()), plugin]
    return ComputePool(plugins=added, concurrency=concurrency, **named, **options)
