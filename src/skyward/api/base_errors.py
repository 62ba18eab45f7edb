"""The two errors that all others build on; users find them in `skyward.errors`."""

from __future__ import annotations

__all__ = ["InvalidArgument", "SkywardError"]


class SkywardError(Exception):
    """Base of every error that Skyward itself raises."""


class InvalidArgument(SkywardError, ValueError):
    """A value that cannot work, found before anything was started."""
