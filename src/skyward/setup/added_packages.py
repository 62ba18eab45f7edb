"""Packages added while a pool is open: a second environment beside the one that nodes run in.

The first environment is shared with other pools, so it stays unchanged. The added one repeats its packages in the same
versions; calls append its path to `sys.path`.
"""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from skyward.api.context import PoolContext
from skyward.api.image import Image
from skyward.machines.parallel import each
from skyward.setup.env.local import prepare
from skyward.setup.hosts import Host

if TYPE_CHECKING:  # pools on this computer do not need it
    from skyward.setup.env.remote import Packages

__all__ = ["AddedPackages"]


class AddedPackages:
    def __init__(self, context: PoolContext) -> None:
        self._context = context
        self._lock = threading.Lock()
        self._added: dict[str, None] = {}
        self._image: Image | None = None
        self._packages: Packages | None = None
        self._paths: tuple[str, ...] = ()

    def add(self, pip: Sequence[str], hosts: Collection[Host]) -> tuple[str, ...]:
        """Returns one path per node. Does nothing for packages that the nodes already have."""
        with self._lock:
            if self._context.local:
                return self._add_local(pip)
            from skyward.setup.env.remote import Packages

            installed = Packages(self._context.image).installed()
            new = [entry for entry in pip if _project(entry) not in installed and entry not in self._added]
            if new:
                self._context.report(f"adding {', '.join(new)}")
                self._added.update(dict.fromkeys(new))
                self._image = self._context.image.adding(pip=[*self._added, *filter(None, installed.values())])
                self._packages = Packages(self._image)
                unique = list({id(host.keeper): host for host in hosts}.values())
                self._paths = tuple(dict.fromkeys(each(self._make, unique)))
            return self._paths

    def renew(self, host: Host) -> None:
        with self._lock:
            if self._packages is not None:
                self._paths = tuple(dict.fromkeys([*self._paths, self._make(host)]))

    def _add_local(self, pip: Sequence[str]) -> tuple[str, ...]:
        self._added.update(dict.fromkeys(pip))
        made = prepare(self._context.image.adding(pip=self._added), report=self._context.report)
        home = made.env.get("VIRTUAL_ENV")
        return (_site_packages(home),) if home else ()  # without one it is the interpreter of the client

    def _make(self, host: Host) -> str:
        from skyward.setup.env.remote import prepare_host

        assert self._image is not None
        assert self._packages is not None
        shell = host.keeper.shell
        made = prepare_host(
            shell,
            self._image,
            pool=self._context.name,
            deadline=time.monotonic() + self._image.bootstrap_timeout,
            report=lambda text, _: self._context.report(text, host.nodes[0]),
            packages=self._packages,
        )
        shell.run(["rmdir", made.directory], timeout=20)  # the pool has one already
        return _site_packages(made.env["VIRTUAL_ENV"])


def _site_packages(home: str) -> str:
    return f"{home}/lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"


def _project(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    return re.sub(r"[-_.]+", "-", found[0]).lower() if found else requirement
