"""The errors that all others build on, and those of the lowest layers; public in `skyward.errors`."""

from __future__ import annotations

import os

__all__ = ["REMOTE", "InvalidArgument", "MissingPackage", "SkywardError", "hide_frames"]

REMOTE = "remote traceback:"
"""Marks the note of an exception that came from a node."""

_LONGEST = 400
_OURS = (
    os.path.join(os.path.dirname(os.path.dirname(__file__)), ""),
    os.path.join(os.path.dirname(os.__file__), "concurrent", "futures", ""),
)


class SkywardError(Exception):
    """Base of every error of Skyward's own."""

    def __repr__(self) -> str:
        first = str(self).partition("\n")[0]
        return f"{type(self).__name__}({first if len(first) <= _LONGEST else first[:_LONGEST] + '...'!r})"


class InvalidArgument(SkywardError, ValueError):
    """A value that cannot work, found before anything was started."""


class MissingPackage(SkywardError, ImportError):
    """An optional package that this computer lacks; the message says how to install it."""


def hide_frames(exc: BaseException) -> None:
    """Drops our frames below the caller's, unless user code is below. Called where users enter."""
    notes = getattr(exc, "__notes__", ())
    if not isinstance(exc, SkywardError) and not any(REMOTE in note for note in notes if isinstance(note, str)):
        return  # it may be a mistake of ours: all frames are needed
    top = exc.__traceback__
    below = top.tb_next if top is not None else None
    while below is not None:
        if not below.tb_frame.f_code.co_filename.startswith(_OURS):
            return
        below = below.tb_next
    if top is not None:
        top.tb_next = None
