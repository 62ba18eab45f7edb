"""Machines from EC2; `provider.py` puts the parts together."""

__all__: list[str] = []
