"""Starts a thread where no lock may be taken."""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable

__all__ = ["run_in_thread"]


def run_in_thread(act: Callable[[], object]) -> None:
    """The garbage collector may call this anywhere."""
    try:
        _thread.start_new_thread(_start_thread, (act,))
    except RuntimeError:
        pass  # the interpreter ends


def _start_thread(act: Callable[[], object]) -> None:
    # a thread that `threading` knows nothing of would stay in its list for ever
    threading.Thread(target=act, name="skyward-release", daemon=True).start()
