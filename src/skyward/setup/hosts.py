"""Machines made ready to take orders: reached, set up, a keeper on each, and an address that the others can use."""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from skyward import events
from skyward.api.image import Image
from skyward.api.provider import Machine
from skyward.api.shell import Access, Shell
from skyward.errors import BootstrapError, PluginError, SkywardError
from skyward.machines.parallel import each, spread
from skyward.setup.env.local import prepare
from skyward.setup.host_watch import MachineWatch, during_setup
from skyward.setup.keeper_client import KeeperClient
from skyward.setup.local_shell import LocalShell, inherited
from skyward.setup.network import Address, Blocked, Layout, blocked_pairs, candidates
from skyward.transport.includes import import_paths, pack

if TYPE_CHECKING:  # pools on this computer need none of these
    from skyward.machines.watchdog import Watchdog
    from skyward.setup.env.remote import Packages

__all__ = ["Host", "HostSetup", "address_like", "arrange"]

_LOOPBACK = Address("lo", "127.0.0.1", "255.0.0.0")
_PROBE = 3.0


@dataclass(frozen=True)
class Host:
    """A machine with a keeper, and what user code gets there."""

    keeper: KeeperClient
    nodes: tuple[int, ...]
    env: dict[str, str]
    paths: tuple[str, ...]
    cwd: str


