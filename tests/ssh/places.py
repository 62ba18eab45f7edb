"""What tests on hosts share: how to reach them, and what may be left there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import skyward as sky
from tests.support.hosts import Host, HostSpec, Network

__all__ = ["CACHE", "OURS", "TORCH", "left", "ours", "reached", "specs", "torch_plugin"]

CACHE = "/run/cache"
TORCH = sky.Image(pip=["torch==2.13.0", "numpy"])
OURS = ("skyward.node.keeper", "skyward.node.fork_server", "skyward.node.runner", "skyward.node.steward")


def ours(host: Host) -> list[str]:
    """Processes of Skyward's on a host."""
    lines = [f"{p.pid} {' '.join(p.argv)}" for p in host.processes()] if host.alive else []
    return [line for line in lines if any(name in line for name in OURS)]


def left(host: Host) -> list[str]:
    """Files that a pool should have taken along."""
    listing = f"ls {CACHE}/pools /dev/shm; ls -a /tmp | grep -i skyward || true"
    found = host.run(["sh", "-c", listing], user="sky").stdout
    return [line for line in found.splitlines() if line and not line.endswith(":")]


def specs(cache: Path, count: int = 3, **options: Any) -> list[HostSpec]:
    """Hosts that share what they install."""
    setenv = {"SKYWARD_CACHE": CACHE, **options.pop("setenv", {})}
    return [HostSpec(share={CACHE: cache}, setenv=setenv, **options)] * count


def reached(net: Network, count: int | None = None, **options: Any) -> sky.SSH:
    """The provider for a network's hosts."""
    hosts = [host.address for host in net][:count]
    return sky.SSH(hosts=hosts, user="sky", key=str(net.key), known_hosts=str(net.known_hosts), **options)


def torch_plugin(**options: Any) -> sky.Plugin:
    """The plugin for images that have torch: without the index of its own, which need not be reachable from hosts."""
    return replace(sky.plugins.torch(**options), transform=None)
