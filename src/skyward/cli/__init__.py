"""The `sky` command: one file per command, assembled by `main.py`."""

from skyward.cli.main import main

__all__ = ["main"]
