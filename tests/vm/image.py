"""Root disks of Ubuntu for test machines: made once, kept in a cache, and like EC2's own images in what matters here.

debootstrap ──► CACHE/<release>-<recipe>/root ──(and files of the test's own)──► <files>.img, beside vmlinuz and initrd
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.cloud_init import cached
from tests.support.hosts import install
from tests.support.hosts.machine import HostsError, as_root, root

__all__ = ["BUSY", "PLAIN", "RELEASES", "RESETTING", "Disk", "Files", "disk", "prepare"]

RELEASES = {"24.04": "noble", "22.04": "jammy"}
_PROGRAMS = {
    "debootstrap": "debootstrap",
    "qemu-system-x86_64": "qemu-system-x86",
    "qemu-img": "qemu-utils",
    "dnsmasq": "dnsmasq-base",
    "mkfs.ext4": "e2fsprogs",
    "gpg": "gpg",
}
_PACKAGES = """
    cloud-init openssh-server sudo netplan.io unattended-upgrades needrestart python3 iproute2 curl ca-certificates
    chrony apparmor rsyslog dbus polkitd linux-image-virtual initramfs-tools
    """
_MIRROR = os.environ.get("SKYWARD_UBUNTU_MIRROR", "http://archive.ubuntu.com/ubuntu")
_KEYRING = Path("/usr/share/keyrings/ubuntu-archive-keyring.gpg")
_KEYRING_PACKAGE = "https://archive.ubuntu.com/ubuntu/pool/main/u/ubuntu-keyring/ubuntu-keyring_2023.11.28.1_all.deb"
# The keys that Ubuntu's archive, and the images of its installer, have been signed with since 2012.
_FINGERPRINTS = {
    "790BC7277767219C42C86F933B4FE6ACC0B21F32",
    "843938DF228D22F7B3742BC0D94AA3F0EFE21092",
    "F6ECB3762474EDA9D21B7022871920D1991BC93C",
}
_SCRIPTS = Path("/usr/share/debootstrap/scripts")
_BUILD = Path(__file__).with_name("build.sh")
_SIZE = "6G"

Files = Mapping[str, tuple[int, str]]
"""Path -> mode and content. A mode of 0 makes a link that leads to the content."""

# What only takes time at boot, minutes where the processor is emulated: profiles of AppArmor that are compiled,
# caches that are made again since nothing says that they are new, a console at which nobody sits.
PLAIN: Files = {
    "etc/systemd/system/apparmor.service": (0, "/dev/null"),
    "etc/systemd/system/ldconfig.service": (0, "/dev/null"),
    "etc/systemd/system/systemd-journal-catalog-update.service": (0, "/dev/null"),
    "etc/systemd/system/systemd-hwdb-update.service": (0, "/dev/null"),
    "etc/systemd/system/serial-getty@ttyS0.service": (0, "/dev/null"),
}
BUSY: Files = {
    **PLAIN,
    "etc/apt/sources.list": (0o644, "deb [trusted=yes] file:/opt/archive ./\n"),
    "etc/cloud/cloud.cfg.d/99-tests.cfg": (0o644, "apt:\n  preserve_sources_list: true\n"),
    "etc/apt/apt.conf.d/52tests": (
        0o644,
        'Unattended-Upgrade::Origins-Pattern { "origin=Tests"; };\n'
        'APT::Periodic::Update-Package-Lists "always";\nAPT::Periodic::Unattended-Upgrade "always";\n',
    ),
    # Its timer would start it later. Nobody gets in before the locks are held.
    "etc/systemd/system/busy.service": (
        0o644,
        "[Unit]\nBefore=ssh.service ssh.socket\n[Service]\nType=oneshot\nStandardOutput=journal+console\n"
        "ExecStart=/usr/bin/apt-get update\nExecStart=/bin/systemctl start --no-block apt-daily-upgrade.service\n"
        "ExecStart=/bin/sh -c 'until pgrep -f [p]atient.postinst; do sleep 1; done'\n",
    ),
    "etc/systemd/system/multi-user.target.wants/busy.service": (0, "/etc/systemd/system/busy.service"),
}
"""unattended-upgrades runs at boot and holds dpkg's locks until somebody touches /run/let-go."""
_RESET = """\
import socket, struct, time
server = socket.create_server(("0.0.0.0", 22))
server.settimeout(1)
end = time.monotonic() + 30
while time.monotonic() < end:
    try:
        caller, _ = server.accept()
    except TimeoutError:
        continue
    print("reset", flush=True)
    caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    caller.close()
"""
RESETTING: Files = {
    **PLAIN,
    "opt/reset.py": (0o644, _RESET),
    "etc/systemd/system/resets.service": (
        0o644,
        "[Unit]\nAfter=network-online.target\nWants=network-online.target\nBefore=ssh.service ssh.socket\n"
        "[Service]\nType=oneshot\nStandardOutput=journal+console\nExecStart=/usr/bin/python3 /opt/reset.py\n"
        "[Install]\nWantedBy=multi-user.target\n",
    ),
    "etc/systemd/system/ssh.service.d/late.conf": (0o644, "[Unit]\nAfter=resets.service\n"),
    "etc/systemd/system/multi-user.target.wants/resets.service": (0, "/etc/systemd/system/resets.service"),
    # Ubuntu 24.04 has systemd listen for sshd, as early as sockets.target; here sshd does so itself.
    "etc/systemd/system/ssh.socket": (0, "/dev/null"),
    "etc/systemd/system/multi-user.target.wants/ssh.service": (0, "/lib/systemd/system/ssh.service"),
}
"""Every connection to port 22 is reset during the first half minute in which the machine has a network."""


