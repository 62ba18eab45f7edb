"""Nodes of a Slurm cluster; `provider.py` puts the parts together."""
