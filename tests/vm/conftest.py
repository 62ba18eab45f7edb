"""Pools on the test cloud with real Ubuntu machines behind it; only with SKYWARD_VM=1, which `make test-vm` sets."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from skyward.machines.ledger import histories
from tests.support.cloud import Cloud
from tests.support.hosts import HostSpec, Network, unavailable
from tests.support.leftovers import watchdogs
from tests.support.waiting import until
from tests.vm.machines import Machines

Figure = Callable[[str, float], None]


@pytest.fixture(scope="session", autouse=True)
def _wanted() -> None:
    """They take minutes each: nobody runs them by accident."""
    if not os.environ.get("SKYWARD_VM"):
        pytest.skip("these boot real machines, which takes minutes; run `make test-vm`")
    if reason := unavailable():
        pytest.skip(reason)


@pytest.fixture(scope="session")
def figure() -> Iterator[Figure]:
    """Notes how many seconds something took; all of it is printed at the end."""
    noted: list[str] = []
    yield lambda what, seconds: noted.append(f"{seconds:7.1f} s  {what}")
    print("\n\nSeen on machines in QEMU:\n" + "\n".join(noted))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cloud, Machines]]:
    """A cloud and its machines, for a module; if something fails, their consoles stay in pytest's directory."""
    with Network([HostSpec(bare=True)] * 6, idle=True) as network:
        machines = Machines(network, tmp_path_factory.mktemp("machines"))
        with Cloud(machines) as cloud:
            machines.end = cloud.end
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("SKYWARD_STATE", str(tmp_path_factory.mktemp("state")))
                patch.setenv("SKYWARD_CACHE", str(tmp_path_factory.mktemp("cache")))
                for name, value in cloud.environ.items():
                    patch.setenv(name, value)
                before = set(watchdogs())
                yield cloud, machines
                assert (cloud.leftovers(), list(histories())) == ([], [])
                until(lambda: not set(watchdogs()) - before, 120)
        for machine in machines.of.values():
            (machine.directory / "disk.qcow2").unlink(missing_ok=True)


@pytest.fixture(scope="module")
def cloud(served: tuple[Cloud, Machines]) -> Cloud:
    """The test cloud, where AWS's own variables lead."""
    return served[0]


@pytest.fixture(scope="module")
def machines(served: tuple[Cloud, Machines]) -> Machines:
    """What stands behind its instances."""
    return served[1]
