"""Calls on this computer: which node gets them, links to nodes, and how calls end."""

__all__: list[str] = []
