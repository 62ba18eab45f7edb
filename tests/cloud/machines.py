"""Real hosts behind the machines of the test cloud: each boots with its user data, and dies with its instance."""

from __future__ import annotations

import json
import subprocess
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

from skyward.testing import Instance
from tests.hosts import Host, HostSpec, Network

__all__ = ["CACHE", "Hosts", "specs"]

CACHE = "/run/cache"
_PATH = "/run/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# What a machine without power management does instead of switching itself off.
_SHUTDOWN = '#!/bin/sh\necho "$@" > /run/off\nexec sleep infinity\n'


def specs(cache: Path, count: int) -> list[HostSpec]:
    """Hosts that share what they install."""
    return [HostSpec(share={CACHE: cache}, setenv={"SKYWARD_CACHE": CACHE}, root_login=True)] * count


class Hosts:
    """The test cloud's `Hooks`: a host of an idle network for every machine."""

    def __init__(self, network: Network, directory: Path) -> None:
        self.of: dict[str, Host] = {}
        """Instance -> its host, also when it is gone."""
        self.switched_off: list[str] = []
        """Instances that have ended themselves."""
        self.end: Callable[[str, str], None] = lambda id, reason: None
        """What tells the cloud that a machine has ended itself."""
        self._free = deque(network.hosts)  # an address comes back as late as possible
        self._directory = directory
        self._watchers: list[threading.Thread] = []

    def machine_started(self, instance: Instance) -> None:
        """Boots a host as cloud-init would: host key, login key, boot commands."""
        host = self.of[instance.id] = self._free.popleft()
        settings = json.loads(instance.user_data.partition("\n")[2])
        keys = self._directory / instance.id
        keys.mkdir()
        (keys / "host").write_text(settings["ssh_keys"]["ed25519_private"])
        (keys / "login.pub").write_text(instance.public_key + "\n")
        host.boot(keys / "host", keys / "login")
        instance.private_ip = host.address
        instance.public_ip = instance.public_ip and host.address
        host.run(["sh", "-c", "mkdir /run/bin && mkfifo /run/off"], user="root")
        host.put("/run/bin/shutdown", _SHUTDOWN.encode(), mode="755")
        listener = host.start(["cat", "/run/off"], user="root", stdout=subprocess.PIPE, text=True)
        watcher = threading.Thread(target=self._watch, args=(instance.id, listener))
        watcher.start()
        self._watchers.append(watcher)
        for argv in settings["bootcmd"]:
            host.run(["env", f"PATH={_PATH}", *argv], user="root")

    def machine_terminated(self, instance: Instance) -> None:
        """Ends all that runs on the host: connections end, and new ones are refused."""
        host = self.of[instance.id]
        host.kill()
        self._free.append(host)

    def close(self) -> None:
        """Waits for the threads that listen to machines, which are gone."""
        for watcher in self._watchers:
            watcher.join(30)

    def _watch(self, id: str, listener: subprocess.Popen[str]) -> None:
        said, _ = listener.communicate()
        if said:
            self.switched_off.append(id)
            self.end(id, "Client.InstanceInitiatedShutdown")
