"""Checks hosts in parallel: each by itself, then the network between them."""

from __future__ import annotations

import ipaddress
import json
import math
import os
import secrets
import selectors
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from skyward.api.shell import Process, SshTarget
from skyward.errors import BootstrapError, SkywardError
from skyward.machines.parallel import each
from skyward.node import check_network
from skyward.setup.checks.findings import (
    Clock,
    Facts,
    Finding,
    Reached,
    agreement,
    cleaned,
    clock,
    facts_of,
    network_of,
    not_reached,
    printable,
    read,
)
from skyward.setup.env.script import check_script
from skyward.setup.local_shell import end_program
from skyward.setup.network import Address, Layout, blocked_pairs, candidates
from skyward.setup.ssh.shell import SshShell

__all__ = ["Session", "Wanted", "check"]


_LOOKING = 60.0  # seconds for a host's own facts: GPUs that sleep take twenty
_ANSWERING = 15.0
_MOST_ADDRESSES = 16
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Wanted:
    python: tuple[int, int]
    indexes: tuple[str, ...] = ()
    mesh: bool = False
    patience: float = 10.0


@dataclass
class _Host:
    name: str
    session: Session
    findings: list[Finding] = field(default_factory=list[Finding])
    facts: Facts | None = None
    token: str = ""
    addresses: list[Address] = field(default_factory=list[Address])
    ports: dict[str, int] = field(default_factory=dict[str, int])

    def add(self, *found: Finding) -> None:
        self.findings += found


def check(hosts: Mapping[str, SshTarget], wanted: Wanted) -> list[Finding]:
    checked = [_Host(name, Session(target)) for name, target in hosts.items()]
    try:
        each(lambda host: _look(host, wanted), checked)
        there = [host for host in checked if host.facts is not None]
        _try_network(there, len(checked), wanted)
        found = [finding for host in checked for finding in host.findings]
        found += agreement({host.name: host.facts for host in there if host.facts is not None})
        return [cleaned(finding) for finding in found]
    finally:
        each(lambda host: host.session.close(), checked)


def _look(host: _Host, wanted: Wanted) -> None:
    try:
        took = host.session.connect(wanted.patience)
    except BootstrapError as exc:
        host.add(not_reached(host.name, exc))
        return
    try:
        facts = host.session.facts(wanted.indexes, wanted.python, _LOOKING)
    except (SkywardError, subprocess.TimeoutExpired) as exc:
        host.add(Finding(host.name, "ssh", "problem", _why(exc)))
        return
    try:
        time = host.session.clock(_ANSWERING)
    except (SkywardError, subprocess.TimeoutExpired):
        time, facts.python = None, ""  # it answers to nothing more
    trip = "" if time is None else f", an answer takes {2000 * time.uncertain:.0f} ms"
    host.add(Finding(host.name, "ssh", "ok", f"logged in as {facts.user or '?'} in {took:.1f} s{trip}"))
    host.add(*facts_of(host.name, facts, wanted.python), clock(host.name, time))
    host.facts = facts


def _try_network(hosts: Sequence[_Host], named: int, wanted: Wanted) -> None:
    able = [host for host in hosts if host.facts is not None and host.facts.python]
    for host in hosts:
        if host not in able:
            text = "the network was not tried: there is no Python there for it"
            host.add(Finding(host.name, "network", "warning", text, "A pool brings one, and tries it when it opens"))
    token = secrets.token_hex(16)
    each(lambda host: _listen(host, token), able)
    ready = _different([host for host in able if host.addresses])
    if named < 2 or len(ready) < 2:
        return
    best: tuple[Layout, list[dict[int, tuple[str, float | None]]]] | None = None
    for addresses in candidates([host.addresses for host in ready]):
        answers = each(lambda source, chosen=addresses: _probe(source, ready, chosen), ready)
        reasons = {node: {other: why for other, (why, _) in found.items()} for node, found in enumerate(answers)}
        layout = Layout(addresses, blocked_pairs(reasons))
        if best is None or len(layout.blocked) < len(best[0].blocked):
            best = layout, answers
        if not layout.blocked:
            break
    if best is not None:
        _tell(ready, *best, wanted.mesh)


def _different(hosts: Sequence[_Host]) -> list[_Host]:
    first: dict[tuple[str, str], _Host] = {}
    for host in hosts:
        other = first.setdefault((host.addresses[0].ip, host.facts.boot if host.facts else ""), host)
        if other is not host:
            text = f"this is the same machine as {other.name} ({host.addresses[0].ip})"
            host.add(Finding(host.name, "network", "warning", text, "Name it once: each host is one node"))
    return list(first.values())


