"""The errors that all others build on, and what the lowest layers raise; users find them in `skyward.errors`."""

from __future__ import annotations

__all__ = ["InvalidArgument", "MissingPackage", "SkywardError"]


class SkywardError(Exception):
    """Base of every error that Skyward itself raises."""


class InvalidArgument(SkywardError, ValueError):
    """A value that cannot work, found before anything was started."""


class MissingPackage(SkywardError, ImportError):
    """An optional package that this computer lacks; the message says how it is installed."""
