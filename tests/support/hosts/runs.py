"""Which networks of test hosts exist on this machine: each has a number, a directory and an owner that is alive or not.

The number gives a network its directory, its addresses (10.77.<number>.x) and the name of its link to this machine. A
process holds a number by a socket of that name, which only one process on this machine can have, whatever its user and
its TMPDIR, and which dies with it.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from .machine import HostsError, root

__all__ = ["Run", "claim", "link", "locked", "release", "runs", "sweep"]

_held: dict[int, socket.socket] = {}


@dataclass(frozen=True)
class Run:
    """One network of test hosts, as it is written down in its directory."""

    number: int
    owner: int
    born: int
    stays: bool = False
    """Whether it was made from the command line, to stay until it is told to go."""
    pids: dict[str, int] = field(default_factory=dict[str, int])
    addresses: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def directory(self) -> Path:
        return _base() / str(self.number)

    @property
    def alive(self) -> bool:
        """Whether the process that made it is still there."""
        return _born(self.owner) == self.born

    def write(self) -> None:
        """Writes it down, all at once."""
        part = self.directory / "run.json.part"
        part.write_text(json.dumps(asdict(self)))
        part.rename(self.directory / "run.json")


def link(number: int) -> str:
    """The name, on this machine, of a network's link to it."""
    return f"skyhosts{number}"


def runs() -> list[Run]:
    """All networks that have a directory; what died before it was written down counts as dead."""
    found: list[Run] = []
    for directory in sorted(_base().glob("[0-9]*"), key=lambda path: int(path.name)):
        try:
            found.append(Run(**json.loads((directory / "run.json").read_text())))
        except (OSError, ValueError):
            found.append(Run(int(directory.name), owner=0, born=0))
    return found


def claim(stays: bool = False) -> Run:
    """Takes a number that no other network on this machine has, and makes its directory; sweeps dead ones first."""
    with locked():
        _sweep()
        taken = root(["ip", "-4", "route", "show", "root", "10.77.0.0/16"])
        for number in range(1, 255):
            if f"10.77.{number}.0/24" in taken or (_base() / str(number)).exists() or not _hold(number):
                continue
            if Path(f"/sys/class/net/{link(number)}").exists():  # of a dead network: the kernel takes its time
                release(number)
                continue
            run = Run(number, os.getpid(), _born(os.getpid()), stays)
            run.directory.mkdir(mode=0o711)
            run.directory.chmod(0o711)
            run.write()
            return run
    raise HostsError("All 254 networks of test hosts are in use; run `python -m tests.support.hosts down`.")


def release(number: int) -> None:
    """Lets another network have the number."""
    if held := _held.pop(number, None):
        held.close()


def sweep() -> list[int]:
    """Removes what dead runs have left behind, and nothing of live ones; returns their numbers."""
    with locked():
        return _sweep()


def _hold(number: int) -> bool:
    claimed = socket.socket(socket.AF_UNIX)
    try:
        claimed.bind(f"\0skyward-hosts-{number}")
    except OSError:
        claimed.close()
        return False
    _held[number] = claimed
    return True


def _sweep() -> list[int]:
    dead = [run for run in runs() if not run.alive]
    for run in dead:
        _remove(run)
    for doomed in _base().glob(".[0-9]*-*"):  # what a switch was taking away: see init.py
        if not _is_ours(int(doomed.name.rpartition("-")[2])):
            root(["rm", "-rf", str(doomed)], check=False)
    return [run.number for run in dead]


def _remove(run: Run) -> None:
    alive = [str(pid) for pid in run.pids.values() if _is_ours(pid)]
    if alive:
        root(["kill", "-KILL", *alive], check=False)
    if _hold(run.number):  # else a run with another TMPDIR has the number by now, and the link is its own
        root(["ip", "link", "delete", link(run.number)], check=False)
        release(run.number)
    deadline = time.monotonic() + 60
    while run.directory.exists():  # its last processes may be dying, and its own cleaner be at work
        root(["rm", "-rf", str(run.directory)], check=time.monotonic() > deadline)


def _is_ours(pid: int) -> bool:
    """Whether a process is what was written down and not a later one with its number."""
    try:
        return "tests/support/hosts/init.py" in Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return False


def _born(pid: int) -> int:
    """When a process was started, in ticks since the machine was; 0 for one that is gone or only not yet reaped."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])


def _base() -> Path:
    return Path(tempfile.gettempdir()) / "skyward-hosts"


def _make_base() -> Path:
    base = _base()
    try:
        base.mkdir(mode=0o755)
        base.chmod(0o755)
    except FileExistsError:
        pass
    return base


@contextmanager
def locked() -> Generator[None]:
    """One at a time; the directory itself is the lock, so that nothing is left when the last network is gone."""
    while True:
        base = _make_base()
        try:
            held = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except FileNotFoundError:
            continue  # whoever had it before us was the last one and has removed it
        try:
            if os.fstat(held).st_uid != os.geteuid():
                raise HostsError(f"{base} belongs to somebody else; set TMPDIR to a directory of your own.")
            fcntl.flock(held, fcntl.LOCK_EX)
            if not base.exists() or not os.path.samestat(base.stat(), os.fstat(held)):
                continue
            yield
            if not any(base.iterdir()):
                base.rmdir()
            return
        finally:
            os.close(held)
