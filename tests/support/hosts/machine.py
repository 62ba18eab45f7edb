"""What this machine has to offer for test hosts, and how a command is run on it as root."""

from __future__ import annotations

import fcntl
import functools
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager

__all__ = [
    "KUBERNETES",
    "SHELLS",
    "SLURM",
    "HostsError",
    "as_root",
    "install",
    "install_packages",
    "lacks_python",
    "missing",
    "root",
]
__all__ += ["unavailable"]

_PATH = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))
_PACKAGES = {
    "sshd": "openssh-server",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "ip": "iproute2",
    "tc": "iproute2",
    "bridge": "iproute2",
    "nft": "nftables",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "systemd-analyze": "systemd",
    "/usr/bin/python3": "python3",
}
SLURM = {"slurmctld": "slurm-wlm", "slurmd": "slurm-wlm", "sbatch": "slurm-wlm", "munged": "munge"}
"""What a Slurm on test hosts needs besides: see tests/support/slurm.py."""
KUBERNETES = {"etcd": "etcd-server"}
"""What a Kubernetes on test hosts needs of the system: see tests/support/kubernetes/cluster.py."""
SHELLS = {"zsh": "zsh", "fish": "fish"}
"""Shells whose completion is tested (tests/cli/test_completion.py)."""

# Everything that a host is made of, tried once in namespaces that are gone a moment later.
_TRIAL = (
    "ip link add name trial type bridge && ip link add name one type veth peer name two"
    " && nft add table bridge trial && mount -t tmpfs tmpfs /dev/shm"
)
_NO_SERVICE = "/usr/sbin/policy-rc.d"


class HostsError(Exception):
    """Test hosts could not be made or changed."""


def as_root(argv: Sequence[str]) -> list[str]:
    """The command that does this as root."""
    program = shutil.which(argv[0], path=_PATH) or argv[0]
    return [*([] if os.geteuid() == 0 else ["sudo", "-n", "--"]), program, *argv[1:]]


def root(argv: Sequence[str], data: str = "", check: bool = True, timeout: float = 120.0) -> str:
    """Runs a command of this machine as root and returns what it said."""
    done = subprocess.run(
        as_root(argv),
        input=data,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env={**os.environ, "PATH": _PATH},
    )
    if check and done.returncode:
        raise HostsError(
            f"`{' '.join(argv)}` failed with exit code {done.returncode}: {done.stderr.strip() or done.stdout.strip()}"
            + (f"\nIts input was:\n{data}" if data else "")
        )
    return done.stdout


@functools.cache
def unavailable() -> str | None:
    """Why there can be no test hosts on this machine, in a sentence; None when there can."""
    if sys.platform != "linux":
        return f"Test hosts are made of Linux namespaces, and this is {sys.platform}; run these tests on Linux."
    if os.geteuid() and subprocess.run(["sudo", "-n", "true"], capture_output=True, check=False).returncode:
        return "Test hosts need root, or sudo without a password, to make namespaces; run the tests as root."
    if lacking := missing(_PACKAGES):
        return f"Test hosts need {', '.join(lacking)}; run `python -m tests.support.hosts install`."
    try:
        root(["unshare", "-m", "-u", "-i", "-n", "-p", "--fork", "--mount-proc", "sh", "-c", _TRIAL])
    except HostsError as exc:
        return (
            f"This machine, as containers often do, does not let even root make namespaces with links and mounts: {exc}"
        )
    return None


@functools.cache
def lacks_python() -> str | None:
    """Why hosts cannot have the Python of this process, which pools on them need; None when they can."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    if shutil.which(f"python{version}", path="/usr/local/bin:/usr/bin:/bin"):
        return None
    try:
        socket.create_connection(("github.com", 443), timeout=10).close()  # where uv has its Pythons from
    except OSError:
        return f"Test hosts have no Python {version} and cannot download one; install python{version} in /usr/bin."
    return None


def install(needed: Mapping[str, str] = _PACKAGES) -> list[str]:
    """Installs the system packages of missing programs; returns their names. Two runs do it one after the other."""
    if not missing(needed):
        return []
    if not shutil.which("apt-get", path=_PATH):
        packages = sorted({needed[program] for program in missing(needed)})
        raise HostsError(
            f"Test hosts need {', '.join(packages)}, and this machine has no apt-get; install them by its own means."
        )
    with _only_one():
        packages = sorted({needed[program] for program in missing(needed)})  # another run may just have installed them
        if packages:
            _install(packages)
    unavailable.cache_clear()
    return packages


def install_packages(packages: Sequence[str]) -> None:
    """Installs system packages by their names."""
    with _only_one():
        _install(packages)


@contextmanager
def _only_one() -> Generator[None]:
    lock = os.open("/var/lib/dpkg", os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _install(packages: Sequence[str]) -> None:
    # Installing openssh-server starts it, which nobody asked for; Debian's own way to say no is this file.
    quiet = not os.path.exists(_NO_SERVICE)
    if quiet:
        root(["sh", "-c", f"printf '#!/bin/sh\\nexit 101\\n' > {_NO_SERVICE} && chmod 755 {_NO_SERVICE}"])
    try:
        patience = ["-o", "DPkg::Lock::Timeout=300"]  # some other program may be installing something
        apt = ["env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-qy", *patience]
        root([*apt, "update"], timeout=600, check=False)  # an old index may still do; if not, the next line says so
        root([*apt, "install", "--no-install-recommends", *packages], timeout=900)
    finally:
        if quiet:
            root(["rm", "-f", _NO_SERVICE])


def missing(needed: Mapping[str, str]) -> list[str]:
    """Those programs, of a table of programs and their packages, that this machine does not have."""
    return [program for program in needed if not shutil.which(program, path=_PATH)]
