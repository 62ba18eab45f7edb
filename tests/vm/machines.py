"""Real Ubuntu machines behind the instances of the test cloud: each boots with exactly its user data."""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from tests.support.cloud import Instance, metadata
from tests.support.hosts import Network
from tests.support.userdata import check
from tests.vm.image import PLAIN, Files, disk
from tests.vm.machine import Machine

__all__ = ["Machines"]


class Machines:
    """The test cloud's `Hooks`: a machine in QEMU for every instance."""

    def __init__(self, network: Network, directory: Path) -> None:
        self.of: dict[str, Machine] = {}
        """Instance -> its machine, also when it is gone."""
        self.switched_off: list[str] = []
        """Instances that have ended themselves."""
        self.end: Callable[[str, str], None] = lambda id, reason: None
        """What tells the cloud that a machine has ended itself."""
        self.release = "24.04"
        """Which Ubuntu machines yet to come have."""
        self.files: Files = PLAIN
        """Which files are put into the image of machines yet to come."""
        self.dhcp_delay = 0.0
        """How long machines yet to come wait for their address."""
        self.timed = True
        """Whether machines yet to come are asked, every second, whether their sshd answers."""
        self.answered: dict[str, float] = {}
        """Instance -> seconds from power-on until its sshd answered."""
        self._free = deque(network.hosts)
        self._directory = directory

    def machine_started(self, instance: Instance) -> None:
        """Switches a machine on. As on EC2, it counts as running long before it lets anybody in."""
        check(instance.user_data)
        host = self._free.popleft()
        instance.private_ip = host.address
        instance.public_ip = instance.public_ip and host.address
        made = disk(self.release, self.files)
        machine = Machine(host, made, self._directory / instance.id, instance, lambda: self._switched_off(instance.id))
        machine.dhcp_delay = self.dhcp_delay
        self.of[instance.id] = machine
        machine.start()
        if self.timed:
            threading.Thread(target=self._time, args=(machine,), daemon=True).start()

    def machine_terminated(self, instance: Instance) -> None:
        """Pulls the plug of a machine that is still on."""
        machine = self.of.get(instance.id)
        if machine is not None:
            machine.stop()
            self._free.append(machine.host)

    def machine_noticed(self, instance: Instance, deadline: float) -> None:
        """Has its metadata service tell it."""
        metadata.notice(self.of[instance.id].metadata, deadline)

    def _switched_off(self, id: str) -> None:
        self.switched_off.append(id)
        self.end(id, "Client.InstanceInitiatedShutdown")

    def _time(self, machine: Machine) -> None:
        """Notes when sshd first says who it is; asked seldom, so that it disturbs nothing."""
        while machine.host.alive:
            try:
                with socket.create_connection((machine.host.address, 22), timeout=5) as caller:
                    if caller.recv(4) == b"SSH-":
                        self.answered[machine.instance.id] = time.monotonic() - machine.started
                        return
            except OSError:
                pass
            time.sleep(1)
