"""Calls on this computer: which node gets them, the links to the nodes, and how each call ends."""

__all__: list[str] = []
