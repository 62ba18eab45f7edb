"""Machines that join by themselves: the pool prints a command to run on them."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyward.api.checks import check_path, check_port
from skyward.api.image import check_number
from skyward.api.provider import Lease, Machine, Offer, Provider, Report
from skyward.api.shell import Access, SshTarget
from skyward.api.spec import Spec
from skyward.api.usage_errors import corrects
from skyward.errors import InvalidArgument
from skyward.machines.ledger import pool_dir
from skyward.node import join_notice
from skyward.providers.ssh import login_target
from skyward.setup.joined.arrivals import Arrivals, JoinedLease, join_file, open_arrivals
from skyward.transport import private

__all__ = ["Join"]


@corrects(
    {
        **dict.fromkeys(("host", "address"), '`addresses=["..."]`'),
        **dict.fromkeys(("wait", "timeout"), "`sky.ComputePool(provider=sky.Join(), provision_timeout=seconds)`"),
    }
)
@dataclass(frozen=True)
class Join(Provider):
    """Machines on which you, or any scheduler, run a command that the pool prints; it waits until they have joined.

    The command is `python3 FILE`. The pool writes FILE, a program without dependencies, with a secret: give it to
    nobody else. Machines with Skyward can run `sky join --file FILE` instead. To replace a lost machine, run the
    command once more, on any machine: it gets a place 20 s after the loss.

    Args:
        nodes: how many machines are waited for. Default: 1.
        login: a host that both you and the machines reach, such as "user@login.example.org", if the machines cannot
            connect to this computer. You reach it by ssh. Default: none, the machines connect to this computer.
        port: the port at which they connect, of this computer or the login host, for firewalls that let only some
            through. Default: 0, any that is free.
        addresses: the names or addresses by which machines reach this computer, or the login host. Default: all that
            it has.
        file: where FILE is written, such as a directory that all machines see. Default: among Skyward's own files.
        lease: how many seconds machines continue without hearing from this computer. Default: 900.
    """

    nodes: int = 1
    login: str | SshTarget | None = None
    port: int = 0
    addresses: Sequence[str] = ()
    file: str | os.PathLike[str] | None = None
    lease: float = 900.0

    def __post_init__(self) -> None:
        check_number("nodes", self.nodes)
        check_number("lease", self.lease, whole=False)
        check_port(self.port)
        if self.file is not None:
            check_path("file", self.file, 'sky.Join(file="~/join.py")')
        if isinstance(self.addresses, str):
            raise InvalidArgument(f"addresses={self.addresses!r} is one address; expected a list, even for one.")
        object.__setattr__(self, "addresses", tuple(self.addresses))
        login_target(self.login)

    @property
    def default_nodes(self) -> int:
        return self.nodes

    @property
    def access(self) -> Access:
        return Access(lease=self.lease, notices=join_notice.wait, detaches=True)

    @property
    def elastic(self) -> bool:
        return True

    def offers(self, spec: Spec, count: int) -> Iterable[Offer]:
        return [Offer("1 machine that joins" if count == 1 else f"{count} machines that join")]

    def acquire(self, spec: Spec, pool: str, count: int, timeout: float, report: Report) -> Lease:
        arrivals = open_arrivals(
            pool,
            ttl=spec.ttl,
            lease=self.lease,
            relay=login_target(self.login),
            port=self.port,
            advertise=self.addresses,
            interchangeable=True,
        )
        path = pool_dir(pool) / "join.py" if self.file is None else Path(os.path.expanduser(self.file)).absolute()
        lease = _JoinLease(self, arrivals, path)
        try:
            write_file(arrivals.text, path)
            self._tell(path, count)
            waiting = arrivals.wait(range(count), time.monotonic() + timeout, report, least=spec.min_nodes)
            lease.machines = tuple(waiting)
            return lease
        except BaseException:
            lease.close(report)
            raise

    def _tell(self, path: Path, count: int) -> None:
        where = "on a machine" if count == 1 else f"on {count} machines"
        quoted = shlex.quote(str(path))
        text = (
            f"To join this pool, run {where}:\n"
            f"    python3 {quoted}\n"
            f"or, where Skyward is installed:\n"
            f"    sky join --file {quoted}\n"
            "The file holds a secret: copy it only to machines that are to join.\n"
        )
        print(text, end="", file=sys.stderr, flush=True)


def write_file(text: str, path: Path) -> None:
    """With the secret; refused where others could put another program."""
    try:
        private.make(path.parent)
    except private.NotPrivate as exc:
        raise InvalidArgument(
            f"the file {path} cannot be kept safe: {exc}. Another user could put a program in its place, which you "
            'would run on your machines. Name a directory of your own: sky.Join(file="~/join.py").'
        ) from None
    path.unlink(missing_ok=True)  # of a pool that was killed
    with open(path, "x", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(join_file(text))


class _JoinLease(JoinedLease):
    def __init__(self, provider: Provider, arrivals: Arrivals, path: Path) -> None:
        super().__init__(provider, arrivals)
        self._path = path

    def more(self, spec: Spec, count: int, timeout: float, report: Report) -> Sequence[Machine]:
        """Replaces machines that were lost, or did not come in time."""
        waiting = f"waiting for another machine: python3 {self._path}"
        places = self.arrivals.vacant(count)
        return self.arrivals.wait(places, time.monotonic() + timeout, report, failed=lambda: report(waiting))

    def way_back(self) -> Mapping[str, Any]:
        """The machine of node 0 connects to this computer for as long as the run has it."""
        first = self.machines[0].joined
        assert first is not None
        self.way = first.place
        return {"join": self.arrivals.kept(first.place)}

    def leave(self) -> None:
        super().leave()
        self._remove_file()

    def close(self, report: Report) -> object:
        self._remove_file()
        return super().close(report)

    def _remove_file(self) -> None:
        self._path.unlink(missing_ok=True)
        directory = pool_dir(self.pool)
        if self._path.parent == directory and directory.exists() and not any(directory.iterdir()):
            directory.rmdir()
