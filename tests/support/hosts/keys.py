"""Keys and settings of ssh for the test hosts and for those who log in to them."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["host_line", "make_keys", "server_settings", "ssh_version", "user_settings"]


def make_keys(paths: Sequence[Path]) -> None:
    """Makes an ed25519 key without a passphrase for each path, in place of one that is there."""
    for path in paths:
        path.unlink(missing_ok=True)
    made = [
        subprocess.Popen(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", path.name, "-f", str(path)])
        for path in paths
    ]
    for process in made:
        if process.wait():
            raise RuntimeError(f"ssh-keygen failed: {process.args}")


def host_line(address: str, port: int, key: Path) -> str:
    """The line of known_hosts for a host with this key."""
    name = address if port == 22 else f"[{address}]:{port}"
    kind, value = key.with_suffix(".pub").read_text().split()[:2]
    return f"{name} {kind} {value}\n"


def user_settings(alias: str, address: str, port: int, key: Path, known_hosts: Path, user: str = "sky") -> str:
    """The part of a user's ssh config that makes an alias for a host."""
    return f"""Host {alias}
  HostName {address}
  Port {port}
  User {user}
  IdentityFile {key}
  IdentitiesOnly yes
  UserKnownHostsFile {known_hosts}
  GlobalKnownHostsFile /dev/null
  StrictHostKeyChecking yes

"""


def server_settings(port: int, root_login: bool, environment: Mapping[str, str], version: tuple[int, int]) -> str:
    """The settings of a host's sshd: keys only, no look-ups, and room for many connections at once."""
    variables = " ".join(f'{name}="{_escaped(value)}"' for name, value in environment.items())
    lines = f"""Port {port}
ListenAddress 0.0.0.0
HostKey /etc/ssh/ssh_host_ed25519_key
PidFile /run/sshd.pid
PermitRootLogin {"prohibit-password" if root_login else "no"}
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
StrictModes yes
UseDNS no
PrintMotd no
PrintLastLog no
X11Forwarding no
AllowTcpForwarding yes
AllowStreamLocalForwarding yes
ClientAliveInterval 0
MaxStartups 200:30:400
MaxSessions 200
Subsystem sftp internal-sftp
"""
    if version >= (9, 8):
        lines += "PerSourcePenalties no\n"  # tests with a wrong key would shut out the tests after them
    return lines + (f"SetEnv {variables}\n" if variables else "")


def ssh_version() -> tuple[int, int]:
    """Which OpenSSH this machine has."""
    said = subprocess.run(["ssh", "-V"], capture_output=True, text=True, check=True).stderr
    found = re.search(r"OpenSSH_(\d+)\.(\d+)", said)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"')
