"""What goes on beside the setting up of a machine: its lease is renewed, and its provider's own wishes are seen to."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager

from skyward.errors import SkywardError
from skyward.shell import Access, Shell, SshTarget

__all__ = ["tended"]

_FAILURES = (SkywardError, OSError, subprocess.TimeoutExpired)


@contextmanager
def tended(shell: Shell, target: SshTarget, access: Access, tell: Callable[[str], None]) -> Generator[None]:
    """Tends a machine that has let us in; at the end its provider has had what it wanted, or `tell` was told why not.

    The lease is renewed until then; from there on the machine's keeper does it.
    """
    over = threading.Event()
    renewing = threading.Thread(target=_renew, args=(shell, access, over), name="skyward-lease", daemon=True)
    settling = threading.Thread(target=_settle, args=(shell, target, access, tell), name="skyward-settle", daemon=True)
    renewing.start()
    settling.start()
    try:
        yield
    finally:
        settling.join()
        over.set()


def _renew(shell: Shell, access: Access, over: threading.Event) -> None:
    """Keeps a machine that ends itself when nobody touches a file from doing so."""
    while access.lease_file is not None and not over.wait(access.lease / 4):
        try:
            shell.run(["touch", access.lease_file], timeout=10)
        except _FAILURES:
            continue  # setting up finds out by itself that the machine is gone


def _settle(shell: Shell, target: SshTarget, access: Access, tell: Callable[[str], None]) -> None:
    if access.settle is None:
        return
    try:
        text = access.settle(shell, target)
    except _FAILURES as exc:
        text = str(exc).partition("\n")[0]
    if text:
        tell(text)