class HostSetup:
    """Sets machines up, and again when one comes back; how all of it ends is kept on `endings`."""

    def __init__(
        self,
        pool: str,
        image: Image,
        commands: Mapping[str, Sequence[str]],
        access: Access,
        ttl: float,
        workspace: Callable[[], str],
        emit: Callable[[events.Event], None],
        hurried: Callable[[], bool],
        endings: ExitStack,
        ended: Callable[[Sequence[Machine]], list[str]] | None,
    ) -> None:
        self.pool, self.image, self.access, self.workspace = pool, image, access, workspace
        self._commands, self._born, self._ttl = commands, time.monotonic(), ttl
        self.emit, self.hurried, self._endings = emit, hurried, endings
        self._packages: Packages | None = None
        self._watchdog: Watchdog | None = None
        self._shells: list[Shell] = []
        self._archive: Path | None = None
        self._warned: set[str] = set()
        self._aborted = False
        self._watch = MachineWatch(ended)
        self._keepers: list[tuple[str, KeeperClient, Sequence[str]]] = []

    def set_up(self, machines: Sequence[Machine], deadline: float) -> list[Host]:
        """Keepers on all machines; one that fails is named at once, while the others go on."""
        if self.access.local:
            return [self._set_up_local(len(machines), deadline)]
        from skyward.machines.watchdog import Watchdog
        from skyward.setup.env.remote import Packages
        from skyward.setup.env.requirements import check_python

        check_python(self.image)
        self._pack_includes()
        self._packages, self._watchdog = Packages(self.image), Watchdog()
        self._endings.push(self._close_watchdog)
        self._endings.callback(self._close_shells)
        self._endings.callback(self._end_keepers)
        parts = spread(lambda one: self.set_up_one(*one, deadline), list(enumerate(machines)))
        wait(parts)
        return _all_or_error(parts)

    def set_up_one(self, node: int, machine: Machine, deadline: float) -> Host:
        """A keeper on another machine, for one node."""
        from skyward.setup.env.remote import prepare_host, stop_script
        from skyward.setup.ssh.shell import SshShell

        assert machine.ssh is not None
        assert self._packages is not None
        assert self._watchdog is not None

        def report(text: str, seconds: float | None = None) -> None:
            took = "" if seconds is None else f" ({seconds:.1f} s)"
            self.emit(events.NodePhase(self.pool, node, text + took))

        shell, key = SshShell(machine.ssh), f"{node}-{time.monotonic()}"
        self._shells.append(shell)
        if self._aborted:
            shell.close()
        background = ExitStack()
        stop: Sequence[str] = ()
        try:
            report(f"connecting to {shell.name}")
            with self._watch.over(shell, machine):
                shell.connect(min(deadline, time.monotonic() + self.access.ssh_timeout))
            background.enter_context(during_setup(shell, machine.ssh, self.access, self._warn))
            self._watchdog.add(key, (), *shell.ending())
            made = prepare_host(
                shell, self.image, pool=self.pool, deadline=deadline, report=report, packages=self._packages
            )
            if not self._disposable:
                stop = stop_script(made.directory)
                self._watchdog.add(key, shell.command(stop), *shell.ending())
            self._send_includes(shell, made.directory)
            self._run_commands(shell, node, made.env, deadline, report)
            report("starting")
            left = max(1.0, self._ttl - (time.monotonic() - self._born))
            keeper = KeeperClient(
                shell, made.python, {}, made.directory, self.access.lease, left, self.access.lease_file
            )
            self._keepers.append((key, keeper, stop))
        except SkywardError as exc:
            self._warn(str(exc), f"node {node} ({shell.name}): {exc}")
            if stop:  # there is no keeper yet that would remove the directory
                with suppress(SkywardError, OSError, subprocess.TimeoutExpired):
                    shell.run(stop, timeout=20)
            raise
        finally:
            background.close()
        return Host(keeper, (node,), {**made.env, **self.image.env}, self._paths(made.directory), made.directory)

    def _warn(self, what: str, text: str = "") -> None:
        """Tells the user; what is wrong with all machines is said once."""
        if what not in self._warned:
            self._warned.add(what)
            self.emit(events.Notice(self.pool, text or what, "warning"))

    def _set_up_local(self, nodes: int, deadline: float) -> Host:
        """This computer, which plays all nodes."""
        self._pack_includes()
        made = prepare(self.image, report=lambda text: self.emit(events.NodePhase(self.pool, None, text)))
        for node in range(nodes):
            self.emit(events.NodePhase(self.pool, node, "starting"))
        shell = LocalShell()
        self._run_commands(shell, 0, made.env, deadline, lambda text: self.emit(events.NodePhase(self.pool, 0, text)))
        directory = self.workspace()
        self._send_includes(shell, directory)
        keeper = KeeperClient(shell, made.python, {**inherited(os.environ), **made.env}, directory, 0.0, self._ttl)
        self._endings.callback(lambda: keeper.end(0.2 if self.hurried() else 10.0))
        paths = (*made.paths, *self._paths(directory))
        return Host(keeper, tuple(range(nodes)), made.env, paths, _working_directory())

    def stop(self, host: Host) -> None:
        """Ends what a machine that was given up may still run of this pool."""
        from skyward.setup.env.remote import stop_script

        host.keeper.shell.run(stop_script(host.keeper.directory), timeout=20)

    def leave(self, host: Host) -> None:
        """Lets go of a machine that another one stands in for; what it runs ends with it."""
        assert self._watchdog is not None
        for key, keeper, _ in [held for held in self._keepers if held[1] is host.keeper]:
            self._keepers = [held for held in self._keepers if held[0] != key]
            self._watchdog.drop(key)
            keeper.end(0.0)
            keeper.shell.close()

    def abort(self) -> None:
        """Gives up machines that are still being set up."""
        self._aborted = True
        settled = {keeper.shell for _, keeper, _ in self._keepers}
        for shell in [shell for shell in self._shells if shell not in settled]:
            shell.close()

    def _close_watchdog(self, kind: type[BaseException] | None, *_: object) -> None:
        """Lets the watchdog go; if closing was interrupted, it first does what is left to do."""
        assert self._watchdog is not None
        if kind is not None and not issubclass(kind, Exception):
            self._watchdog.hand_over()
        self._watchdog.close()

    def _close_shells(self) -> None:
        def close(shell: Shell) -> None:
            shell.close()

        each(close, self._shells)

    @property
    def _disposable(self) -> bool:
        """Whether machines go with the pool, so that what runs on them need not be ended, nor waited for."""
        return self.access.lease_file is not None

    def _end_keepers(self) -> None:
        """Ends all keepers at once; what cannot be reached is left to the watchdog, and to the lease."""
        assert self._watchdog is not None
        if self.hurried():
            self._watchdog.hand_over()
        if not self._keepers:
            return
        if not all(each(self._end, self._keepers)) and not self.hurried():
            self._watchdog.hand_over()

    def _end(self, held: tuple[str, KeeperClient, Sequence[str]]) -> bool:
        """Waits for a keeper to go by itself, and makes it go if it does not; False if its machine is out of reach."""
        key, keeper, stop = held
        assert self._watchdog is not None
        if self.hurried() or self._disposable:
            keeper.end(0.0)
            return True
        if not keeper.end(5.0):
            try:
                keeper.shell.run(stop, timeout=20)
            except (SkywardError, OSError, subprocess.TimeoutExpired) as exc:
                text = (
                    f"{keeper.shell.name} could not be reached when the pool was closed ({_first_line(exc)}). It is "
                    f"tried for another minute; if that fails, what runs there ends by itself, "
                    f"{self.access.lease:.0f} s after it last heard of us."
                )
                self.emit(events.Notice(self.pool, text, "warning"))
                return False
        self._watchdog.drop(key)
        return True

    def _run_commands(
        self, shell: Shell, node: int, env: Mapping[str, str], deadline: float, report: Callable[[str], None]
    ) -> None:
        """Runs the shell lines of plugins, each plugin's in a shell of its own that stops at the first failure."""
        for plugin, lines in self._commands.items():
            report(f"running the commands of {plugin}")
            exports = [f"export {name}={shlex.quote(env[name])}" for name in ("PATH", "VIRTUAL_ENV") if name in env]
            text = "\n".join([*exports, *lines, ""])
            done = shell.run(["sh", "-e", "-s"], text.encode(), max(1.0, deadline - time.monotonic()))
            if done.code != 0:
                last = "\n".join((done.err or done.out.decode("utf-8", "replace")).strip().splitlines()[-20:])
                raise PluginError(plugin, "bootstrap", f"a command ended with status {done.code}:\n{last}", node)

    def _pack_includes(self) -> None:
        """Packs the user's files, once for all machines, before anything is started."""
        if self.image.includes:
            file = tempfile.NamedTemporaryFile(prefix="skyward-includes-")  # noqa: SIM115 - it goes with the pool
            archive = self._endings.enter_context(file)
            pack(self.image, Path.cwd(), archive)
            archive.flush()
            self._archive = Path(archive.name)

    def _send_includes(self, shell: Shell, directory: str) -> None:
        if self._archive is not None:
            shell.upload(self._archive, f"{directory}/includes.tar")

    def _paths(self, directory: str) -> tuple[str, ...]:
        return tuple(f"{directory}/includes/{path}".rstrip("/.") for path in import_paths(self.image, Path.cwd()))