def _listen(host: _Host, token: str) -> None:
    try:
        host.session.start_program()
        found = host.session.order(_ANSWERING)
        host.token, addresses = token, _addresses(found.get("addresses"))
        ips = [_LOOPBACK, *(address.ip for address in addresses)]
        ports: Any = host.session.order(_ANSWERING, listen=ips, token=token).get("ports")
        host.ports = {ip: port for ip in ips if isinstance(ports, dict) and _is_port(port := cast(Any, ports).get(ip))}
    except (SkywardError, subprocess.TimeoutExpired) as exc:
        host.add(Finding(host.name, "network", "warning", f"the network was not tried: {_why(exc)}"))
        return
    host.addresses = addresses
    if _LOOPBACK in host.ports:
        host.add(_through_ssh(host, host.ports[_LOOPBACK]))
    if not addresses:
        host.add(Finding(host.name, "network", "warning", "it has no IPv4 address but its loopback's"))


def _through_ssh(host: _Host, port: int) -> Finding:
    try:
        with host.session.shell.reach(_LOOPBACK, port) as sock:
            sock.settimeout(_ANSWERING)
            sock.sendall(host.token.encode())
            if sock.recv(8) == b"ok":
                return Finding(host.name, "ports", "ok", "programs there can be reached through ssh")
    except (OSError, SkywardError):
        pass  # said below
    said = host.session.shell.said()
    text = f"its sshd does not let us reach ports through it{f' (ssh said: {said})' if said else ''}"
    return Finding(host.name, "ports", "problem", text, "Set AllowTcpForwarding yes (or local) in its sshd_config")


def _probe(source: _Host, hosts: Sequence[_Host], chosen: Sequence[Address]) -> dict[int, tuple[str, float | None]]:
    ends = {node: (chosen[node].ip, host.ports.get(chosen[node].ip)) for node, host in enumerate(hosts)}
    peers = {str(node): end for node, end in ends.items() if end[1] and hosts[node] is not source}
    silent: dict[int, tuple[str, float | None]] = {
        node: ("it cannot listen there", None) for node, end in ends.items() if not end[1] and hosts[node] is not source
    }
    try:
        answers: Any = source.session.order(_ANSWERING, probe=peers, token=source.token).get("answers")
    except (SkywardError, subprocess.TimeoutExpired) as exc:
        return silent | {int(node): (_why(exc), None) for node in peers}
    found = cast("dict[str, Any]", answers) if isinstance(answers, dict) else {}
    return silent | {int(node): _answer(found.get(node)) for node in peers}


def _tell(
    hosts: Sequence[_Host], layout: Layout, answers: Sequence[dict[int, tuple[str, float | None]]], mesh: bool
) -> None:
    def rate(node: int) -> float | None:
        other = (node + 1) % len(hosts)
        end = layout.addresses[other].ip, hosts[other].ports.get(layout.addresses[other].ip)
        if answers[node].get(other, ("unknown", None))[0]:
            return None
        try:
            found: Any = hosts[node].session.order(_ANSWERING, send=end, token=hosts[node].token).get("rate")
        except (SkywardError, subprocess.TimeoutExpired):
            return None
        return float(found) if isinstance(found, int | float) and 0 < found < 1e13 else None

    rates = each(rate, range(len(hosts)))
    for node, host in enumerate(hosts):
        fast = {(node + 1) % len(hosts): rates[node]}
        peers = [
            Reached(hosts[other].name, layout.addresses[other].ip, why, seconds, fast.get(other))
            for other, (why, seconds) in sorted(answers[node].items())
        ]
        own = layout.addresses[node]
        host.add(*network_of(host.name, f"{own.ip} ({own.interface})", peers, mesh))


def _addresses(given: object) -> list[Address]:
    found: list[Address] = []
    for entry in cast("list[Any]", given)[:_MOST_ADDRESSES] if isinstance(given, list) else ():
        try:
            interface, ip, netmask = entry
            ipaddress.IPv4Interface(f"{ip}/{netmask}")
            found.append(Address(printable(str(interface), 20), str(ip), str(netmask)))
        except (ValueError, TypeError):
            continue
    return found


def _answer(given: Any) -> tuple[str, float | None]:
    try:
        why, seconds = given
        known = isinstance(seconds, int | float) and math.isfinite(seconds) and seconds >= 0
        return printable(str(why), 100), float(seconds) if known else None
    except (ValueError, TypeError, OverflowError):
        return "it gave no answer", None


def _is_port(port: object) -> bool:
    return isinstance(port, int) and not isinstance(port, bool) and 0 < port < 65536


def _why(error: Exception) -> str:
    if isinstance(error, BootstrapError):
        return error.detail
    return "it does not answer in time" if isinstance(error, subprocess.TimeoutExpired) else str(error)


