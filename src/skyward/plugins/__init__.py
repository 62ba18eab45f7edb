"""Frameworks on a pool: one file a plugin, each a function that returns a Plugin."""

__all__: list[str] = []
