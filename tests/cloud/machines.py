"""Real hosts behind the machines of the test cloud: each boots with its user data, and dies with its instance."""

from __future__ import annotations

import json
import subprocess
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

from skyward.testing import nvidia_smi
from tests.support.cloud import Instance, metadata
from tests.support.hosts import Host, HostsError, HostSpec, Network
from tests.support.hosts.place import SCRIPT

__all__ = ["CACHE", "Hosts", "specs"]

CACHE = "/run/cache"
_PATH = "/run/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# This machine's own GPUs are not those of the cloud's machines.
_DRIVER = ("/usr/lib/*/libnvidia-ml.so*", "/usr/bin/nvidia-smi")
# What a machine without power management does instead of switching itself off.
_SHUTDOWN = '#!/bin/sh\necho "$@" > /run/off\nexec sleep infinity\n'
# The user of a cloud's image may use sudo, which test hosts do without: this does what we need of it, for sky alone.
_SUDO = '#!/bin/sh\nshift\nexec /etc/become --reuid 0 --regid 0 --clear-groups -- "$@"\n'
_BECOME = "install -o root -g sky -m 4750 /usr/bin/setpriv /etc/become"


def specs(cache: Path, count: int) -> list[HostSpec]:
    """Hosts that share what they install, and have the GPUs of their machine's type only."""
    setenv = {"SKYWARD_CACHE": CACHE, "PATH": _PATH}
    return [HostSpec(share={CACHE: cache}, setenv=setenv, root_login=True, hide=_DRIVER)] * count


class Hosts:
    """The test cloud's `Hooks`: a host of an idle network for every machine."""

    def __init__(self, network: Network, directory: Path) -> None:
        self.of: dict[str, Host] = {}
        """Instance -> its host, also when it is gone."""
        self.switched_off: list[str] = []
        """Instances that have ended themselves."""
        self.sudo = True
        """Whether the user of machines yet to come may become root."""
        self.gpus = True
        """Whether machines yet to come show the GPUs of their type."""
        self.end: Callable[[str, str], None] = lambda id, reason: None
        """What tells the cloud that a machine has ended itself."""
        self.network = network
        self._free = deque(network.hosts)  # an address comes back as late as possible
        self._directory = directory
        self._watchers: list[threading.Thread] = []
        self._services: dict[str, subprocess.Popen[str]] = {}

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
        service = self._services[instance.id] = self._serve_metadata(instance, host)
        host.run(["sh", "-c", "mkdir /run/bin && mkfifo /run/off"], user="root")
        host.put("/run/bin/shutdown", _SHUTDOWN.encode(), mode="755")
        if self.sudo:
            host.run(["sh", "-c", _BECOME], user="root")
            host.put("/run/bin/sudo", _SUDO.encode(), mode="755")
        if self.gpus and (program := nvidia_smi(instance)):
            host.put("/run/bin/nvidia-smi", program.encode(), mode="755")
        listener = host.start(["cat", "/run/off"], user="root", stdout=subprocess.PIPE, text=True)
        watcher = threading.Thread(target=self._watch, args=(instance.id, listener))
        watcher.start()
        self._watchers.append(watcher)
        for argv in settings["bootcmd"]:
            host.run(["env", f"PATH={_PATH}", *argv], user="root")
        assert service.stdout is not None
        if not service.stdout.readline():
            said = (keys / "metadata.log").read_text()
            raise HostsError(f"The metadata service of {host.name} did not start; it said: {said}")

    def machine_terminated(self, instance: Instance) -> None:
        """Ends all that runs on the host: connections end, and new ones are refused."""
        host = self.of[instance.id]
        host.kill()
        if service := self._services.pop(instance.id, None):
            service.communicate()
        self._free.append(host)

    def machine_noticed(self, instance: Instance, deadline: float) -> None:
        """Has the host's metadata service tell it."""
        metadata.notice(self._directory / instance.id / "metadata", deadline)

    def close(self) -> None:
        """Waits for the threads that listen to machines, which are gone."""
        for watcher in self._watchers:
            watcher.join(30)

    def _serve_metadata(self, instance: Instance, host: Host) -> subprocess.Popen[str]:
        """Serves what the host may know of itself at its address: in its network, and killed with its processes."""
        base = self._directory / instance.id
        facts = {
            "instance-id": instance.id,
            "instance-type": instance.kind,
            "instance-life-cycle": instance.market,
            "local-ipv4": instance.private_ip,
            "placement/availability-zone": instance.zone,
            "placement/region": instance.region,
        }
        for name, fact in facts.items():
            metadata.write(base / "metadata", f"meta-data/{name}", fact)
        # A route and no address of the host: by its addresses, others may be told to reach it.
        host.place.run(["ip", "route", "add", "local", "169.254.169.254", "dev", "lo"], kinds=["net"])
        argv = host.place.entered([*SCRIPT, metadata.__file__, str(base / "metadata")], kinds=["net", "pid"])
        with (base / "metadata.log").open("w") as log:
            return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True)

    def _watch(self, id: str, listener: subprocess.Popen[str]) -> None:
        said, _ = listener.communicate()
        if said:
            self.switched_off.append(id)
            self.end(id, "Client.InstanceInitiatedShutdown")
