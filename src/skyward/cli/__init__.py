"""The `sky` command: one file a command, `main.py` puts them together."""

from skyward.cli.main import main

__all__ = ["main"]
