"""Frameworks on a pool: one file per plugin, each a function that returns a Plugin."""

from typing import Any

from skyward import extensions
from skyward.plugins._huggingface import huggingface
from skyward.plugins._jax import jax
from skyward.plugins._joblib import joblib, sklearn
from skyward.plugins._keras import keras
from skyward.plugins._torch import torch

__all__ = ["huggingface", "jax", "joblib", "keras", "sklearn", "torch"]


def __getattr__(name: str) -> Any:
    found = {} if name.startswith("_") else extensions.found("plugins")
    if name not in found:
        known = f"; there are {', '.join(sorted(found))}" if found else ""
        raise AttributeError(f"module 'skyward.plugins' has no plugin {name!r}{known}")
    return found[name].load()
