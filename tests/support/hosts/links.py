"""The wires of the test network, as text for ip, bridge, nft and tc.

    this machine ── machine ┐                        ┌ h0 ── eth0 of host 0
    client ──────── client ─┤ bridge "lan", in the   ├ h1 ── eth0 of host 1
    outside ────── outside ─┤ switch's own namespace ├ ...
    gateway ────── gateway ─┘                        └        and a bridge "priv" with p0, p1, ... for the hosts' priv0

All addresses are known in advance and so are the hardware addresses: nobody has to ask, so that a cut link is silence
and not "no route to host", and no frame is sent to a place that it is not for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = [
    "Port",
    "admit",
    "cut",
    "fdb",
    "filters",
    "heal",
    "inside",
    "join",
    "lose",
    "move",
    "part",
    "port_counters",
    "ports",
    "refuse",
    "shape",
    "switch",
]

PLACES = {"machine": 1, "client": 2, "outside": 3, "gateway": 4}
_FIRST_HOST = 10


@dataclass(frozen=True)
class Port:
    """One end of a wire: a port of a bridge in the switch, and the interface and address at the other end."""

    name: str
    place: str
    interface: str
    address: str
    bridge: str

    @property
    def hardware(self) -> str:
        """The hardware address, which follows from the address."""
        return "02:00:" + ":".join(f"{int(part):02x}" for part in self.address.split("."))


def ports(number: int, hosts: int, private: bool, machine: str) -> list[Port]:
    """All wires of a network, the other places' first, then the hosts'."""
    found = [
        Port(name, name, machine if name == "machine" else "eth0", f"10.77.{number}.{last}", "lan")
        for name, last in PLACES.items()
    ]
    for index in range(hosts):
        last = _FIRST_HOST + index
        found.append(Port(f"h{index}", f"h{index}", "eth0", f"10.77.{number}.{last}", "lan"))
        if private:
            found.append(Port(f"p{index}", f"h{index}", "priv0", f"10.78.{number}.{last}", "priv"))
    return found


def switch() -> str:
    """For `ip -batch` in the switch: the two bridges."""
    return "".join(f"link add name {bridge} type bridge\nlink set {bridge} up\n" for bridge in ("lan", "priv"))


def join(port: Port, pid: int) -> str:
    """For `ip -batch` in the switch: the wire from a port to the namespace of a process."""
    peer = f"peer name {port.interface} address {port.hardware} netns {pid}"
    return f"link add name {port.name} type veth {peer}\nlink set {port.name} master {port.bridge} up\n"


def fdb(port: Port) -> str:
    """For `bridge -batch` in the switch: frames for this address leave by this port only."""
    return f"fdb replace {port.hardware} dev {port.name} master static\n"


def inside(port: Port, everyone: Iterable[Port]) -> str:
    """For `ip -batch` at the far end: its address, and how to reach the others on the same bridge."""
    lines = [f"addr add {port.address}/24 dev {port.interface}", f"link set {port.interface} up"]
    lines += [
        f"neigh replace {other.address} lladdr {other.hardware} dev {port.interface} nud permanent"
        for other in everyone
        if other.bridge == port.bridge and other != port
    ]
    return "\n".join(lines) + "\n"


def filters(everyone: Sequence[Port], star: bool) -> str:
    """For `nft -f` in the switch: what may be lost, none of it lost yet; in a star, hosts have no way to each other."""
    hosts = ", ".join(f'"{port.name}"' for port in everyone if port.place not in PLACES)
    own = "".join(
        f'    iifname "{p.name}" jump loss_{p.name}\n    oifname "{p.name}" jump loss_{p.name}\n' for p in everyone
    )
    return f"""table bridge faults {{
  set lost {{ typeof iifname; }}
  set apart {{ typeof iifname . oifname; }}
{"".join(f"  chain loss_{port.name} {{ }}{chr(10)}" for port in everyone)}
  chain forward {{
    type filter hook forward priority 0;
    iifname @lost drop
    oifname @lost drop
    iifname . oifname @apart drop
{f"    iifname {{ {hosts} }} oifname {{ {hosts} }} drop" if star and hosts else ""}
{own}
  }}
}}
"""


def cut(names: Iterable[str]) -> str:
    """For `nft -f` in the switch: whatever goes through these ports is lost without a word."""
    return f"add element bridge faults lost {{ {_quoted(names)} }}\n"


def heal(names: Iterable[str]) -> str:
    """For `nft -f` in the switch: the opposite of `cut`, also where nothing was cut."""
    return cut(names) + f"delete element bridge faults lost {{ {_quoted(names)} }}\n"


def part(pairs: Iterable[tuple[str, str]], again: bool = False) -> str:
    """For `nft -f` in the switch: whatever goes from one port to the other, either way, is lost; `again` undoes it."""
    elements = ", ".join(f'"{one}" . "{other}", "{other}" . "{one}"' for one, other in pairs)
    lines = f"add element bridge faults apart {{ {elements} }}\n"
    return lines + (f"delete element bridge faults apart {{ {elements} }}\n" if again else "")


def lose(name: str, percent: int) -> str:
    """For `nft -f` in the switch: this part of what goes through a port is lost, at random."""
    chance = "" if percent >= 100 else f"numgen random mod 100 < {percent}"
    rule = f"add rule bridge faults loss_{name} {chance} drop\n" if percent else ""
    return f"flush chain bridge faults loss_{name}\n{rule}"


def refuse(addresses: Sequence[str]) -> str:
    """For `nft -f` on a host: every packet to or from these addresses is reset; none: back to normal."""
    start = "table inet refused\ndelete table inet refused\n"
    if not addresses:
        return start
    chains = "".join(
        f"  chain {hook}s {{\n    type filter hook {hook} priority 0;\n"
        f"    ip {field} {{ {', '.join(addresses)} }} tcp flags & rst == 0 reject with tcp reset\n  }}\n"
        for hook, field in (("input", "saddr"), ("output", "daddr"))
    )
    return f"{start}table inet refused {{\n{chains}}}\n"


def admit(addresses: Sequence[str], port: int) -> str:
    """For `nft -f` on a host: packets to a port are lost, unless they come from these addresses, as in EC2's groups."""
    start = "table inet admitted\ndelete table inet admitted\n"
    some = f"ip saddr != {{ {', '.join(addresses)} }} " if addresses else ""
    rule = f"    iifname != lo {some}tcp dport {port} drop\n"
    return f"{start}table inet admitted {{\n  chain inputs {{\n    type filter hook input priority 0;\n{rule}  }}\n}}\n"


def move(port: Port, old: str, new: str) -> str:
    """For `ip -batch` at the far end: it has another address on the same wire; connections of the old one are dead."""
    network = f"{port.address.rpartition('.')[0]}.0/24"
    moved = [f"addr add {new}/32 dev {port.interface}", f"addr delete {old} dev {port.interface}"]
    return "\n".join([*moved, f"route replace {network} dev {port.interface} src {new}"]) + "\n"


def shape(interface: str, mbit: float | None) -> list[str]:
    """The arguments of `tc` that let so much out of an interface; None: as much as there is."""
    if mbit is None:
        return ["qdisc", "delete", "dev", interface, "root"]
    burst = max(32_000, int(mbit * 1e6 / 8 / 200))
    rate = ["rate", f"{mbit}mbit", "burst", str(burst), "latency", "100ms"]
    return ["qdisc", "replace", "dev", interface, "root", "tbf", *rate]


def port_counters(table: str) -> dict[str, tuple[int, int]]:
    """/proc/net/dev of the switch: for each port the bytes that the far end has received and sent."""
    rows = (row.split(":") for row in table.splitlines() if ":" in row)
    return {name.strip(): (int(words.split()[8]), int(words.split()[0])) for name, words in rows}


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)
