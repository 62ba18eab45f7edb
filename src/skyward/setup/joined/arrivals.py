"""Where the machines of a pool arrive that connect to us, by the pool's name: providers open it, wait, and close it.

arrivals = open_arrivals(pool, ttl=..., lease=...)       listens; `arrivals.text` goes to the machines, secretly
machines = arrivals.wait(range(4), deadline, report)     each runs `join_program()` with that text
close_arrivals(pool)                                     tells all of them to end
"""

from __future__ import annotations

import base64
import json
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, cast

from skyward.api.provider import Machine, Report
from skyward.api.shell import JoinTarget
from skyward.errors import BootstrapError, SkywardError
from skyward.node.addresses import addresses
from skyward.setup.joined.listener import Listener
from skyward.setup.joined.members import Control, Member
from skyward.setup.joined.places import Places, Refused
from skyward.setup.joined.shell import JoinShell
from skyward.transport.certificates import Authority

__all__ = ["NOTICES", "Arrivals", "close_arrivals", "find_arrivals", "open_arrivals", "refreshed", "shell_for"]

NOTICES = "skyward.node.join_notice:wait"
"""For `Access.notices` of providers whose machines join."""

_REFUSED = 10.0
_OPEN: dict[str, Arrivals] = {}
_LOCK = threading.Lock()


def open_arrivals(
    pool: str,
    *,
    ttl: float,
    lease: float,
    grace: float = 30.0,
    host: str = "",
    port: int = 0,
    advertise: Iterable[str] = (),
    warn: Callable[[str], None] | None = None,
) -> Arrivals:
    """Listens for the machines of a pool, on `host` (all addresses of this computer if empty).

    They are told all of its addresses, or those to `advertise`. When an engine sends them SIGTERM or SIGUSR1, their
    nodes have `grace` seconds left. `warn` hears of whoever was not let in.
    """
    made = Arrivals(pool, ttl, lease, grace, warn)
    try:
        made.listen(host, port, tuple(advertise))
    except BaseException:
        made.close()
        raise
    with _LOCK:
        _OPEN[pool] = made
    return made


def find_arrivals(pool: str) -> Arrivals | None:
    """Where a pool's machines arrive, if this process has opened it and not closed it yet."""
    return _OPEN.get(pool)


def close_arrivals(pool: str) -> bool:
    """Ends a pool's machines as far as we started something there; False if there was nothing to close."""
    with _LOCK:
        found = _OPEN.pop(pool, None)
    if found is not None:
        found.close()
    return found is not None


def shell_for(target: JoinTarget) -> JoinShell:
    """The shell of a machine that has joined."""
    found = find_arrivals(target.pool)
    if found is None:
        raise SkywardError(f"{target}: the pool {target.pool} is not open in this process.")
    return JoinShell(found.member(target.place))


def refreshed(machines: Iterable[Machine]) -> list[Machine]:
    """Machines that have joined, as they are now: for `Provider.refresh`."""
    return [_refreshed(machine) for machine in machines]


def _refreshed(machine: Machine) -> Machine:
    target = machine.joined
    if target is None or machine.gone:
        return machine
    arrivals = find_arrivals(target.pool)
    why = "its pool is closed" if arrivals is None else arrivals.gone(target.place)
    return replace(machine, left=why) if isinstance(machine, JoinedMachine) and why else machine


@dataclass(frozen=True)
class JoinedMachine(Machine):
    """A machine that has joined; it knows when it has left."""

    left: str = ""

    @property
    def gone(self) -> str:
        return self.left