# One host while it is checked: an ssh connection, and over it one program that answers; what it says is bounded.
#
# check.sh ── facts ──► "done" ── "time N" ──► the time there, a few times ── "python N" ──► check_network.py


_STEP = "checking the host"
_NEED_KB = 300_000  # as a pool does: see setup/env/remote.py
_MOST = 256 << 10  # bytes that a host may say in all
_TIMES = 4
_ENDING = 2.0


class Session:
    def __init__(self, target: SshTarget) -> None:
        self.shell = SshShell(target)
        self.name = self.shell.name
        self._token = secrets.token_hex(8)
        self._process: Process | None = None
        self._left, self._heard = b"", 0

    def connect(self, patience: float) -> float:
        began = time.monotonic()

        def no_more(why: str) -> None:
            self.shell.close()  # a pool would try again

        self.shell.connect(began + patience + 2.0, report=no_more)
        return time.monotonic() - began

    def facts(self, indexes: Sequence[str], python: tuple[int, int], patience: float) -> Facts:
        from importlib import metadata

        version = f"{python[0]}.{python[1]}"
        argv = ["sh", "-c", check_script(metadata.version("uv")), "sky", self._token, str(_NEED_KB), "tar", version]
        late = threading.Timer(patience, self.shell.close)  # a shell that never comes to our script
        late.daemon = True
        late.start()
        try:
            with open(os.devnull, "wb") as nothing:
                self._process = self.shell.start(argv, {}, nothing)
        finally:
            late.cancel()
        self._write("".join(f"{index}\n" for index in indexes) + "\n")
        lines: list[tuple[str, str]] = []
        for word, rest in self._marked(time.monotonic() + patience):
            lines.append((word, rest))
            if word == "done":
                return read(lines)
        raise BootstrapError(_STEP, f"{self.name} did not answer as expected: its shell may print or do something else")

    def clock(self, patience: float) -> Clock | None:
        best: Clock | None = None
        for number in range(_TIMES):
            asked, began = time.time(), time.monotonic()
            self._write(f"time {number}\n")
            answer = next((rest for word, rest in self._marked(began + patience) if word == "time"), "")
            trip = time.monotonic() - began
            there = _time(answer.rpartition(" ")[2])
            if there is None:
                return best
            seconds, precise = there
            found = Clock(seconds - (asked + trip / 2), trip / 2 if precise else trip / 2 + 1.0)
            best = found if best is None or found.uncertain < best.uncertain else best
        return best

    def start_program(self) -> None:
        text = Path(check_network.__file__).read_bytes()
        self._write(f"python {len(text)}\n".encode() + text)

    def order(self, patience: float, **message: Any) -> dict[str, Any]:
        self._write(json.dumps(message) + "\n")
        line = self._line(time.monotonic() + patience)
        try:
            answer: Any = json.loads(line or b"")
        except (ValueError, RecursionError):
            raise BootstrapError(_STEP, f"{self.name} gave no answer to a test of the network") from None
        return cast("dict[str, Any]", answer) if isinstance(answer, dict) else {}

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            end_program(process, _ENDING)
        self.shell.close()

    def _marked(self, deadline: float) -> Iterator[tuple[str, str]]:
        while (line := self._line(deadline)) is not None:
            mark, _, said = line.decode("utf-8", "replace").partition(" ")
            if mark == f"@{self._token}":
                word, _, rest = said.partition(" ")
                yield word, rest

    def _line(self, deadline: float) -> bytes | None:
        process = self._process
        assert process is not None
        assert process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._left:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise BootstrapError(
                        _STEP, f"{self.name} lets us in, and then does not answer in time. Is it busy?"
                    )
                piece = os.read(process.stdout.fileno(), 1 << 16)
                if not piece:
                    return None
                self._heard += len(piece)
                if self._heard > _MOST:
                    raise BootstrapError(
                        _STEP,
                        f"{self.name} prints more than {_MOST >> 10} kB where a few lines are expected. Look at the "
                        "start-up files of its shell, and whether this host can be trusted.",
                    )
                self._left += piece
        line, _, self._left = self._left.partition(b"\n")
        return line

    def _write(self, data: str | bytes) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(data if isinstance(data, bytes) else data.encode())
            self._process.stdin.flush()
        except OSError:
            pass  # it has ended: whoever reads the answer finds out


def _time(text: str) -> tuple[float, bool] | None:
    whole, _, part = text.strip().partition(".")
    if not (whole.isascii() and whole.isdigit() and len(whole) < 15):
        return None
    precise = part.isascii() and part.isdigit() and len(part) == 9
    return (float(f"{whole}.{part}"), True) if precise else (int(whole) + 0.5, False)
