"""What a pool remembers, and its page in the browser: `pool.history()`, `pool.trace(path)`, `pool.view()`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from skyward.api.keywords import corrects_call
from skyward.errors import InvalidArgument

if TYPE_CHECKING:
    from skyward.history.history import History
    from skyward.history.recorder import Recorder
    from skyward.history.store import Entry
    from skyward.view.page.server import PageServer

__all__ = ["PageAddress", "Recorded"]


@dataclass(frozen=True)
class PageAddress:
    """Where a pool's page is; it can be opened once. A notebook shows the page itself."""

    address: str

    def __str__(self) -> str:
        return self.address

    def _repr_html_(self) -> str:
        from html import escape  # few programs are notebooks

        where = escape(self.address, quote=True)
        return f'<iframe src="{where}" style="width:100%;height:720px;border:1px solid #8886"></iframe>'


class Recorded:
    """The part of a pool that reads what was recorded of it."""

    name: str
    _recorder: Recorder | None = None
    _page: tuple[Recorder, PageServer] | None = None

    def history(self) -> History:
        """What has happened in this pool so far: its calls, output, metrics; also after it was closed.

        It is kept on this computer for thirty days, and `sky history` lists it.
        """
        from skyward.history.history import read

        self._recorded().flush()
        return read(self._entry())

    @corrects_call("pool.trace", example='pool.trace("run.json")')
    def trace(self, path: str | os.PathLike[str]) -> None:
        """Writes what has happened so far to `path`, as a trace for https://ui.perfetto.dev and chrome://tracing."""
        self.history().trace(path)

    @corrects_call(
        "pool.view", {"port": "nothing: any port that is free is taken, and is in the address"}, "pool.view()"
    )
    def view(self) -> PageAddress:
        """Shows the pool in the browser: nodes, calls over time, output, metrics, cost; returns the page's address.

        The page is served on loopback by this process, until it ends, also after the pool was closed. The address works
        once; for another tab call this again. From another computer: `ssh -L 8000:127.0.0.1:PORT`, then the same
        address with port 8000.
        """
        from skyward.view.page.server import PageServer

        recorder = self._recorded()
        if self._page is None or self._page[0] is not recorder:
            if self._page is not None:
                self._page[1].close()
            recorder.flush()
            self._page = recorder, PageServer(self._entry(), recorder.flush)
        return PageAddress(self._page[1].address())

    def _show_end(self) -> None:
        """Has pages that are open show that the pool was closed, before the program ends."""
        if self._page is not None and self._page[0] is self._recorder:
            self._page[1].show_end()

    def _recorded(self) -> Recorder:
        if self._recorder is None:
            raise InvalidArgument(
                f"there is no history of {self.name}: it was not opened yet, or none is kept (history=False, "
                "or SKYWARD_HISTORY=off, or a home that cannot be written)."
            )
        return self._recorder

    def _entry(self) -> Entry:
        from skyward.history.store import find

        recorder = self._recorded()
        return find(recorder.id, recorder.root)
