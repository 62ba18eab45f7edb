"""Reaches machines with the OpenSSH program."""

__all__: list[str] = []
