"""apt packages on a host on which another program installs something too, as Ubuntu does after its first boot."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator

import pytest

import skyward as sky
from skyward import errors, events
from tests.support.hosts import Host, HostSpec, Network

LOCKS = {
    "dpkg": "/var/lib/dpkg/lock-frontend",
    "package lists": "/var/lib/apt/lists/lock",
    "downloads": "/var/cache/apt/archives/lock",
}
HOLD = """
import fcntl, sys
with open(sys.argv[1], "w") as file:
    fcntl.lockf(file, fcntl.LOCK_EX)
    print("held", flush=True)
    sys.stdin.read()
"""
# An archive on the host itself, with packages that contain nothing.
ARCHIVE = r"""
set -e
mkdir -p /opt/archive && cd /opt/archive
for name in $*; do
  mkdir -p work/DEBIAN
  printf 'Package: %s\nVersion: 1\nArchitecture: all\nMaintainer: tests\n' $name > work/DEBIAN/control
  echo 'Description: for tests' >> work/DEBIAN/control
  dpkg-deb --root-owner-group --build work $name.deb >/dev/null
  dpkg-deb -f $name.deb >> Packages
  hash=$(sha256sum $name.deb | cut -d' ' -f1)
  printf 'Filename: ./%s.deb\nSize: %s\nSHA256: %s\n\n' $name $(stat -c %s $name.deb) $hash >> Packages
done
rm -rf work /etc/apt/sources.list.d/*
echo 'deb [trusted=yes] file:/opt/archive ./' > /etc/apt/sources.list
"""
PACKAGES = {lock: f"sky-handy-{number}" for number, lock in enumerate([*LOCKS, "never"])}


@pytest.fixture(scope="module")
def host() -> Iterator[tuple[Network, Host]]:
    """A host on which root may install packages from an archive of its own."""
    with Network([HostSpec(root_login=True, writable=True)], internet=True) as network:
        network[0].run(["sh", "-c", ARCHIVE, "sh", *PACKAGES.values()], user="root")
        yield network, network[0]


def held(host: Host, lock: str) -> subprocess.Popen[str]:
    """A process that holds one of apt's locks until its input ends."""
    argv = ["python3", "-I", "-c", HOLD, lock, "unattended-upgrade"]
    holder = host.start(argv, user="root", stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    return holder


def pool_with(net: Network, package: str, heard: Callable[[str], None]) -> sky.ComputePool:
    """A pool whose image needs a package; tells what it does."""
    provider = sky.SSH(hosts=[net[0].address], user="root", key=str(net.key), known_hosts=str(net.known_hosts))
    pool = sky.ComputePool(provider=provider, image=sky.Image(apt=[package]), console=False)
    pool.on_event(lambda event: heard(event.phase) if isinstance(event, events.NodePhase) else None)
    return pool


def installed(host: Host, package: str) -> bool:
    return host.run(["dpkg", "-s", package], user="root", check=False).returncode == 0


@sky.compute
def one() -> int:
    return 1


@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_that_another_program_holds_is_waited_for_and_its_holder_named(
    host: tuple[Network, Host], lock: str
) -> None:
    """As unattended-upgrades does at the first boot of Ubuntu's images; each of the three keeps another command out."""
    net, h0 = host
    steps: list[str] = []
    with held(h0, LOCKS[lock]) as holder:

        def heard(step: str) -> None:
            steps.append(step)
            if "apt's lock" in step:
                assert holder.stdin is not None
                holder.stdin.close()

        with pool_with(net, PACKAGES[lock], heard) as pool:
            assert one() >> pool == 1
    assert installed(h0, PACKAGES[lock])
    waited, *done = [step for step in steps if "apt's lock" in step]
    assert all(re.fullmatch(re.escape(waited) + r" \([\d.]+ s\)", step) for step in done), "it is told once"
    found = re.fullmatch(r"waiting for process (\d+) \((.+)\), which holds apt's lock (\S+)", waited)
    assert found is not None, waited
    assert (found[3], "unattended-upgrade" in found[2]) == (LOCKS[lock], True)


def test_a_lock_that_is_never_given_back_ends_the_wait_with_its_holder_named(host: tuple[Network, Host]) -> None:
    net, h0 = host
    h0.put("/root/.bashrc", b"export SKYWARD_APT_WAIT=2\n")
    with held(h0, LOCKS["dpkg"]) as holder:
        with pytest.raises(errors.BootstrapError) as raised, pool_with(net, PACKAGES["never"], lambda step: None):
            pass
        said = str(raised.value)
        assert re.search(r"process \d+ \(.*unattended-upgrade.*\) has held .*lock-frontend for 2 s", said), said
        assert "SKYWARD_APT_WAIT" in said
        assert holder.stdin is not None
        holder.stdin.close()
    assert not installed(h0, PACKAGES["never"])
