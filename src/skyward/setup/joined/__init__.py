"""Machines that connect to us: where they arrive, who is let in, and the shell by which the rest reaches them."""

__all__: list[str] = []
