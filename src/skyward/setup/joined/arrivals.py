"""Listens for the machines that join a pool. Providers open it, wait, and close it.

arrivals = open_arrivals(pool, ttl=..., lease=...)       `arrivals.text` is a secret for the machines
machines = arrivals.wait(range(4), deadline, report)     each runs `join_program()` with that text
"""

from __future__ import annotations

import base64
import json
import os
import secrets
import shutil
import socket
import ssl
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast
from weakref import WeakSet

from skyward.api.provider import Lease, Machine, Provider, Report
from skyward.api.shell import Finished, JoinTarget, SshTarget
from skyward.errors import BootstrapError, HostUnreachable, SkywardError
from skyward.machines.ledger import Ledger
from skyward.node import join
from skyward.node.check_network import addresses
from skyward.node.join import MARK, STDERR, STDIN, STDOUT, Pump
from skyward.node.orders import ClientToJoiner, JoinerToClient
from skyward.node.peers import plain
from skyward.setup.joined.members import Control, JoinedMachine, Listener, MachineLeft, Member, NotStarted
from skyward.setup.joined.places import Places, Refused
from skyward.setup.local_shell import RECEIVE, not_copied
from skyward.transport.certificates import Authority, Identity
from skyward.transport.codec import Message, Receiver, handles

if TYPE_CHECKING:
    from skyward.setup.joined.relay import RelayClient

__all__ = ["Arrivals", "JoinShell", "JoinedLease", "join_file", "join_program", "open_arrivals"]


_MOST_OUTPUT = 64 << 20
_MOST_ERRORS = 1 << 20


class JoinShell:
    """Thread-safe."""

    def __init__(self, member: Member, if_we_die: Callable[[], tuple[list[str], list[str], str | None]]) -> None:
        self._member, self._if_we_die = member, if_we_die
        self._closed = threading.Event()

    @property
    def name(self) -> str:
        return self._member.name

    def connect(self, deadline: float, booting: bool = False, report: Callable[[str], None] | None = None) -> None:
        member = self._member
        with member.changed:
            done = lambda: member.connected or member.gone or self._closed.is_set()  # noqa: E731 - said once
            member.changed.wait_for(done, max(0.0, deadline - time.monotonic()))
            if not member.connected:
                why = member.gone or "its connection was lost, and it did not come back"
                raise HostUnreachable("connecting", f"{self.name}: {why}.")

    def start(self, argv: Sequence[str], env: Mapping[str, str], stderr: IO[bytes]) -> Joined:
        """The program outlives the connection to it."""
        return self._start(argv, env, stderr, keep=True)

    def run(self, argv: Sequence[str], data: bytes = b"", timeout: float = 60.0) -> Finished:
        return self._run(argv, data, timeout)

    def upload(self, source: bytes | Path, dest: str) -> None:
        receive = ["sh", "-c", RECEIVE, "sh", dest, f"{dest}.{uuid.uuid4().hex[:8]}.part"]
        size = len(source) if isinstance(source, bytes) else source.stat().st_size
        done = self._run([*receive, str(size)], source, None)
        if done.code != 0:
            raise not_copied(self.name, dest, done)

    def reach(self, host: str, port: int) -> socket.socket:
        try:
            return self._member.stream(lambda id: ClientToJoiner.Connect(id, host, port), secure=False)
        except NotStarted as exc:
            raise ConnectionRefusedError(f"{self.name}: {exc}") from exc

    def command(self, argv: Sequence[str]) -> list[str]:
        """The machine runs it when we are gone: no other local process can reach it."""
        self._member.order(ClientToJoiner.AtEnd(list(argv)))
        return self._if_we_die()[0]

    def ending(self) -> tuple[list[str], str | None]:
        return self._if_we_die()[1:]

    def said(self) -> str:
        return self._member.gone

    def close(self) -> None:
        self._closed.set()
        with self._member.changed:
            self._member.changed.notify_all()

    def _start(self, argv: Sequence[str], env: Mapping[str, str], stderr: IO[bytes], keep: bool) -> Joined:
        def order(id: str) -> Message:
            return ClientToJoiner.Run(id, list(argv), dict(env), keep)

        try:
            return Joined(self._member.stream(order, secure=True), stderr)
        except NotStarted as exc:
            raise BootstrapError(f"starting {argv[0]}", f"{self.name}: {exc}.") from exc
        except OSError as exc:
            kind = MachineLeft if self._member.gone else HostUnreachable
            raise kind(f"starting {argv[0]}", f"{exc}.") from exc

    def _run(self, argv: Sequence[str], data: bytes | Path, timeout: float | None) -> Finished:
        deadline = None if timeout is None else time.monotonic() + timeout
        with tempfile.TemporaryFile() as errors:
            process = self._start(argv, {}, errors, keep=False)
            feeding = threading.Thread(target=_feed, args=(process.stdin, data), daemon=True)
            out: list[bytes] = []
            reading = threading.Thread(target=lambda: out.append(_read(process)), daemon=True)
            try:
                feeding.start()
                reading.start()
                try:
                    code = process.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    raise subprocess.TimeoutExpired(list(argv), timeout or 0.0) from None
            finally:
                process.kill()
                feeding.join()
                reading.join()
                process.stdout.close()
            if len(out[0]) > _MOST_OUTPUT:
                raise BootstrapError(f"running {argv[0]}", f"{self.name}: it wrote more than {_MOST_OUTPUT >> 20} MiB.")
            if code == Joined.LOST:
                raise HostUnreachable(f"running {argv[0]}", f"the connection of {self.name} was lost meanwhile.")
            errors.seek(max(0, errors.seek(0, os.SEEK_END) - _MOST_ERRORS))
            return Finished(code, out[0], errors.read().decode("utf-8", "replace"))


