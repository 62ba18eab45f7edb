"""Machines that connect to us: listening, admission, and the shell that reaches them."""

__all__: list[str] = []