@dataclass(frozen=True)
class Disk:
    """What a machine is started with."""

    release: str
    kernel: Path
    initrd: Path
    image: Path


def prepare() -> list[str]:
    """Installs what making and running machines takes; returns the names of the packages."""
    return [*install(), *install(_PROGRAMS)]


def disk(release: str = "24.04", files: Files = PLAIN) -> Disk:
    """The disk of a release of Ubuntu with these files in it too, made if it is not there."""
    recipe = _digest(_BUILD.read_text(), _PACKAGES, _MIRROR, *sys.version_info[:2])
    home = cached() / f"{release}-{recipe}"
    image = home / f"{_digest(sorted(files.items()), _SIZE)}.img"
    with _locked(release):
        if not (home / "vmlinuz").exists():
            _make_root(RELEASES[release], home)
        if not image.exists():
            _make_disk(home, files, image)
    return Disk(release, home / "vmlinuz", home / "initrd.img", image)


def _make_root(code: str, home: Path) -> None:
    """Has debootstrap and apt make the file system, in a mount namespace, which nothing that is mounted outlives."""
    root(["rm", "-rf", str(home)])
    home.mkdir(parents=True)
    tree = home / "root"
    packages = _PACKAGES + (" systemd-resolved" if code >= "noble" else "")
    script = _SCRIPTS / code if (_SCRIPTS / code).exists() else _SCRIPTS / "gutsy"  # all of Ubuntu's are this one
    arguments = [code, str(tree), _MIRROR, str(_keyring(home)), str(script), " ".join(packages.split())]
    with (home / "build.log").open("w") as log:
        argv = as_root(["nice", "unshare", "-m", "sh", str(_BUILD), *arguments])
        if subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=False).returncode:
            raise HostsError(f"Ubuntu {code} could not be made:\n{(home / 'build.log').read_text()[-3000:]}")
    _bring_python(tree)
    for name in ("initrd.img", "vmlinuz"):  # the second says that all is there
        root(["install", "-m", "644", str((tree / "boot" / name).resolve()), str(home / f"{name}.part")])
        (home / f"{name}.part").rename(home / name)


