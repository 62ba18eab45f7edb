"""Frameworks on a function: decorators that take effect on the node, below `@sky.compute`."""

__all__: list[str] = []
