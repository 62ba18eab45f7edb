"""What the tests on machines share: pools with the patience that machines without acceleration need, and calls."""

from __future__ import annotations

import getpass
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import skyward as sky
from skyward import events
from skyward.machines.ledger import histories, pool_dir
from tests.support.cloud import Cloud

__all__ = ["LEASE", "Opened", "login_key", "who"]

LEASE = float(os.environ.get("SKYWARD_VM_LEASE", "300"))
"""From cloud-init's first commands until we are in, minutes may pass where a processor is emulated."""
_PATIENCE = 1800.0


@sky.compute
def who() -> dict[str, Any]:
    """Where a call runs."""
    return {
        "host": socket.gethostname(),
        "user": getpass.getuser(),
        "python": sys.version_info[:2],
        "system": Path("/etc/os-release").read_text(),
    }


class Opened:
    """A pool of the test cloud that is entered in a `with`, with what it told and how long it took."""

    def __init__(self, cloud: Cloud, nodes: int = 1, image: dict[str, Any] | None = None, **how: Any) -> None:
        self.seen: list[events.Event] = []
        self.took = 0.0
        # Nobody outside is asked for our address.
        provider = cloud.aws(ssh_timeout=_PATIENCE, lease=LEASE, address_service="http://127.0.0.1:9")
        made = sky.Image(bootstrap_timeout=_PATIENCE, **(image or {}))
        waits: dict[str, Any] = {"provision_timeout": _PATIENCE, "replace": False, "console": "plain", **how}
        self.pool = sky.ComputePool(provider=provider, nodes=nodes, image=made, allocation="spot", **waits)
        self.pool.on_event(self.seen.append)

    def __enter__(self) -> Opened:
        began = time.monotonic()
        self.pool.__enter__()
        self.took = time.monotonic() - began
        return self

    def __exit__(self, *exc: Any) -> None:
        self.pool.__exit__(*exc)

    def told(self, kind: type[events.Event]) -> list[Any]:
        """What it told of one kind."""
        return [event for event in self.seen if isinstance(event, kind)]

    def steps(self) -> list[str]:
        """What it said it does."""
        return [event.phase for event in self.seen if isinstance(event, events.NodePhase)]


def login_key() -> Path:
    """The key that logs in to the machines of the only pool that is open."""
    (history,) = histories()
    return pool_dir(history.pool) / "id_ed25519"
