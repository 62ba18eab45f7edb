"""Nodes of a Slurm cluster; `provider.py` puts the parts together."""

__all__: list[str] = []
