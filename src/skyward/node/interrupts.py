"""How a body is stopped: an exception raised in its thread, or a signal that only our own process handles."""

from __future__ import annotations

import ctypes
import os
import signal

__all__ = ["keep_handler_out_of_children", "raise_in_thread"]


def raise_in_thread(thread: int, kind: type[BaseException] | None) -> None:
    """Has a thread raise an exception at its next bytecode; None takes back what it has not raised yet."""
    what = ctypes.py_object(kind) if kind is not None else None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), what)


def keep_handler_out_of_children() -> None:
    """Gives processes that a body forks the usual SIGTERM; with ours they would not end when their parent asks."""
    os.register_at_fork(
        before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}),
        after_in_parent=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM}),
        after_in_child=_take_usual_handler,
    )


def _take_usual_handler() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
