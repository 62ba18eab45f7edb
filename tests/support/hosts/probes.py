"""Questions that tests ask again and again: does it answer, who reaches whom, what does ssh say."""

from __future__ import annotations

import socket
import subprocess

from .host import Host
from .network import Network

__all__ = ["answers", "reaches", "ssh"]


def ssh(net: Network, alias: str, command: str, user: str = "sky", said: str = "") -> subprocess.CompletedProcess[str]:
    """Runs a command by ssh, as a user of the host would."""
    argv = ["ssh", "-F", str(net.config), "-o", "BatchMode=yes", "-o", "ConnectTimeout=5", "-l", user, alias, command]
    return subprocess.run(argv, input=said, capture_output=True, text=True, timeout=120, check=False)


def answers(address: str, seconds: float = 10.0) -> bool:
    """Whether an sshd answers; False when nothing is heard, an error when it is refused."""
    try:
        with socket.create_connection((address, 22), timeout=seconds) as connection:
            return connection.recv(4) == b"SSH-"
    except TimeoutError:
        return False


def reaches(host: Host, address: str, seconds: float = 5.0) -> bool:
    """Whether an sshd answers to a host."""
    script = f"exec 3<>/dev/tcp/{address}/22 && head -c 4 <&3"
    return host.run(["bash", "-c", script], check=False, timeout=seconds).stdout == "SSH-"
