"""Frameworks on a pool: one file a plugin, each a function that returns a Plugin."""

from skyward.plugins._huggingface import huggingface
from skyward.plugins._jax import jax
from skyward.plugins._joblib import joblib
from skyward.plugins._keras import keras
from skyward.plugins._sklearn import sklearn
from skyward.plugins._torch import torch

__all__ = ["huggingface", "jax", "joblib", "keras", "sklearn", "torch"]