class Joined:
    LOST = 255

    def __init__(self, sock: socket.socket, stderr: IO[bytes]) -> None:
        self._sock = sock
        self.returncode: int | None = None
        self._ended = threading.Event()
        theirs_in, ours_in = os.pipe()
        ours_out, theirs_out = os.pipe()
        self.stdin: IO[bytes] = open(ours_in, "wb")  # noqa: SIM115 - closed by whoever uses it
        self.stdout: IO[bytes] = open(ours_out, "rb")  # noqa: SIM115 - as above
        assert isinstance(sock, ssl.SSLSocket)
        self._pump = Pump(sock, {STDIN: theirs_in}, {STDOUT: theirs_out, STDERR: os.dup(stderr.fileno())})
        threading.Thread(target=self._serve, name="skyward-program", daemon=True).start()

    @property
    def pid(self) -> int:
        """Our own: there is no local process."""
        return os.getpid()

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired("", timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        try:
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)
        except OSError:
            pass  # it has ended

    def _serve(self) -> None:
        code = self._pump.run()
        self.returncode = self.LOST if code is None else code
        self._sock.close()
        self._ended.set()


def _read(process: Joined) -> bytes:
    found = process.stdout.read(_MOST_OUTPUT + 1)
    if len(found) > _MOST_OUTPUT:
        process.kill()
        process.stdout.close()
    return found


def _feed(stdin: IO[bytes], data: bytes | Path) -> None:
    try:
        with stdin:
            if isinstance(data, bytes):
                stdin.write(data)
            else:
                with data.open("rb") as file:
                    shutil.copyfileobj(file, stdin, 1 << 18)
    except OSError:
        pass


_REFUSED = 10.0
_DETACHED = 20.0
_ENDING = 60.0  # after a run's deadline its machines have ended by themselves, if all is well
_SETTLED = 10.0
_LONGEST_REASON = 500
_MOST_WARNINGS = 20


def open_arrivals(
    pool: str,
    *,
    ttl: float,
    lease: float,
    grace: float = 30.0,
    relay: SshTarget | None = None,
    host: str = "",
    port: int = 0,
    advertise: Iterable[str] = (),
    warn: Callable[[str], None] | None = None,
    interchangeable: bool = False,
    hint: str = "",
) -> Arrivals:
    """Listens on `host` (empty: all addresses), or at the ssh host `relay`; machines get its addresses, or `advertise`.

    After a SIGTERM from the scheduler, nodes have `grace` seconds. `warn` gets refused joiners. If machines are
    `interchangeable`, a late or restarted one may take any open place. `hint`: what to do if machines cannot reach us.
    """
    made = Arrivals(pool, ttl, lease, grace, warn, interchangeable, hint)
    try:
        if relay is None:
            made.listen(host, port, tuple(advertise))
        else:
            made.meet(relay, port, tuple(advertise))
    except BaseException:
        made.close()
        raise
    return made


_made: WeakSet[Arrivals] = WeakSet()


def _in_child() -> None:
    for arrivals in list(_made):
        arrivals.after_fork()  # machines must see when this process ends


os.register_at_fork(after_in_child=_in_child)


