"""What is special about a test host, and its description for the host's first process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import keys

__all__ = ["USERS", "HostSpec", "describe"]

USERS = {"sky": 20001, "mallory": 20002}
_CHECKOUT = Path(__file__).resolve().parents[3]
_PARTS = {"home": 0o755, "root": 0o700, "tmp": 0o1777, "var-tmp": 0o1777, "empty": 0o755}
_OWN = {"home": "/home", "root": "/root", "tmp": "/tmp", "var-tmp": "/var/tmp", "etc": "/etc"}


@dataclass(frozen=True)
class HostSpec:
    """What is special about a host."""

    home_size: str | None = None
    """Such as "50m": /home holds no more than that."""
    tmp_size: str | None = None
    """Such as "50m": /tmp holds no more than that."""
    read_only_home: bool = False
    noexec_tmp: bool = False
    sudo: bool = False
    """sky may do anything with sudo, which this machine must have."""
    writable: bool = False
    """Root of the host may change /usr, /var and /opt, as apt does; the machine's own files stay as they are."""
    root_login: bool = False
    port: int = 22
    hide: Sequence[str] = ()
    """Programs that this host does not have, such as "/usr/bin/python3*"."""
    setenv: Mapping[str, str] = field(default_factory=dict[str, str])
    """Variables that every login finds."""
    limits: Mapping[str, int] = field(default_factory=dict[str, int])
    """Limits of every login, such as {"nofile": 256}."""
    share: Mapping[str, Path] = field(default_factory=dict[str, Path])
    """Directories of this machine under paths of the host (in /run, /home, /tmp); they become sky's."""
    show: Mapping[str, Path] = field(default_factory=dict[str, Path])
    """Directories of this machine under paths of the host in /run; nobody there can change them."""
    bare: bool = False
    """Nothing but a network and processes: no files of its own, no sshd. For what brings those along, such as a VM."""


def describe(
    spec: HostSpec, directory: Path, host_key: Path, client_key: Path, setenv: Mapping[str, str]
) -> dict[str, Any]:
    """All that the first process has to know to make the host."""
    return {
        "directory": str(directory),
        "users": [{"name": name, "id": number} for name, number in USERS.items()],
        "parts": _PARTS,
        "own": _OWN,
        "hide": list(spec.hide),
        "writable": ["/usr", "/var", "/opt"] if spec.writable else [],
        "covered": [str(_CHECKOUT)],
        "share": {path: str(source) for path, source in spec.share.items()},
        "show": {path: str(source) for path, source in spec.show.items()},
        "tmp_size": spec.tmp_size,
        "noexec_tmp": spec.noexec_tmp,
        "read_only_home": spec.read_only_home,
        "root_login": spec.root_login,
        "sudo": spec.sudo,
        "limits": dict(spec.limits),
        "port": spec.port,
        "host_key": str(host_key),
        "authorized": client_key.with_suffix(".pub").read_text(),
        "sshd_config": keys.server_settings(spec.port, spec.root_login, {**setenv, **spec.setenv}, keys.ssh_version()),
    }
