"""A machine with Ubuntu 24.04 from its first boot to its end: what a pool does with it, step by step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyward import errors, events
from tests.support.cloud import Cloud
from tests.support.userdata import settings
from tests.support.waiting import until
from tests.vm.conftest import Figure
from tests.vm.machine import Machine
from tests.vm.machines import Machines
from tests.vm.opening import LEASE, Opened, login_key, who


@pytest.fixture(scope="module")
def opened(cloud: Cloud, machines: Machines, figure: Figure) -> Iterator[Opened]:
    """A pool of one machine, open; its machine ends in the last test."""
    with Opened(cloud) as opened:
        (instance,) = cloud.running()
        figure("Ubuntu 24.04: from power-on until sshd answers", machines.answered[instance.id])
        figure("Ubuntu 24.04: from power-on until the pool is open", opened.took)
        yield opened


@pytest.fixture(scope="module")
def machine(opened: Opened, machines: Machines) -> Machine:
    (machine,) = machines.of.values()
    return machine


@pytest.fixture(scope="module")
def key(opened: Opened) -> Path:
    return login_key()


def test_calls_are_answered_by_the_images_own_user(opened: Opened, machine: Machine, figure: Figure) -> None:
    answer = who() >> opened.pool
    assert answer["user"] == "ubuntu"
    assert 'VERSION_ID="24.04"' in answer["system"]
    assert answer["host"] == f"ip-{machine.host.address.replace('.', '-')}"
    began = time.monotonic()
    for _ in range(20):
        who() >> opened.pool
    figure("Ubuntu 24.04: one call, on average of twenty", (time.monotonic() - began) / 20)


def test_the_host_key_was_known_at_the_first_login_and_replaced_after_it(
    opened: Opened, machine: Machine, key: Path
) -> None:
    """SEC-5: ssh is strict and knew the key of the user data only; once we are in, that one is worth nothing."""
    given = settings(machine.instance.user_data)["ssh_keys"]["ed25519_public"].split()[1]
    now = machine.run("cat /etc/ssh/ssh_host_*_key.pub", key).split()
    (known,) = [
        line.split()[2]
        for line in (key.parent / "known_hosts").read_text().splitlines()
        if line.startswith(f"{machine.host.address} ")
    ]
    assert known in now
    assert given not in now
    assert known != given
    assert not [event for event in opened.told(events.Notice) if "host key" in event.text]


def test_cloud_init_and_systemd_have_nothing_to_complain_of(machine: Machine, key: Path) -> None:
    assert "status: done" in machine.run("cloud-init status --wait --long", key, timeout=600)
    assert "Valid schema user-data" in machine.run("cloud-init schema --system 2>&1", key).replace("cloud-config", "")
    assert machine.run("systemctl is-active skyward-lease.service skyward-life.timer", key).split() == ["active"] * 2
    assert "skyward" not in machine.run("systemctl list-jobs; systemctl --failed", key)
    assert "ordering cycle" not in machine.run("journalctl -b --no-pager", key)


def test_the_lease_is_renewed_while_the_pool_is_open(opened: Opened, machine: Machine, key: Path) -> None:
    """SEC-31."""
    stamp = machine.run("stat -c %y /run/skyward/lease", key)
    until(lambda: time.sleep(5) or machine.run("stat -c %y /run/skyward/lease", key) != stamp, LEASE)
    assert machine.host.alive
    assert who() >> opened.pool


def test_after_a_reboot_the_node_is_set_up_again_and_answers(
    opened: Opened, machine: Machine, key: Path, figure: Figure
) -> None:
    """What the pool had there is gone; the machine arms its lease again, and keeps the host key that it was given."""
    kept = machine.run("cat /etc/ssh/ssh_host_ed25519_key.pub", key)
    began = time.monotonic()
    machine.run("systemd-run --on-active=1 systemctl reboot", key)
    until(lambda: opened.told(events.NodeDown), 600)
    until(lambda: opened.told(events.NodeUp), 1800)
    figure("Ubuntu 24.04: from a reboot until the node is up again", time.monotonic() - began)
    assert (who() >> opened.pool)["user"] == "ubuntu"
    assert machine.run("cat /etc/ssh/ssh_host_ed25519_key.pub", key) == kept, "cloud-init leaves it alone"
    assert machine.run("systemctl is-active skyward-lease.service skyward-life.timer", key).split() == ["active"] * 2


def test_a_spot_notice_reaches_the_pool(opened: Opened, cloud: Cloud, machine: Machine) -> None:
    """Row 21: the node asks the metadata service, as on EC2."""
    cloud.notice(machine.instance.id, 7200)
    until(lambda: opened.told(events.NodeLeaving), 300)
    assert machine.host.alive


def test_a_machine_that_cannot_hear_of_us_ends_with_its_lease(
    opened: Opened, cloud: Cloud, machines: Machines, machine: Machine, figure: Figure
) -> None:
    """SEC-31: the line is cut, nobody renews, the machine powers off and the cloud sees it end."""
    began = time.monotonic()
    machine.host.cut()
    until(lambda: machines.switched_off == [machine.instance.id], 3 * LEASE + 900)
    figure(f"Ubuntu 24.04: from a cut line to the end by a lease of {LEASE:.0f} s", time.monotonic() - began)
    until(lambda: not machine.host.alive)
    assert cloud.machines.all[machine.instance.id].reason == "Client.InstanceInitiatedShutdown"
    with pytest.raises(errors.SkywardError):
        who() >> opened.pool
