"""Pools on hosts that join by themselves, for tests: who runs the command that a pool prints."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import skyward as sky
from skyward.api.shell import SshTarget
from tests.support.hosts import Host, Network
from tests.support.waiting import until

__all__ = ["join", "joiners", "login", "opened"]


def join(host: Host, content: str, *options: str, **popen: Any) -> subprocess.Popen[Any]:
    """Runs the file of a pool on a host."""
    host.put("/home/sky/join.py", content.encode(), user="sky", mode="600")
    return host.start(["python3", "/home/sky/join.py", *options], **popen)


def joiners(host: Host) -> list[str]:
    """The joiners on a host, and the processes that clean up after them."""
    return [f"{p.pid} {' '.join(p.argv)}" for p in host.processes() if "/home/sky/join.py" in p.argv]


def login(net: Network, host: Host) -> SshTarget:
    """A host as one at which machines are met."""

    return SshTarget(host.address, "sky", key=str(net.key), known_hosts=str(net.known_hosts), config=False)


@contextmanager
def opened(hosts: Iterable[Host], path: Path, **options: Any) -> Iterator[sky.ComputePool]:
    """A pool of these hosts, which run the command as soon as there is one."""
    hosts = list(hosts)
    given = {name: options.pop(name) for name in ("login", "lease", "port", "addresses") if name in options}
    provider = sky.Join(nodes=len(hosts), file=path, **given)
    started: list[subprocess.Popen[Any]] = []

    def run() -> None:
        until(lambda: path.exists() and path.read_text().endswith("main())\n"), 60)
        started.extend(join(host, path.read_text()) for host in hosts)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        with sky.ComputePool(provider=provider, console=False, **options) as pool:
            yield pool
    finally:
        thread.join()
        for process in started:
            process.wait(60)
