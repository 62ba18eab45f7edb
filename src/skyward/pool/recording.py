"""What a pool remembers: `pool.history()` and `pool.trace(path)`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from skyward.errors import InvalidArgument

if TYPE_CHECKING:
    from skyward.history.history import History
    from skyward.history.recorder import Recorder

__all__ = ["Recorded"]


class Recorded:
    """The part of a pool that reads what was recorded of it."""

    name: str
    _recorder: Recorder | None = None

    def history(self) -> History:
        """What has happened in this pool so far: its calls, output, metrics; also after it was closed.

        It is kept on this computer for thirty days, and `sky history` lists it.
        """
        from skyward.history.history import read
        from skyward.history.store import find

        recorder = self._recorder
        if recorder is None:
            raise InvalidArgument(
                f"there is no history of {self.name}: it was not opened yet, or none is kept (history=False, "
                "or SKYWARD_HISTORY=off, or a home that cannot be written)."
            )
        recorder.flush()
        return read(find(recorder.id, recorder.root))

    def trace(self, path: str | os.PathLike[str]) -> None:
        """Writes what has happened so far to `path`, as a trace for https://ui.perfetto.dev and chrome://tracing."""
        self.history().trace(path)
