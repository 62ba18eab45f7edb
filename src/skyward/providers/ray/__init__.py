"""Nodes of a Ray cluster; `provider.py` puts the parts together."""

__all__: list[str] = []