def arrange(hosts: Sequence[Host], names: Sequence[str], network: str, deadline: float) -> Layout:
    """Finds the addresses by which nodes reach each other, and leaves a listener on each; every pair is tried."""
    if len(hosts) == 1:
        return Layout((_LOOPBACK,) * len(hosts[0].nodes))
    if network == "star":
        return Layout((_LOOPBACK,) * len(hosts))

    def look(host: Host) -> list[Address]:
        return [Address(*entry) for entry in host.keeper.ask("look", deadline)["addresses"]]

    known = each(look, hosts)
    for node, found in enumerate(known):
        if not found:
            raise BootstrapError("network", f"{names[node]} has no address but its loopback's.", node)
    best: Layout | None = None
    for addresses in candidates(known):
        layout = Layout(addresses, _tried(hosts, addresses, deadline))
        if not layout.blocked:
            return layout
        if best is None or len(layout.blocked) < len(best.blocked):
            best = layout
    assert best is not None
    if network == "mesh":
        raise BootstrapError("network", f"{best.explain(names)}. Open the hosts' firewalls to each other.")
    return best


def address_like(host: Host, ip: str, other: Address, deadline: float) -> Address:
    """The address by which a machine is reached that stands in for one with the address `other`."""
    if other == _LOOPBACK:
        return other
    found = [Address(*entry) for entry in host.keeper.ask("look", deadline)["addresses"]]
    fitting = [address for address in found if address.ip == ip or address.network == other.network]
    if not found:
        raise BootstrapError("network", f"{host.keeper.shell.name} has no address but its loopback's.")
    return (fitting or found)[0]


def _tried(hosts: Sequence[Host], addresses: Sequence[Address], deadline: float) -> tuple[Blocked, ...]:
    """The pairs that cannot connect, each side asked at the same time."""
    count = range(len(hosts))
    ends: dict[str, tuple[str, int]] = {}

    def listen(node: int) -> None:
        answer = hosts[node].keeper.ask("listen", deadline, host=addresses[node].ip)
        if "listening" in answer:
            ends[str(node)] = (addresses[node].ip, answer["listening"])

    def probe(node: int) -> dict[int, str]:
        peers = {name: end for name, end in ends.items() if name != str(node)}
        answer: dict[str, str] = hosts[node].keeper.ask("probe", deadline, peers=peers, timeout=_PROBE)["probed"]
        deaf = {other: "it cannot listen there" for other in count if str(other) not in ends and other != node}
        return deaf | {int(name): reason for name, reason in answer.items()}

    each(listen, count)
    return blocked_pairs(dict(enumerate(each(probe, count))))


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def _all_or_error(parts: Sequence[Future[Host]]) -> list[Host]:
    failed = [error for part in parts if (error := part.exception()) is not None]
    if not failed:
        return [part.result() for part in parts]
    for text in dict.fromkeys(str(other) for other in failed[1:] if str(other) != str(failed[0])):
        failed[0].add_note(f"also: {text}")
    raise failed[0]


def _working_directory() -> str:
    """Where this program works, and so its functions on this computer; the root if that has been removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return os.sep
