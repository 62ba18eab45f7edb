"""One test host: what can be asked of it and what can be done to it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from . import keys, links, look
from .machine import HostsError, root
from .place import SCRIPT, Place
from .spec import USERS, HostSpec, describe

if TYPE_CHECKING:
    from .network import Network

__all__ = ["Host", "Listener", "Process", "Traffic"]

_PATH = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"
_CLIENT = ("machine", "client")


class Traffic(NamedTuple):
    """Bytes that have come and gone by a link."""

    received: int
    sent: int


class Process(NamedTuple):
    """A process on a host, with its number there."""

    pid: int
    user: str
    argv: list[str]


class Listener(NamedTuple):
    """A listening TCP socket on a host."""

    address: str
    port: int
    user: str


class Host:
    """A host of a `Network`, reached by ssh at `address`. Everything on it dies with its first process."""

    def __init__(self, network: Network, index: int, spec: HostSpec) -> None:
        self.network = network
        self.name = f"h{index}"
        self.spec = spec
        self.ports = [port for port in network.ports if port.place == self.name]
        self.address = self.ports[0].address
        self.private_address = self.ports[1].address if len(self.ports) > 1 else None
        self.port = spec.port
        self.host_key = network.directory / "keys" / self.name
        self.login_key = network.key
        self._directory = network.directory / self.name
        self._mbit: float | None = None
        self._place: Place | None = None

    def __repr__(self) -> str:
        return f"<Host {self.name} {self.address}{'' if self.alive else ' dead'}>"

    @property
    def alive(self) -> bool:
        """Whether its first process is there."""
        return self._place is not None and self._place.alive

    @property
    def place(self) -> Place:
        """The namespaces of the host, while it is alive."""
        if self._place is None or not self._place.alive:
            raise HostsError(f"{self.name} is dead; restart() brings it back.")
        return self._place

    def begin(self) -> Place:
        """Starts to make the host; `Network.bring_up` goes on with it."""
        if self.spec.sudo and not shutil.which("sudo"):
            raise HostsError(f"{self.name} is to have sudo, and this machine has none; install it, or make it without.")
        net = self.network
        lines = "link set lo up\n" + "".join(links.inside(port, net.ports) for port in self.ports)
        if self.spec.bare:
            self._place = Place(self.name, net.directory / f"{self.name}.log", ["net", "pid"], {"ip": lines})
            return self._place
        home = self._directory / "home"
        if not home.exists():
            home.mkdir(parents=True)
            if self.spec.home_size:
                size = ["-o", f"size={self.spec.home_size},mode=755"]
                self.network.switch.run(["mount", "-t", "tmpfs", *size, "tmpfs", str(home)], kinds=["mnt"])
        self._place = Place(
            self.name,
            net.directory / f"{self.name}.log",
            ["mnt", "uts", "ipc", "net", "pid"],
            {
                "mounts_of": net.switch.pid,
                "ip": lines,
                "host": describe(self.spec, self._directory, self.host_key, self.login_key, net.setenv),
            },
        )
        return self._place

    def kill(self, silent: bool = False) -> None:
        """Kills everything on the host, at once.

        As after any kill -9, the kernel closes the sockets, so that peers see the end or a reset, and it refuses new
        connections. `silent`: the links are cut first, as when the power goes: peers see nothing at all.
        """
        if silent:
            self.cut()
        if self._place is not None:
            self._place.kill()

    def close(self) -> None:
        """Ends the host for good."""
        if self._place is not None:
            self._place.kill()
            self._place.close()

    def boot(self, host_key: Path, login_key: Path) -> None:
        """Starts the host as one that nobody has used before, known by one key, let into with the other (its .pub)."""
        self.close()
        root(["rm", "-rf", str(self._directory)])
        self.host_key, self.login_key = host_key, login_key
        self.network.bring_up([self])
        self.heal()

    def restart(self) -> None:
        """Starts the host anew (killing what is left), with the same address, host key and homes, and whole links."""
        self.close()
        self.network.bring_up([self])
        self.heal()
        if self._mbit is not None:
            self.slow(self._mbit)

    def freeze(self) -> None:
        """Stops every process on the host: they answer nothing, though its kernel still does."""
        self._signal_all("STOP")

    def thaw(self) -> None:
        """Lets stopped processes go on."""
        self._signal_all("CONT")

    def swap_host_key(self) -> None:
        """Gives sshd another host key, that nobody has been told of; open connections stay."""
        keys.make_keys([self.host_key])
        self.put("/etc/ssh/ssh_host_ed25519_key", self.host_key.read_bytes(), mode="600")
        self.run(["sh", "-c", "kill -HUP $(cat /run/sshd.pid)"], user="root")
        public = self.host_key.with_suffix(".pub").read_text().split()[1]
        scan = ["ssh-keyscan", "-T", "2", "-t", "ed25519", "-p", str(self.port), "127.0.0.1"]
        deadline = time.monotonic() + 60
        while public not in self.run(scan, user="root", check=False).stdout:
            if time.monotonic() > deadline:
                raise HostsError(f"sshd of {self.name} did not take its new host key; it said: {self.log[-2000:]}")

    def cut(self) -> None:
        """Everything to and from the host is lost, silently."""
        self.network.nft(links.cut([port.name for port in self.ports]))

    def heal(self) -> None:
        """Undoes `cut`."""
        self.network.nft(links.heal([port.name for port in self.ports]))

    def cut_from(self, other: Host) -> None:
        """Everything between the two hosts is lost, silently."""
        self.network.nft(links.part(self._pairs(other)))

    def heal_from(self, other: Host) -> None:
        """Undoes `cut_from`."""
        self.network.nft(links.part(self._pairs(other), again=True))

    def cut_client(self) -> None:
        """Everything between the client and this host is lost, silently; the host's peers still reach it."""
        self.network.nft(links.part([(self.name, name) for name in _CLIENT]))

    def heal_client(self) -> None:
        """Undoes `cut_client` and `reset_client`."""
        self.network.nft(links.part([(self.name, name) for name in _CLIENT], again=True))
        self.place.run(["nft", "-f", "-"], links.refuse([]), kinds=["net"])

    def reset_client(self) -> None:
        """Connections between the client and this host are reset, and new ones refused, until `heal_client`."""
        addresses = [port.address for port in self.network.ports if port.name in _CLIENT]
        self.place.run(["nft", "-f", "-"], links.refuse(addresses), kinds=["net"])

    def admit(self, addresses: Sequence[str]) -> None:
        """Only these addresses reach its sshd from now on; what others send is lost, also on open connections."""
        self.place.run(["nft", "-f", "-"], links.admit(addresses, self.port), kinds=["net"])

    def lossy(self, percent: int) -> None:
        """This part of the packets to and from the host is lost, at random; 0 undoes it."""
        self.network.nft("".join(links.lose(port.name, percent) for port in self.ports))

    def slow(self, mbit: float | None) -> None:
        """Limits what goes to the host and what comes from it; None undoes it."""
        self._mbit = mbit
        for port in self.ports:
            self.network.switch.run(["tc", *links.shape(port.name, mbit)], kinds=["net"], check=mbit is not None)
            self.place.run(["tc", *links.shape(port.interface, mbit)], kinds=["net"], check=mbit is not None)

    def bytes(self, private: bool = False) -> Traffic:
        """What the host has received and sent since it was started, by its first link or its private one."""
        return Traffic(*self.network.counters()[self.ports[1 if private else 0].name])

    def fill_disk(self, path: str = "/home", leave: int = 0) -> None:
        """Fills /home or /tmp, which must have been made with a size, but for `leave` bytes."""
        if not {"/home": self.spec.home_size, "/tmp": self.spec.tmp_size}.get(path):
            raise HostsError(
                f"{path} of {self.name} has no size of its own; make it with HostSpec(home_size=, tmp_size=)."
            )
        free = f"$(($(df -B1 --output=avail {path} | tail -n 1) - {leave}))"
        self.run(["sh", "-c", f"head -c {free} /dev/zero > {path}/.filler"], user="root")

    def free_disk(self, path: str = "/home") -> None:
        """Undoes `fill_disk`."""
        self.run(["rm", "-f", f"{path}/.filler"], user="root")

    def command(self, argv: Sequence[str], user: str = "sky") -> list[str]:
        """The command that runs this on the host, without ssh, as a user with a plain login's environment."""
        number = {"root": 0, **USERS}[user]
        home = "/root" if user == "root" else f"/home/{user}"
        plain = {"HOME": home, "USER": user, "LOGNAME": user, "SHELL": "/bin/bash", "PATH": _PATH}
        plain |= {**self.network.setenv, **self.spec.setenv}
        who = ["setpriv", f"--reuid={number}", f"--regid={number}", "--init-groups", "--"]
        return self.place.entered([*who, "env", "-i", "-C", home, *(f"{k}={v}" for k, v in plain.items()), *argv])

    def run(
        self, argv: Sequence[str], user: str = "sky", data: str = "", check: bool = True, timeout: float = 120
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command on the host to its end, without ssh."""
        limited = self.command(["timeout", "-s", "KILL", str(timeout), *argv], user)
        done = subprocess.run(
            limited, input=data, capture_output=True, text=True, errors="surrogateescape", check=False
        )
        if check and done.returncode:
            said = done.stderr.strip() or done.stdout.strip()
            raise HostsError(f"`{' '.join(argv)}` failed on {self.name} with exit code {done.returncode}: {said}")
        return done

    def start(self, argv: Sequence[str], user: str = "sky", **options: Any) -> subprocess.Popen[Any]:
        """Starts a command on the host, without ssh; it dies with the host. `options` are those of Popen."""
        options.setdefault("stdin", subprocess.DEVNULL)
        return subprocess.Popen[Any](self.command(argv, user), **options)

    def read(self, path: str) -> str:
        """What is in a file of the host."""
        return self.run(["cat", "--", path], user="root").stdout

    def put(self, path: str, content: bytes, user: str = "root", mode: str = "644") -> None:
        """Writes a file of the host."""
        script = 'cat > "$0" && chmod "$1" "$0"'
        self.run(["sh", "-c", script, path, mode], user=user, data=content.decode("utf-8", "surrogateescape"))

    def processes(self, user: str | None = None) -> list[Process]:
        """What runs on the host, but its first process, with user and command line."""
        return [row for row in map(Process._make, self._look("processes")) if user in (None, row.user)]

    def listeners(self, user: str | None = None) -> list[Listener]:
        """The TCP sockets on which something listens, with address and user."""
        return [row for row in map(Listener._make, self._look("listeners")) if user in (None, row.user)]

    def open_ports(self) -> list[int]:
        """The ports, of all 65535, that answer from outside the pool: neither the client nor a host is asking."""
        return self.network.scan(self.address)

    def signal(self, pid: int, name: str = "KILL") -> None:
        """Sends a signal to a process, by its number on the host."""
        self.run(["kill", f"-{name}", str(pid)], user="root")

    @property
    def log(self) -> str:
        """What the host's sshd has said."""
        return self.read("/run/sshd.log")

    def _pairs(self, other: Host) -> list[tuple[str, str]]:
        return [(mine.name, its.name) for mine, its in zip(self.ports, other.ports, strict=True)]

    def _signal_all(self, name: str) -> None:
        # -1 is everything that the sender sees, but the host's first process and the sender.
        self.place.run(["/bin/bash", "-c", f"kill -{name} -1"])

    def _look(self, what: str) -> list[Any]:
        if os.geteuid() == 0:
            return list({"processes": look.processes, "listeners": look.listeners}[what](self.place.pid))
        script = str(Path(look.__file__))
        return json.loads(root([*SCRIPT, script, what, str(self.place.pid)]))
