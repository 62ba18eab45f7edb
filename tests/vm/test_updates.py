"""A machine with Ubuntu 22.04 that boots slowly, and on which updates are installed when we arrive."""

from __future__ import annotations

import re
import threading
import time

from skyward import events
from tests.support.cloud import Cloud
from tests.vm.conftest import Figure
from tests.vm.image import BUSY
from tests.vm.machines import Machines
from tests.vm.opening import Opened, login_key, who

DELAY = 60.0


def test_a_slow_boot_and_locks_that_unattended_upgrades_holds_are_waited_for(
    cloud: Cloud, machines: Machines, figure: Figure
) -> None:
    """It gets an address after a minute only; then apt's locks are held until we have said that we wait for them."""
    machines.release, machines.files, machines.dhcp_delay = "22.04", BUSY, DELAY
    opened = Opened(cloud, image={"apt": ["handy"]})
    waited: list[str] = []
    failed: list[Exception] = []

    def let_go() -> None:
        try:
            (machine,) = machines.of.values()
            machine.run("touch /run/let-go", login_key())
        except Exception as exc:  # the test says it
            failed.append(exc)

    def heard(event: events.Event) -> None:
        if isinstance(event, events.NodePhase) and "apt's lock" in event.phase:
            waited.append(event.phase)
            if len(waited) == 1:
                threading.Thread(target=let_go).start()

    opened.pool.on_event(heard)
    with opened:
        (machine,) = machines.of.values()
        assert failed == []
        figure(f"Ubuntu 22.04, address after {DELAY:.0f} s: until sshd answers", machines.answered[machine.instance.id])
        figure("Ubuntu 22.04, the same, updates awaited: until the pool is open", opened.took)
        assert machines.answered[machine.instance.id] > DELAY
        answer = who() >> opened.pool
        assert (answer["user"], 'VERSION_ID="22.04"' in answer["system"]) == ("ubuntu", True)
        found = re.match(r"waiting for process \d+ \((.+)\), which holds apt's lock (\S+)", waited[0])
        assert found is not None, waited
        assert "unattended-upgrade" in found[1]
        versions = machine.run(
            "dpkg-query -W -f '${Package} ${Version} ${db:Status-Status}\n' handy patient", login_key()
        )
        assert versions.splitlines() == ["handy 1 installed", "patient 2 installed"], "both came to their end"
        assert "status: done" in machine.run("cloud-init status --wait --long", login_key(), timeout=600)
        began = time.monotonic()
    figure("Ubuntu 22.04: closing the pool", time.monotonic() - began)
