"""While a machine is set up: renews its lease, runs the provider's own step, asks whether the machine still exists."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Protocol

from skyward.api.provider import Machine
from skyward.api.shell import Access, Shell, SshTarget
from skyward.errors import AuthenticationFailed, BootstrapError, HostUnreachable, SkywardError

__all__ = ["MachineWatch", "during_setup", "prepared"]

_INTERVAL = 10.0
_FAILURES = (SkywardError, OSError, subprocess.TimeoutExpired)


@contextmanager
def during_setup(
    shell: Shell, target: SshTarget | None, access: Access, warn: Callable[[str], None]
) -> Generator[Callable[[], None]]:
    """Renews the machine's lease and runs the provider's setup step while the block runs; waits for that step.

    The block gets a function that waits for the step, too. `warn` is told if it fails. After the block the machine's
    keeper renews the lease.
    """
    ended = threading.Event()
    renewing = threading.Thread(target=_renew, args=(shell, access, ended), name="skyward-lease", daemon=True)
    settling = threading.Thread(target=_settle, args=(shell, target, access, warn), name="skyward-settle", daemon=True)
    renewing.start()
    settling.start()
    try:
        yield settling.join
    finally:
        settling.join()
        ended.set()


def _renew(shell: Shell, access: Access, ended: threading.Event) -> None:
    """Touches the file without which the machine shuts itself down; at once, as booting has used up time."""
    while access.lease_file is not None:
        try:
            shell.run(["touch", access.lease_file], timeout=10)
        except _FAILURES:
            pass  # the setup notices by itself if the machine is gone
        if ended.wait(access.lease / 4):
            return


def _settle(shell: Shell, target: SshTarget | None, access: Access, warn: Callable[[str], None]) -> None:
    if access.settle is None or target is None:
        return
    try:
        text = access.settle(shell, target)
    except _FAILURES as exc:
        text = str(exc).partition("\n")[0]
    if text:
        warn(text)


class Knows(Protocol):
    """What a provider knows of machines that do not answer; `machines/replacement.py: Supply`."""

    def unanswered(self, machines: Sequence[Machine]) -> list[str]:
        """Why machines are gone; empty for those that are there."""
        ...

    def who_is_let_in(self) -> str:
        """Whom machines let in, for the message about one that does not answer."""
        ...


def prepared(shell: Shell, id: str, access: Access, warn: Callable[[str], None]) -> dict[str, str]:
    """Variables for all processes on a machine, as the provider says, which prepares it now."""
    if access.prepare is None:
        return {}
    try:
        variables, text = access.prepare(shell, id)
    except _FAILURES as exc:
        variables, text = {}, str(exc).partition("\n")[0]
    if text:
        warn(text)
    return variables


class MachineWatch:
    """Asks the provider whether machines that do not accept our login yet still exist: one question for all."""

    def __init__(self, provider: Knows | None) -> None:
        self._provider = provider
        self._lock = threading.Lock()
        self._waiting: dict[Shell, Machine] = {}
        self._gone: dict[Shell, str] = {}
        self._stopped = threading.Event()

    @contextmanager
    def watching(self, shell: Shell, machine: Machine, login: str = "") -> Generator[None]:
        """Closes the shell if its machine is gone; the error of the block then says so.

        `login` is added to what a user is told of a machine that refuses the login.
        """
        with self._lock:
            if self._provider is not None and not self._waiting:
                self._stopped = threading.Event()
                asking = threading.Thread(target=self._ask, args=(self._provider, self._stopped), name="skyward-watch")
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
            if login and isinstance(exc, AuthenticationFailed):
                raise AuthenticationFailed(exc.step, f"{exc.detail}\n{login}") from exc
            allowed = self._provider.who_is_let_in() if self._provider and isinstance(exc, HostUnreachable) else ""
            if allowed:
                raise HostUnreachable(exc.step, f"{exc.detail}\n{allowed}") from exc
            raise
        finally:
            with self._lock:
                del self._waiting[shell]
                if not self._waiting:
                    self._stopped.set()

    def _ask(self, provider: Knows, stopped: threading.Event) -> None:
        while not stopped.wait(_INTERVAL):
            with self._lock:
                waiting = dict(self._waiting)
            try:
                reasons = provider.unanswered(list(waiting.values()))
            except _FAILURES:
                continue  # it may be our own network that is down
            for shell, reason in zip(waiting, reasons, strict=True):
                if reason:
                    self._gone[shell] = reason
                    shell.close()
