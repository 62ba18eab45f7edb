"""Runs something in a forked child of the tests' own process."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable

__all__ = ["run_forked"]


def run_forked(act: Callable[[], object]) -> int:
    """Forks, runs `act` in the child, and returns the child's exit status: 0 if nothing was raised."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX, and Python from 3.12 on, warn of a fork beside threads
        child = os.fork()
    if child == 0:
        status = 1
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(60)  # a lock that another thread held at the fork is held for ever
        try:
            act()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