def _make_disk(home: Path, files: Files, image: Path) -> None:
    """Copies the tree, as links to the same files, puts other files in, and makes a file system of it."""
    part, tree = image.with_suffix(".part"), home / f"{image.stem}-tree"
    root(["rm", "-rf", str(tree), str(part)])
    root(["cp", "-al", str(home / "root"), str(tree)], timeout=600)
    with tempfile.NamedTemporaryFile() as packed:
        packed.write(_packed(files))
        packed.flush()
        root(["tar", "--unlink-first", "--keep-directory-symlink", "-xf", packed.name, "-C", str(tree)])
    root(["truncate", "-s", _SIZE, str(part)])
    root(["mkfs.ext4", "-q", "-F", "-d", str(tree), str(part)], timeout=600)
    root(["rm", "-rf", str(tree)])
    root(["chmod", "644", str(part)])
    root(["mv", str(part), str(image)])


def _packed(files: Files) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for path, (mode, content) in files.items():
            entry = tarfile.TarInfo(path)
            entry.mode, entry.mtime = mode or 0o777, 0
            if mode:
                entry.size = len(content.encode())
                archive.addfile(entry, io.BytesIO(content.encode()))
            else:
                entry.type, entry.linkname = tarfile.SYMTYPE, content
                archive.addfile(entry)
    return packed.getvalue()


def _bring_python(tree: Path) -> None:
    """Puts the Python version of this process into the image: functions can only go to the same one.

    The test machines reach no server from which uv could have it.
    """
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    if (tree / "usr/bin" / f"python{version}").exists():
        return
    names = [
        f"python{version}",
        f"python{version}-minimal",
        f"libpython{version}-minimal",
        f"libpython{version}-stdlib",
    ]
    with tempfile.TemporaryDirectory() as directory:
        options = ["-q", "-o", "APT::Sandbox::User=root"]
        done = subprocess.run(
            ["apt-get", *options, "download", *names], cwd=directory, capture_output=True, check=False
        )
        for package in sorted(Path(directory).glob("*.deb")) if done.returncode == 0 else []:
            root(["dpkg-deb", "-x", str(package), str(tree)])
    if done.returncode:
        opt = tree / "opt" / "python"
        from uv import find_uv_bin

        root(
            ["env", "HOME=/root", find_uv_bin(), "python", "install", "--no-bin", "-i", str(opt), version], timeout=600
        )
        (made,) = opt.glob(f"cpython-{version}.*")
        link = tree / "usr/local/bin" / f"python{version}"
        root(["ln", "-sf", f"/opt/python/{made.name}/bin/python{version}", str(link)])
    root(["chroot", str(tree), f"python{version}", "-I", "-c", "import ctypes, ssl"])


def _keyring(home: Path) -> Path:
    """The keys of Ubuntu's archive: those of this machine, or those of its package if they are the known ones."""
    if _KEYRING.exists():
        return _KEYRING
    package = home / "keyring.deb"
    with urllib.request.urlopen(_KEYRING_PACKAGE, timeout=60) as answer, package.open("wb") as file:
        shutil.copyfileobj(answer, file)
    subprocess.run(["dpkg-deb", "-x", str(package), str(home / "keyring")], check=True)
    keyring = home / "keyring" / str(_KEYRING).lstrip("/")
    shown = subprocess.run(
        ["gpg", "--show-keys", "--with-colons", str(keyring)], check=True, capture_output=True, text=True
    ).stdout
    unknown = set(re.findall(r"^fpr:+([0-9A-F]{40}):", shown, re.M)) - _FINGERPRINTS
    if unknown:
        raise HostsError(
            f"{_KEYRING_PACKAGE} has keys that are not known to be Ubuntu's: {', '.join(sorted(unknown))}."
        )
    return keyring


@contextmanager
def _locked(release: str) -> Generator[None]:
    """One process at a time makes disks of a release."""
    cached().mkdir(parents=True, exist_ok=True)
    with (cached() / f"{release}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


if __name__ == "__main__":
    print(f"Installed {', '.join(prepare()) or 'nothing: all is there'}.")
    for wanted in sys.argv[1:] or ["24.04"]:
        print(f"Ubuntu {wanted}: {disk(wanted).image}", flush=True)
