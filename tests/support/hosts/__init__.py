"""Real hosts on one machine, for tests: namespaces, links that can be cut, and an sshd on each.

with Network(3) as net:
    subprocess.run(["ssh", "-F", net.config, "h0", "hostname"], check=True)
    net[1].kill()
"""

from __future__ import annotations

from .host import Host, Listener, Process, Traffic
from .machine import HostsError, install, lacks_python, unavailable
from .network import Network
from .spec import HostSpec

__all__ = ["Host", "HostSpec", "HostsError", "Listener", "Network", "Process", "Traffic"]
__all__ += ["install", "lacks_python", "unavailable"]
