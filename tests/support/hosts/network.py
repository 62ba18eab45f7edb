"""A network of test hosts on this machine: made, changed and removed with everything on it."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from . import keys, links
from .host import Host, Traffic
from .machine import HostsError, as_root, root, unavailable
from .place import SCRIPT, Place
from .runs import Run, claim, link, release, sweep
from .spec import HostSpec

__all__ = ["Network"]

_CLIENT = ["machine", "client"]
_PROXY_PORT = 3128


class Network:
    """Test hosts h0, h1, ... on a switch of their own, with this machine, a client and an outsider on it too.

    Use it in a `with`. Nothing of it outlives the process that made it, however that ends.
    """

    def __init__(
        self,
        hosts: int | Sequence[HostSpec] = 2,
        *,
        private: bool = False,
        star: bool = False,
        internet: bool = False,
        setenv: Mapping[str, str] | None = None,
        stays: bool = False,
        idle: bool = False,
    ) -> None:
        """`hosts`: how many, or what is special about each. `private`: a second network among the hosts, on priv0.

        `star`: hosts do not reach each other. `internet`: they reach the world through a proxy, by variables that every
        login finds. `setenv`: further variables that every login finds. `idle`: hosts begin with `Host.boot`.
        """
        self.setenv = dict(setenv or {})
        self._specs = [HostSpec()] * hosts if isinstance(hosts, int) else list(hosts)
        self._private = private
        self._star = star
        self._internet = internet
        self._stays = stays
        self._idle = idle
        self._made: list[Place] = []
        self._proxy: subprocess.Popen[bytes] | None = None
        self._run: Run | None = None

    def __enter__(self) -> Network:
        self.open()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Host]:
        return iter(self.hosts)

    def __getitem__(self, index: int) -> Host:
        return self.hosts[index]

    def open(self) -> None:
        """Makes everything; what was made is taken down again when something fails."""
        if reason := unavailable():
            raise HostsError(reason)
        self._run = claim(self._stays)
        try:
            self._open(self._run)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Removes everything, hosts first."""
        run, self._run = self._run, None
        if run is None or run.owner != os.getpid():
            return
        if self._proxy is not None:
            self._proxy.communicate()  # it ends with its input
        for host in getattr(self, "hosts", []):
            host.close()
        root(["ip", "link", "delete", link(run.number)], check=False)
        for place in reversed(self._made):
            place.close()
        if run.directory.exists():  # the switch takes it along, unless it never came to be
            root(["rm", "-rf", str(run.directory)])
        release(run.number)
        sweep()

    def bring_up(self, hosts: Sequence[Host]) -> None:
        """Makes hosts again, all at the same time."""
        for port in (port for host in hosts for port in host.ports):
            self.switch.run(["ip", "link", "delete", port.name], kinds=["net"], check=False)  # it may linger
        begun = {host.begin(): host.ports for host in hosts}
        self._settle(begun)
        self._note({place.name: place.pid for place in begun})

    @property
    def config(self) -> Path:
        """An ssh config with the aliases h0, h1, ...: `ssh -F config h0`."""
        return self.directory / "ssh" / "config"

    @property
    def known_hosts(self) -> Path:
        """The host keys, as they were when the hosts were made."""
        return self.directory / "ssh" / "known_hosts"

    @property
    def key(self) -> Path:
        """The private key that logs in to all hosts."""
        return self.directory / "ssh" / "id_ed25519"

    @property
    def address(self) -> str:
        """This machine's own address on the network."""
        return self._at

    def ssh_config(self, home: Path) -> None:
        """Puts config, key and known hosts into `home`/.ssh, for programs that run with that HOME."""
        directory = home / ".ssh"
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        (directory / "config").write_text(self.config.read_text())
        (directory / "known_hosts").write_text(self.known_hosts.read_text())

    def client_command(self, argv: Sequence[str]) -> list[str]:
        """The command that runs this in the client's own namespace, as the present user; the rest is this machine's."""
        who = (
            []
            if os.geteuid() == 0
            else ["setpriv", f"--reuid={os.getuid()}", f"--regid={os.getgid()}", "--init-groups"]
        )
        return self.client.entered([*who, *argv])

    def client_run(self, argv: Sequence[str], **options: Any) -> subprocess.CompletedProcess[Any]:
        """Runs a program in the client's own namespace; `options` are those of subprocess.run."""
        argv = self.client_command(argv)
        return cast("subprocess.CompletedProcess[Any]", subprocess.run(argv, **options))

    def cut_client(self) -> None:
        """Everything to and from the client, in its own namespace or on this machine, is lost, silently."""
        self.nft(links.cut(_CLIENT))

    def heal_client(self) -> None:
        """Undoes `cut_client`."""
        self.nft(links.heal(_CLIENT))

    def move_client(self, last: int) -> str:
        """Gives this machine another address on the network, as a laptop gets in another one; returns it."""
        port = self.ports[0]
        new = f"{port.address.rpartition('.')[0]}.{last}"
        length = "24" if self._at == port.address else "32"
        root(["ip", "-batch", "-"], links.move(port, f"{self._at}/{length}", new))
        self._at = new
        return new

    def slow_client(self, mbit: float | None) -> None:
        """Limits what goes to the client and what comes from it; None undoes it."""
        for port in self.ports[:2]:
            self.switch.run(["tc", *links.shape(port.name, mbit)], kinds=["net"], check=mbit is not None)
        root(["tc", *links.shape(self.ports[0].interface, mbit)], check=mbit is not None)
        self.client.run(["tc", *links.shape("eth0", mbit)], kinds=["net"], check=mbit is not None)

    def client_bytes(self) -> Traffic:
        """What the client, in its own namespace and on this machine, has received and sent."""
        counted = self.counters()
        return Traffic(*(sum(counted[name][way] for name in _CLIENT) for way in (0, 1)))

    def scan(self, address: str) -> list[int]:
        """The TCP ports of an address that accept a connection from outside."""
        script = str(Path(__file__).with_name("scan.py"))
        return json.loads(self.outside.run([*SCRIPT, script, address]))

    def nft(self, text: str) -> None:
        """Changes what is lost in the switch."""
        self.switch.run(["nft", "-f", "-"], text, kinds=["net"])

    def counters(self) -> dict[str, tuple[int, int]]:
        """Bytes received and sent by the far end of each port of the switch."""
        return links.port_counters(self.switch.run(["cat", "/proc/net/dev"], kinds=["net"]))

    def _open(self, run: Run) -> None:
        self.directory = run.directory
        self.ports = links.ports(run.number, len(self._specs), self._private, link(run.number))
        (self.directory / "ssh").mkdir(mode=0o700)
        (self.directory / "keys").mkdir(mode=0o700)
        quiet = {f"net/ipv6/conf/{name}/disable_ipv6": "1" for name in ("all", "default")}
        spec = {"sysctl": quiet, "ip": "link set lo up\n" + links.switch(), "remove": str(run.directory)}
        self.switch = self._place("switch", ["mnt", "net"], spec)
        names = [] if self._idle else [f"h{index}" for index in range(len(self._specs))]
        keys.make_keys([self.key, *(self.directory / "keys" / name for name in names)])
        self._settle({self.switch: []})
        self.nft(links.filters(self.ports, self._star))
        others = {port.name: (self._end(port), [port]) for port in self.ports[1 : 4 if self._internet else 3]}
        self.client, self.outside = others["client"][0], others["outside"][0]
        if self._internet:
            self.setenv = {**_proxied(self.ports[3].address), **self.setenv}
        self.hosts = [Host(self, index, spec) for index, spec in enumerate(self._specs)]
        if not self._idle:
            self._write_ssh()
        machine = self.ports[0]
        self._at = machine.address
        self._wire([(machine, os.getpid())])
        root(["ip", "-batch", "-"], links.inside(machine, self.ports))
        begun = {} if self._idle else {host.begin(): host.ports for host in self.hosts}
        self._settle({**dict(others.values()), **begun})
        self._note({place.name: place.pid for place in (*self._made, *begun)})
        if self._internet:
            self._start_proxy(others["gateway"][0])

    def _end(self, port: links.Port) -> Place:
        return self._place(port.name, ["net"], {"ip": "link set lo up\n" + links.inside(port, self.ports)})

    def _place(self, name: str, new: Sequence[str], spec: Mapping[str, Any]) -> Place:
        place = Place(name, self.directory / f"{name}.log", new, spec)
        self._made.append(place)
        return place

    def _settle(self, places: Mapping[Place, Sequence[links.Port]]) -> None:
        """Wires places to the switch and waits until they are there."""
        for place in places:
            place.made()
        self._wire([(port, place.pid) for place, ports in places.items() for port in ports])
        for place in places:
            place.go()
        for place in places:
            place.ready()

    def _wire(self, ends: Sequence[tuple[links.Port, int]]) -> None:
        if ends:
            self.switch.run(["ip", "-batch", "-"], "".join(links.join(*end) for end in ends), kinds=["net"])
            self.switch.run(["bridge", "-batch", "-"], "".join(links.fdb(port) for port, _ in ends), kinds=["net"])

    def _note(self, pids: Mapping[str, int]) -> None:
        """Writes down what has to end with this run, for whoever sweeps after us."""
        assert self._run
        addresses = {host.name: host.address for host in self.hosts}
        self._run = replace(self._run, pids={**self._run.pids, **pids}, addresses=addresses)
        self._run.write()

    def _write_ssh(self) -> None:
        self.known_hosts.write_text("".join(keys.host_line(h.address, h.port, h.host_key) for h in self.hosts))
        settings = [keys.user_settings(h.name, h.address, h.port, self.key, self.known_hosts) for h in self.hosts]
        self.config.write_text("".join(settings))

    def _start_proxy(self, gateway: Place) -> None:
        script = str(Path(__file__).with_name("proxy.py"))
        argv = [*SCRIPT, script, str(gateway.pid), str(_PROXY_PORT), str(os.getpid())]
        log = (self.directory / "proxy.log").open("w")
        with log:
            self._proxy = subprocess.Popen(
                as_root(argv), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env={"PATH": os.defpath}
            )
        assert self._proxy.stdout
        if not self._proxy.stdout.readline():
            raise HostsError(f"The proxy of the test hosts did not start: {(self.directory / 'proxy.log').read_text()}")


def _proxied(address: str) -> dict[str, str]:
    proxy = f"http://{address}:{_PROXY_PORT}"
    names = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")
    return {**dict.fromkeys(names, proxy), **dict.fromkeys(("no_proxy", "NO_PROXY"), "localhost,127.0.0.1,10.0.0.0/8")}
