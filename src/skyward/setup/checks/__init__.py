"""Finds problems on hosts before a pool is opened there; nothing is changed on them."""

__all__: list[str] = []
