"""While a machine is set up, its lease is renewed."""

from __future__ import annotations

import os
from pathlib import Path

from skyward.api.shell import Access, SshTarget
from skyward.setup.hosts import during_setup
from skyward.setup.local_shell import LocalShell
from tests.support.waiting import until


def test_the_lease_is_renewed_as_soon_as_we_are_in(tmp_path: Path) -> None:
    """SEC-31: it counts from the boot, which may have taken nearly all of it."""
    lease = tmp_path / "lease"
    lease.touch()
    os.utime(lease, (0, 0))
    access = Access(lease=3600, lease_file=str(lease))
    with during_setup(LocalShell(), SshTarget("nowhere"), access, lambda text: None):
        until(lambda: lease.stat().st_mtime > 0)