class JoinedLease(Lease):
    def __init__(self, provider: Provider, arrivals: Arrivals, ledger: Ledger | None = None) -> None:
        super().__init__(provider, arrivals.pool, ledger=ledger)
        self.arrivals = arrivals
        self.way: int | None = None  # the place at which a detached run is looked at, unless there is another way

    def refresh(self, machines: Sequence[Machine]) -> list[Machine]:
        return [self._refreshed(machine) for machine in machines]

    def terminate(self, machines: Sequence[Machine]) -> None:
        for machine in machines:
            assert machine.joined is not None
            self.arrivals.dismiss(machine.joined.place)

    def warn_with(self, warn: Report) -> None:
        self.arrivals.warn_with(warn)

    def hand_over(self, run: str, until: float) -> None:
        self.arrivals.detach(until - time.time() + _ENDING, self.way)
        super().hand_over(run, until)

    def leave(self) -> None:
        self.arrivals.close(end=False)

    def close(self, report: Report) -> object:
        self.arrivals.close()
        return super().close(report)

    def _refreshed(self, machine: Machine) -> Machine:
        if machine.gone or not isinstance(machine, JoinedMachine) or machine.joined is None:
            return machine
        why = self.arrivals.gone(machine.joined.place)
        return replace(machine, left=why) if why else machine


