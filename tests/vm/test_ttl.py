"""A machine with Ubuntu 22.04 that ends itself at the end of its life, whatever else happens."""

from __future__ import annotations

import time

from skyward.api.spec import Spec
from tests.support.cloud import Cloud
from tests.support.leases import returned
from tests.support.waiting import until
from tests.vm.conftest import Figure
from tests.vm.machines import Machines


def test_a_machine_that_nobody_ever_reaches_ends_with_its_ttl(cloud: Cloud, machines: Machines, figure: Figure) -> None:
    """SEC-31: by systemd's own timer, before cloud-init has even finished."""
    machines.release = "22.04"
    provider = cloud.aws(lease=3600)
    held = provider.acquire(Spec(nodes=1, ttl=60), "short")
    began = time.monotonic()
    until(lambda: machines.switched_off == [held.machines[0].id], 900)
    figure("Ubuntu 22.04: from power-on to the end of a ttl of 60 s", time.monotonic() - began)
    returned(held)