class Arrivals:
    """Lets machines in, and knows who is there. Usable from many threads."""

    def __init__(self, pool: str, ttl: float, lease: float, grace: float, warn: Callable[[str], None] | None) -> None:
        self.pool, self.lease, self._grace = pool, lease, grace
        self.refused: list[str] = []
        """Who knew the secret and was not let in all the same, in words."""
        self._warn = warn
        self._secret = secrets.token_hex(32)
        self._places = Places(pool, self._secret)
        self._changed = threading.Condition()
        self._members: dict[int, Member] = {}
        self._control = Control(self._heard)
        self._listener = Listener(Authority(pool, ttl), self._join, self._stream)
        self._addresses: list[tuple[str, int]] = []

    def __repr__(self) -> str:
        return f"<Arrivals of {self.pool}, {len(self._members)} machines>"

    def listen(self, host: str, port: int, advertise: tuple[str, ...]) -> None:
        """Listens on this computer."""
        port = self._listener.listen(host, port)
        known = advertise or ((host,) if host else (*(entry[1] for entry in addresses()), "127.0.0.1"))
        self._addresses = [(name, port) for name in known]

    @property
    def text(self) -> str:
        """What a machine has to be told to join. Whoever has it can join: it is a secret."""
        told = {
            "addresses": self._addresses,
            "fingerprint": self._listener.fingerprint,
            "pool": self.pool,
            "secret": self._secret,
            "patience": _REFUSED,
        }
        return base64.urlsafe_b64encode(json.dumps(told).encode()).decode()

    def expect(self, places: Iterable[int]) -> None:
        """These places may be taken from now on, also those that a machine had before."""
        places = list(places)
        with self._changed:
            for place in places:
                self._members.pop(place, None)
            self._places.open(places)

    def wait(
        self,
        places: Iterable[int],
        deadline: float,
        report: Report,
        failed: Callable[[], str | None] = lambda: None,
    ) -> list[Machine]:
        """The machines of these places, once all have come; until `deadline` (monotonic), then nobody may any more.

        `failed` gives a sentence when the rest will never come; it is asked about once a second.
        """
        places = list(places)
        self.expect(place for place in places if place not in self._members)
        told = None
        try:
            while True:
                with self._changed:
                    here = [self._members[place] for place in places if place in self._members]
                    if len(here) == len(places):
                        return [self._machine(member) for member in here]
                if told != len(here):
                    told = len(here)
                    report(f"{len(here)} of {len(places)} machines have joined")
                if why := failed():
                    raise BootstrapError("joining", why)
                if time.monotonic() > deadline:
                    missing = len(places) - len(here)
                    raise BootstrapError("joining", f"{missing} of {len(places)} machines did not join in time.")
                with self._changed:
                    self._changed.wait_for(lambda told=told: self._count(places) != told, 1.0)
        finally:
            with self._changed:
                self._places.close(places)

    def member(self, place: int) -> Member:
        """The machine of a place."""
        with self._changed:
            found = self._members.get(place)
        if found is None:
            raise SkywardError(f"nobody has place {place} of {self.pool}.")
        return found

    def gone(self, place: int) -> str:
        """Why the machine of a place will not come back; empty while it may."""
        found = self._members.get(place)
        if found is None:
            return "it was given up"
        if not found.gone and not found.connected and time.monotonic() - found.lost_at > self.lease:
            return f"it has not come back for {self.lease:.0f} s"
        return found.gone

    def notice(self, place: int, seconds: float) -> None:
        """Tells the node of a place that it is taken away in so many seconds, as an engine has told us."""
        self.member(place).order({"notice": seconds})

    def dismiss(self, place: int, why: str = "it was given up") -> None:
        """Tells the machine of a place to end; it may not come back."""
        with self._changed:
            self._places.retire(place)
            found = self._members.get(place)
        if found is not None:
            found.order({"end": why})
            found.leave(why)

    def close(self) -> None:
        """Tells all machines to end, and listens no more."""
        with self._changed:
            members = list(self._members.values())
        for member in members:
            member.order({"end": "the pool was closed"})
            member.leave("the pool was closed")
        self._listener.close()
        self._control.close(2.0)

    def _count(self, places: Iterable[int]) -> int:
        return sum(place in self._members for place in places)

    def _machine(self, member: Member) -> Machine:
        target = JoinTarget(self.pool, member.place, member.name)
        return JoinedMachine(f"{self.pool}-{member.place}", joined=target)

    def _join(self, sock: ssl.SSLSocket, hello: dict[str, Any]) -> None:
        """Somebody wants to join."""
        place, proof, key = hello.get("place"), hello.get("token"), hello.get("key")
        name, peer = str(hello.get("name"))[:255], cast("object", sock.getpeername())
        address = str(cast("tuple[Any, ...]", peer)[0]) if isinstance(peer, tuple) else ""
        if not (place is None or type(place) is int) or type(proof) is not str or type(key) is not str:
            raise ValueError("no greeting")
        try:
            with self._changed:
                place = self._places.admit(place, proof, key)
                member = self._members.get(place)
                if member is None:
                    member = self._members[place] = Member(place, name, address, self._control.send)
        except Refused as exc:
            if exc.known:
                self._tell(f"{name} ({address}) was not let in: {exc.why}.")
            _say(sock, {"refused": exc.why})
            sock.close()
            return
        _say(sock, {"welcome": {"place": place, "lease": self.lease, "grace": self._grace}})
        self._control.add(sock, member)
        with self._changed:
            self._changed.notify_all()

    def _stream(self, sock: socket.socket, id: str) -> None:
        with self._changed:
            members = list(self._members.values())
        if not any(member.arrived(id, sock) for member in members):
            sock.close()

    def _heard(self, member: Member, message: dict[str, Any]) -> None:
        """A member says something, over its control connection."""
        if type(id := message.get("failed")) is str:
            member.failed(id, str(message.get("why"))[:500])
        elif "leaving" in message:
            member.leave(str(message["leaving"])[:500])

    def _tell(self, text: str) -> None:
        self.refused.append(text)
        if self._warn is not None:
            self._warn(text)


def _say(sock: ssl.SSLSocket, message: dict[str, Any]) -> None:
    sock.sendall(json.dumps(message).encode() + b"\n")