class Arrivals:
    def __init__(
        self,
        pool: str,
        ttl: float,
        lease: float,
        grace: float,
        warn: Report | None = None,
        interchangeable: bool = False,
        hint: str = "",
        kept: Mapping[str, Any] | None = None,
    ) -> None:
        self.pool, self.lease, self._grace, self._interchangeable = pool, lease, grace, interchangeable
        self.warnings: list[str] = []
        self._warn = warn
        self._secret = secrets.token_hex(32) if kept is None else kept["secret"]
        self._identity = Authority(pool, ttl).issue("listener") if kept is None else Identity(**kept["identity"])
        self._places = Places(pool, self._secret, {} if kept is None else {kept["place"]: kept["key"]})
        self._changed = threading.Condition()
        self._members: dict[int, Member] = {}
        self._highest = -1
        self._left_open: list[int] = []
        self._detached: set[int] = set()
        receiver = Receiver(JoinerToClient, self)
        self._control = Control(lambda member, message: receiver.receive(message, [], member))
        self._listener = Listener(self._identity, self._join, self._stream)
        self._addresses: list[tuple[str, int]] = []
        self._hint = hint
        self._relay: RelayClient | None = None
        self._target_of_relay: SshTarget | None = None
        self._closed = False
        _made.add(self)

    def __repr__(self) -> str:
        return f"<Arrivals of {self.pool}, {len(self._members)} machines>"

    def listen(self, host: str, port: int, advertise: tuple[str, ...]) -> None:
        port = self._listener.listen(host, port)
        known = advertise or ((host,) if host else (*(entry[1] for entry in addresses()), "127.0.0.1"))
        self._addresses = [(name, port) for name in known]

    def meet(self, target: SshTarget, port: int, advertise: tuple[str, ...]) -> None:
        from skyward.setup.joined.relay import RelayClient

        self._target_of_relay = target
        self._relay = RelayClient(target, self.lease, port, self._listener.take, self.tell)
        self._addresses = [(name, self._relay.port) for name in advertise or self._relay.addresses]

    def if_we_die(self) -> tuple[list[str], list[str], str | None]:
        return self._relay.if_we_die() if self._relay is not None else ([], [], None)

    @property
    def text(self) -> str:
        told = {
            "addresses": self._addresses,
            "fingerprint": self._listener.fingerprint,
            "pool": self.pool,
            "secret": self._secret,
            "patience": _REFUSED,
        }
        return base64.urlsafe_b64encode(json.dumps(told).encode()).decode()

    @property
    def tried(self) -> str:
        names, port = ", ".join(name for name, _ in self._addresses), self._addresses[0][1]
        return (
            f"Machines connect to port {port} of {names}; they must reach one of these addresses. {self._hint}".strip()
        )

    def expect(self, places: Iterable[int]) -> None:
        places = list(places)
        with self._changed:
            self._highest = max([self._highest, *places])
            for place in places:
                self._members.pop(place, None)
            self._places.open(places)

    def wait(
        self,
        places: Iterable[int],
        deadline: float,
        report: Report,
        failed: Callable[[], str | None] = lambda: None,
        least: int | None = None,
    ) -> list[Machine]:
        """Once all have come or `deadline` (monotonic) has passed.

        With `least`, that many are enough once no more come for a while. `failed` says when the rest will never come.
        """
        places = list(places)
        with self._changed:
            self.expect(place for place in places if place not in self._members)
        told, last = None, time.monotonic()
        try:
            while True:
                with self._changed:
                    here = self._here(places)
                    if len(here) == len(places):
                        return self._machines(here)
                if told != len(here):
                    told, last = len(here), time.monotonic()
                    report(f"{len(here)} of {len(places)} machines have joined")
                now, why = time.monotonic(), failed()  # which is asked once more after the deadline
                if least is not None and len(here) >= least and (why or now > min(deadline, last + _SETTLED)):
                    return self._machines(here)
                if why:
                    raise BootstrapError("joining", why)
                if now > deadline:
                    missing = len(places) - len(here)
                    text = f"{missing} of {len(places)} machines did not join in time. {self.tried}"
                    raise BootstrapError("joining", text)
                with self._changed:
                    self._changed.wait_for(lambda told=told: len(self._here(places)) != told, 1.0)
        finally:
            with self._changed:
                unused = [place for place in places if not self._places.is_used(place)]
                if self._interchangeable:
                    self._left_open += unused
                else:
                    self._places.close(places)

    def vacant(self, count: int) -> list[int]:
        with self._changed:
            came = sorted(self._left_open, key=lambda place: place not in self._members)
            found, self._left_open = came[:count], came[count:]
            return [*found, *(self.new_place() for _ in range(count - len(found)))]

    def new_place(self) -> int:
        with self._changed:
            self._highest = max([self._highest, *self._members]) + 1
            return self._highest

    def kept(self, place: int) -> dict[str, Any]:
        """With what another process listens for the machine of this place, and for no other; a secret."""
        relay = None if self._target_of_relay is None else asdict(self._target_of_relay)
        meeting = {"port": self._addresses[0][1], "addresses": [name for name, _ in self._addresses], "relay": relay}
        bound = {"place": place, "key": self._places.bound(place), "name": self.member(place).name}
        identity = {"secret": self._secret, "identity": vars(self._identity)}
        return {"pool": self.pool, "lease": self.lease, "grace": self._grace, **meeting, **bound, **identity}

    def member(self, place: int, timeout: float = 0.0) -> Member:
        with self._changed:
            self._changed.wait_for(lambda: place in self._members, timeout)
            found = self._members.get(place)
        if found is None:
            raise SkywardError(f"nobody has place {place} of {self.pool}.")
        return found

    def is_connected(self, place: int) -> bool:
        found = self._members.get(place)
        return found is not None and found.connected

    def gone(self, place: int) -> str:
        found = self._members.get(place)
        if found is None:
            return "it was given up"
        if not found.gone and not found.connected and time.monotonic() - found.lost_at > self.lease:
            return f"it has not come back for {self.lease:.0f} s"
        return found.gone

    def notice(self, place: int, seconds: float) -> None:
        self.member(place).order(ClientToJoiner.Notice(seconds))

    def dismiss(self, place: int, why: str = "it was given up") -> None:
        with self._changed:
            self._places.retire(place)
            found = self._members.get(place)
        if found is not None:
            found.order(ClientToJoiner.End())
            found.leave(why)

    def detach(self, left: float, way: int | None = None) -> None:
        """From now on machines end with what runs there, or after `left` seconds, and not when we are gone; that of the
        place `way` comes to whoever listens in our place.
        """
        with self._changed:
            members = {place: member for place, member in self._members.items() if not member.gone}
        for place, member in members.items():
            member.order(ClientToJoiner.Detach(left, place == way))
        with self._changed:
            if not self._changed.wait_for(lambda: members.keys() <= self._detached, _DETACHED):
                names = ", ".join(member.name for place, member in members.items() if place not in self._detached)
                raise HostUnreachable("handing the run over", f"{names} did not answer within {_DETACHED:.0f} s.")

    def after_fork(self) -> None:
        self._listener.after_fork()
        self._control.after_fork()

    def close(self, end: bool = True) -> None:
        """May be repeated. Without `end` machines hear nothing of it."""
        with self._changed:
            members = list(self._members.values())
            if self._closed:
                return
            self._closed = True
        for member in members:
            if end:
                member.order(ClientToJoiner.End())
            member.leave("the pool was closed")
        self._listener.close()
        self._control.close(2.0)
        if self._relay is not None:
            self._relay.close()

    def _here(self, places: Iterable[int]) -> list[Member]:
        found = [self._members[place] for place in places if place in self._members]
        if self._interchangeable:
            self.expect(member.place for member in found if member.gone)
        return [member for member in found if not (self._interchangeable and member.gone)]

    def _machines(self, members: list[Member]) -> list[Machine]:
        with self._changed:
            self._places.use(member.place for member in members)
        targets = [self._target(member) for member in members]
        return [JoinedMachine(f"{self.pool}-{target.place}", joined=target) for target in targets]

    def _target(self, member: Member) -> JoinTarget:
        def shell() -> JoinShell:
            return JoinShell(self.member(member.place), self.if_we_die)

        return JoinTarget(self.pool, member.place, member.name, shell)

    def _join(self, sock: ssl.SSLSocket, hello: dict[str, Any]) -> None:
        place, proof, key = hello.get("place"), hello.get("token"), hello.get("key")
        name, peer = _shown(str(hello.get("name")), 255), cast("object", sock.getpeername())
        address = plain(str(cast("tuple[Any, ...]", peer)[0])) if isinstance(peer, tuple) else ""
        if not (place is None or type(place) is int) or type(proof) is not str or type(key) is not str:
            raise ValueError("no greeting")
        try:
            with self._changed:
                before = self._places.had_by(key)
                place = self._places.admit(place, proof, key, self._away() if self._interchangeable else None)
                member = self._members.get(place)
                if member is None or place != before:
                    member = self._members[place] = Member(place, name, address, self._control.send)
        except Refused as exc:
            if exc.instead_of is not None:
                self.tell(f"{name} ({address}) was started in place of machine {exc.instead_of}, which is given up.")
                self.dismiss(exc.instead_of, f"it was not there any more, and {name} was started in its place")
            if exc.known:
                self.tell(f"{name} ({address}) was not let in: {exc.why}.")
            _say(sock, {"refused": exc.why, "again": exc.again})
            sock.close()
            return
        _say(sock, {"welcome": {"place": place, "lease": self.lease, "grace": self._grace}})
        self._control.add(sock, member)
        with self._changed:
            self._changed.notify_all()

    def _away(self) -> dict[int, float]:
        return {place: seconds for place, member in self._members.items() if (seconds := member.away()) is not None}

    def _stream(self, sock: socket.socket, id: str) -> None:
        with self._changed:
            members = list(self._members.values())
        if not any(member.arrived(id, sock) for member in members):
            sock.close()

    @handles(JoinerToClient.Failed)
    def _failed(self, message: JoinerToClient.Failed, member: Member) -> None:
        member.failed(message.id, _shown(message.reason, _LONGEST_REASON))

    @handles(JoinerToClient.Leaving)
    def _leaving(self, message: JoinerToClient.Leaving, member: Member) -> None:
        member.leave(_shown(message.reason, _LONGEST_REASON))

    @handles(JoinerToClient.Detached)
    def _has_detached(self, message: JoinerToClient.Detached, member: Member) -> None:
        with self._changed:
            self._detached.add(member.place)
            self._changed.notify_all()

    @handles(JoinerToClient.Pong)
    def _pong(self, message: JoinerToClient.Pong, member: Member) -> None:
        """The control connection has already recorded it."""

    def warn_with(self, warn: Callable[[str], None]) -> None:
        with self._changed:
            self._warn, before = warn, list(self.warnings)
        for text in before:
            warn(text)

    def tell(self, text: str) -> None:
        with self._changed:
            if text in self.warnings or len(self.warnings) > _MOST_WARNINGS:
                return
            if len(self.warnings) == _MOST_WARNINGS:
                text = f"{text} Nothing more is said of the next ones."
            self.warnings.append(text)
            warn = self._warn
        if warn is not None:
            warn(text)


def _shown(text: str, most: int) -> str:
    return "".join(char if char.isprintable() else "?" for char in text[:most])


def _say(sock: ssl.SSLSocket, message: dict[str, Any]) -> None:
    sock.sendall(json.dumps(message).encode() + b"\n")


_FUTURE = "from __future__ import annotations\n"
_ALONE = """
import sys

if __name__ == "__main__" and not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
    del sys.path[0]  # nothing is imported from where the file lies: others may write there
"""


@cache
def join_program() -> str:
    whole = Path(join.__file__).read_text()
    return whole.replace(_FUTURE, _FUTURE + _ALONE, 1)


def join_file(text: str) -> str:
    return f"{MARK}{text}\n{join_program()}"
