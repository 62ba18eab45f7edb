"""Pods of a Kubernetes cluster; `provider.py` puts the parts together."""

__all__: list[str] = []
