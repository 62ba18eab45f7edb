"""Pools on hosts that are not closed by their program: the hosts are left as they were."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ssh.places import left, ours
from tests.support import late
from tests.support.hosts import Network
from tests.support.waiting import until


@pytest.mark.parametrize("what", late.PROGRAMS)
def test_a_pool_that_a_program_does_not_close_leaves_nothing_on_hosts(net: Network, tmp_path: Path, what: str) -> None:
    hosts = [host.address for host in net][:2]
    provider = f"sky.SSH(hosts={hosts!r}, user='sky', key={str(net.key)!r}, known_hosts={str(net.known_hosts)!r})"
    late.check(what, *late.finished(tmp_path / "program.py", what, provider))
    until(lambda: not any(ours(host) for host in net), 10, [ours(host) for host in net])
    until(lambda: not any(left(host) for host in net), 10, [left(host) for host in net])
