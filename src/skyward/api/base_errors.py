"""The errors that all others build on, and what the lowest layers raise; users find them in `skyward.errors`."""

from __future__ import annotations

__all__ = ["InvalidArgument", "MissingPackage", "SkywardError"]

_LONGEST = 400


class SkywardError(Exception):
    """Base of every error that Skyward itself raises."""

    def __repr__(self) -> str:
        first = str(self).partition("\n")[0]
        return f"{type(self).__name__}({first if len(first) <= _LONGEST else first[:_LONGEST] + '...'!r})"


class InvalidArgument(SkywardError, ValueError):
    """A value that cannot work, found before anything was started."""


class MissingPackage(SkywardError, ImportError):
    """An optional package that this computer lacks; the message says how it is installed."""
