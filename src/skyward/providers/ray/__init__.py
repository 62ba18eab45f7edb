"""Nodes of a Ray cluster; `provider.py` puts the parts together."""

from skyward.providers.ray.provider import Ray

__all__ = ["Ray"]
