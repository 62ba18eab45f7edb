"""What goes on beside the setting up of a machine: its lease is renewed, its provider's own wishes are seen to, and
the provider is asked whether it is still there."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

from skyward.api.provider import Machine
from skyward.api.shell import Access, Shell, SshTarget
from skyward.errors import BootstrapError, SkywardError

__all__ = ["MachineWatch", "during_setup"]

_INTERVAL = 10.0
_FAILURES = (SkywardError, OSError, subprocess.TimeoutExpired)


@contextmanager
def during_setup(shell: Shell, target: SshTarget, access: Access, tell: Callable[[str], None]) -> Generator[None]:
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


class MachineWatch:
    """Asks a provider, while machines do not let us in, whether they are still there: one question for all of them."""

    def __init__(self, ended: Callable[[Sequence[Machine]], list[str]] | None) -> None:
        self._ended = ended
        self._lock = threading.Lock()
        self._waiting: dict[Shell, Machine] = {}
        self._gone: dict[Shell, str] = {}
        self._over = threading.Event()

    @contextmanager
    def over(self, shell: Shell, machine: Machine) -> Generator[None]:
        """While open, the shell is closed if its machine is gone; the error then says so."""
        with self._lock:
            if self._ended is not None and not self._waiting:
                self._over = threading.Event()
                asking = threading.Thread(target=self._ask, args=(self._ended, self._over), name="skyward-watch")
                asking.daemon = True
                asking.start()
            self._waiting[shell] = machine
        try:
            yield
        except BootstrapError as exc:
            if shell in self._gone:
                text = (
                    f"{machine.id}: {self._gone[shell]} before it let us in. Open the pool again for another machine."
                )
                raise BootstrapError("starting", text) from exc
            raise
        finally:
            with self._lock:
                del self._waiting[shell]
                if not self._waiting:
                    self._over.set()

    def _ask(self, ended: Callable[[Sequence[Machine]], list[str]], over: threading.Event) -> None:
        while not over.wait(_INTERVAL):
            with self._lock:
                waiting = dict(self._waiting)
            try:
                reasons = ended(list(waiting.values()))
            except _FAILURES:
                continue  # it may be our own network that is down
            for shell, reason in zip(waiting, reasons, strict=True):
                if reason:
                    self._gone[shell] = reason
                    shell.close()
