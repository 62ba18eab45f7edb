"""The real cloud-init for tests: its program and its units from the system's package, unpacked but never installed.

An installed one would take this machine for a new one of a cloud at its next boot.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from tests.support.hosts.machine import HostsError, install_packages, root

__all__ = ["cached", "fetch", "schema", "unavailable", "units"]

_LIBRARIES = ["configobj", "jinja2", "jsonpatch", "jsonschema", "netifaces", "oauthlib", "requests", "yaml"]
_PYTHON = "/usr/bin/python3"


def cached() -> Path:
    """What tests keep from one run to the next; SKYWARD_VM_CACHE leads elsewhere."""
    return Path(os.environ.get("SKYWARD_VM_CACHE") or Path.home() / ".cache" / "skyward-vm")


def unavailable() -> str | None:
    """Why cloud-init cannot be asked, in a sentence; None when it can."""
    if not _root().is_dir():
        return "The package of cloud-init was not fetched; run `python -m tests.support.cloud_init`."
    done = _run(["--version"])
    return None if done.returncode == 0 else f"cloud-init does not run here: {done.stderr.strip()}"


def fetch() -> bool:
    """Unpacks the package, and installs the libraries that it uses; False if all of that was there.

    Nothing is done on a machine without apt: tests that ask cloud-init are skipped there.
    """
    if unavailable() is None or not shutil.which("apt-get"):
        return False
    cached().mkdir(parents=True, exist_ok=True)
    with (cached() / "cloud-init.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lacking = [name for name in _LIBRARIES if not _has(name)]
        if lacking:
            install_packages([f"python3-{name}" for name in lacking])
        if not _root().is_dir():
            with tempfile.TemporaryDirectory(dir=cached()) as work:
                _download(work)
                (package,) = Path(work).glob("*.deb")
                subprocess.run(["dpkg-deb", "-x", str(package), f"{work}/root"], check=True)
                os.rename(f"{work}/root", _root())
    if reason := unavailable():
        raise HostsError(reason)
    return True


def schema(text: str, directory: Path) -> str:
    """What `cloud-init schema` says of user data; "" if it finds nothing wrong, and nothing that will be."""
    path = directory / "user-data"
    path.write_text(text)
    done = _run(["schema", "--config-file", str(path)])
    said = f"{done.stdout}\n{done.stderr}".strip()
    return "" if done.returncode == 0 and said.startswith("Valid") and "deprecat" not in said.lower() else said


def units() -> Path:
    """The directory with cloud-init's own units."""
    return next(found for part in ("lib", "usr/lib") if (found := _root() / part / "systemd/system").is_dir())


def _download(directory: str) -> None:
    argv = ["apt-get", "-q", "-o", "APT::Sandbox::User=root", "download", "cloud-init"]
    if subprocess.run(argv, cwd=directory, capture_output=True, check=False).returncode:
        root(["apt-get", "-q", "update"], timeout=600)  # a machine that is new may have no lists of packages yet
        subprocess.run(argv, cwd=directory, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


def _root() -> Path:
    return cached() / "cloud-init"


def _has(module: str) -> bool:
    return subprocess.run([_PYTHON, "-I", "-c", f"import {module}"], capture_output=True, check=False).returncode == 0


def _run(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [_PYTHON, "-B", "-s", str(_root() / "usr/bin/cloud-init"), *arguments],
        env={"PATH": os.defpath, "PYTHONPATH": str(_root() / "usr/lib/python3/dist-packages"), "LC_ALL": "C.UTF-8"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


if __name__ == "__main__":
    print("Fetched cloud-init." if fetch() else "Fetched nothing: cloud-init is there, or there is no apt.")
