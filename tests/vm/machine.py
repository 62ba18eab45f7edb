"""One Ubuntu machine in QEMU that takes itself for an EC2 instance: its DMI, DHCP and metadata are like EC2's.

It takes the place of a bare test host, so that its wire can be cut, slowed and counted like a host's:

    the test network ── eth0 ┐
                             ├ bridge "lan", in the host's namespace: gateway, DHCP and metadata, for this machine only
    QEMU ────────────── tap0 ┘
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from tests.support.cloud import Instance, metadata
from tests.support.hosts import Host, HostsError
from tests.support.hosts.place import SCRIPT
from tests.vm.image import Disk

__all__ = ["Machine"]

_ACCEL = os.environ.get("SKYWARD_VM_ACCEL", "tcg")
_METADATA = "169.254.169.254"
_WIRES = """\
addr flush dev eth0
link set eth0 down
link set eth0 address {spare}
link add name lan type bridge
link set lan address {gateway_hardware}
link set eth0 master lan up
tuntap add name tap0 mode tap
link set tap0 master lan up
addr add {gateway}/24 dev lan
addr add {metadata}/32 dev lan
link set lan up
"""
# What the bridge itself says and hears is for this machine alone. There is no route from here to anywhere else.
_FILTERS = """\
table bridge own {{
  chain heard {{ type filter hook input priority 0; iifname "eth0" drop; }}
  chain said {{ type filter hook output priority 0; oifname "eth0" drop; }}
  chain passed {{
    type filter hook forward priority 0;
    arp daddr ip {{ {metadata}, {gateway} }} drop
    udp dport {{ 67, 68 }} drop
  }}
}}
"""


class Machine:
    """A machine that boots with an instance's user data. `ended` is called when it has switched itself off."""

    def __init__(self, host: Host, disk: Disk, directory: Path, instance: Instance, ended: Callable[[], None]) -> None:
        self.host = host
        self.disk = disk
        self.directory = directory
        self.instance = instance
        self.started = 0.0
        """When QEMU was started, by time.monotonic()."""
        self.dhcp_delay = 0.0
        """Seconds that the machine waits for its address."""
        self._ended = ended
        self._processes: list[subprocess.Popen[bytes]] = []
        self._threads: list[threading.Thread] = []
        self._stopping = threading.Event()

    @property
    def console(self) -> str:
        """All that the machine has written to its serial line."""
        path = self.directory / "console"
        return path.read_text(errors="replace") if path.exists() else ""

    @property
    def metadata(self) -> Path:
        """The directory that the metadata service serves."""
        return self.directory / "metadata"

    def start(self) -> None:
        """Switches the machine on; back at once."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self.host.boot(self.directory / "none", self.directory / "none")
        self._wire()
        self._write_facts()
        self._serve_metadata()
        self._serve_dhcp()
        self._run_qemu()

    def stop(self) -> None:
        """Pulls the plug; nothing of it runs afterwards."""
        self._stopping.set()
        self.host.kill()
        for process in self._processes:
            process.wait(60)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(60)

    def run(self, script: str, key: Path, user: str = "ubuntu", timeout: float = 120.0) -> str:
        """What a script says that runs on the machine as root, by ssh with the login key of its instance's pool."""
        argv = ["ssh", "-i", str(key), "-o", "BatchMode=yes", "-o", "UserKnownHostsFile=/dev/null", "-F", "none"]
        argv += ["-o", "StrictHostKeyChecking=no", "-o", "LogLevel=ERROR", f"{user}@{self.host.address}"]
        done = subprocess.run(
            [*argv, "sudo sh -s"], input=script, capture_output=True, text=True, timeout=timeout, check=False
        )
        if done.returncode:
            raise HostsError(f"on {self.instance.id}, this failed with {done.returncode}:\n{script}\n{done.stderr}")
        return done.stdout

    def _wire(self) -> None:
        parts = self.host.address.split(".")
        gateway = ".".join([*parts[:3], "254"])
        words = {
            "gateway": gateway,
            "metadata": _METADATA,
            "spare": "02:01:" + ":".join(f"{int(part):02x}" for part in parts),
            "gateway_hardware": "02:02:" + ":".join(f"{int(part):02x}" for part in parts),
        }
        place = self.host.place
        place.run(["ip", "-batch", "-"], _WIRES.format(**words), kinds=["net"])
        place.run(["nft", "-f", "-"], _FILTERS.format(**words), kinds=["net"])
        place.run(["sh", "-c", "echo 0 > /proc/sys/net/ipv4/ip_forward"], kinds=["net"])
        self._gateway = gateway

    def _write_facts(self) -> None:
        one, address, hardware = self.instance, self.host.address, self.host.ports[0].hardware
        name = f"ip-{address.replace('.', '-')}.ec2.internal"
        network = ".".join([*address.split(".")[:3], "0/24"])
        card = f"network/interfaces/macs/{hardware}"
        facts = {
            "ami-id": "ami-0123456789abcdef0",
            "hostname": name,
            "instance-id": one.id,
            "instance-life-cycle": one.market,
            "instance-type": one.kind,
            "local-hostname": name,
            "local-ipv4": address,
            "mac": hardware,
            "placement/availability-zone": one.zone,
            "placement/region": one.region,
            "public-keys/0/openssh-key": one.public_key + "\n",
            f"{card}/device-number": "0",
            f"{card}/interface-id": "eni-0123456789abcdef0",
            f"{card}/local-ipv4s": address,
            f"{card}/mac": hardware,
            f"{card}/subnet-ipv4-cidr-block": network,
            f"{card}/vpc-ipv4-cidr-block": network,
        }
        for path, fact in facts.items():
            metadata.write(self.metadata, f"meta-data/{path}", fact)
        metadata.write(self.metadata, "user-data", one.user_data)
        identity = {"instanceId": one.id, "region": one.region, "availabilityZone": one.zone, "instanceType": one.kind}
        metadata.write(self.metadata, "dynamic/instance-identity/document", json.dumps(identity))

    def _serve_metadata(self) -> None:
        service = self._spawn([*SCRIPT, metadata.__file__, str(self.metadata)], "metadata", subprocess.PIPE)
        assert service.stdout is not None
        with service.stdout:
            if not service.stdout.readline():
                said = (self.directory / "metadata.log").read_text()
                raise HostsError(f"The metadata service of {self.instance.id} did not start; it said: {said}")

    def _serve_dhcp(self) -> None:
        address = self.host.address
        argv = ["dnsmasq", "--keep-in-foreground", "--port=0", "--interface=lan", "--bind-interfaces", "--user=root"]
        argv += ["--conf-file=/dev/null", "--log-facility=-", f"--pid-file={self.directory / 'dhcp.pid'}"]
        argv += [f"--dhcp-leasefile={self.directory / 'leases'}", "--dhcp-authoritative", "--log-dhcp"]
        argv += [f"--dhcp-range={address},{address},255.255.255.0,1h"]
        argv += [f"--dhcp-host={self.host.ports[0].hardware},{address}"]
        argv += [f"--dhcp-option=option:router,{self._gateway}", f"--dhcp-option=option:dns-server,{self._gateway}"]
        argv += ["--dhcp-option=option:mtu,1500"]

        def late() -> None:
            if not self._stopping.wait(self.dhcp_delay):
                self._spawn(argv, "dhcp")

        if self.dhcp_delay:
            self._begin(late)
        else:
            self._spawn(argv, "dhcp")

    def _run_qemu(self) -> None:
        disk = self.directory / "disk.qcow2"
        make = ["qemu-img", "create", "-q", "-f", "qcow2", "-F", "raw", "-b", str(self.disk.image), str(disk)]
        subprocess.run(make, check=True)
        serial = f"ec2{uuid.uuid4().hex[3:8]}-{str(uuid.uuid4())[9:]}"
        argv = ["nice", "-n", "15", "qemu-system-x86_64", "-display", "none", "-m", "1536", "-smp", "1"]
        argv += ["-accel", "kvm", "-cpu", "host"] if _ACCEL == "kvm" else ["-accel", "tcg", "-cpu", "max"]
        argv += ["-kernel", str(self.disk.kernel), "-initrd", str(self.disk.initrd)]
        argv += ["-append", "root=/dev/vda rw console=ttyS0 panic=10"]
        argv += ["-serial", f"file:{self.directory / 'console'}", "-device", "virtio-rng-pci"]
        argv += ["-drive", f"file={disk},if=virtio,cache=unsafe,format=qcow2"]
        argv += ["-netdev", "tap,id=lan,ifname=tap0,script=no,downscript=no"]
        argv += ["-device", f"virtio-net-pci,netdev=lan,mac={self.host.ports[0].hardware}"]
        kind = f"manufacturer=Amazon EC2,product={self.instance.kind},uuid={serial},serial={serial}"
        argv += ["-smbios", f"type=1,{kind}", "-smbios", "type=0,vendor=Amazon EC2"]
        self.started = time.monotonic()
        qemu = self._spawn(argv, "qemu")

        def watch() -> None:
            qemu.wait()
            if not self._stopping.is_set():
                self._ended()

        self._begin(watch)

    def _begin(self, what: Callable[[], None]) -> None:
        thread = threading.Thread(target=what, daemon=True, name=f"machine {self.instance.id}")
        thread.start()
        self._threads.append(thread)

    def _spawn(self, argv: list[str], name: str, output: int | None = None) -> subprocess.Popen[bytes]:
        """A program in the host's network, which dies with the host."""
        with (self.directory / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                self.host.place.entered(argv, kinds=["net", "pid"]),
                stdin=subprocess.DEVNULL,
                stdout=log if output is None else output,
                stderr=log,
            )
        self._processes.append(process)
        return process
