"""Sets up machines as hosts: connection, environment, the user's files, and a running keeper."""

from __future__ import annotations

import math
import os
import shlex
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from skyward.api.image import mask
from skyward.api.secret import revealed, without_secrets
from skyward.api.shell import Access, Shell, SshTarget
from skyward.api.spec import WEEK
from skyward.errors import AuthenticationFailed, BootstrapError, HostUnreachable, PluginError, SkywardError
from skyward.events import Notice
from skyward.machines.parallel import each, spread
from skyward.setup.env.local import Environment, prepare
from skyward.setup.keeper_client import Keeper, KeeperClient
from skyward.setup.local_shell import LocalShell, inherited
from skyward.transport import private
from skyward.transport.blobs import Store

if TYPE_CHECKING:
    from skyward.api.context import PoolContext
    from skyward.api.provider import Machine
    from skyward.machines.replacement import Supply
    from skyward.machines.watchdog import Watchdog
    from skyward.setup.env.remote import Packages

__all__ = ["LOCAL_LEASE", "Host", "HostSetup", "during_setup", "prepared"]


_STOP_TIMEOUT = 20
_LARGE_INCLUDES = 100 << 20
_RUN = "skyward-run-"  # no name that sweeps take for the directory of a dead process
LOCAL_LEASE = 60.0  # of a detached run on this computer
_UNREACHABLE = (SkywardError, OSError, subprocess.TimeoutExpired)


@dataclass(frozen=True)
class Host:
    keeper: Keeper
    nodes: tuple[int, ...]
    env: dict[str, str]
    paths: tuple[str, ...]
    cwd: str
    machine: Machine | None = None


@dataclass(frozen=True)
class _Running:
    key: str
    keeper: KeeperClient
    stop: Sequence[str]


class HostSetup:
    """Cleanup goes on `steps`; the watchdog has an order per host until it is clean."""

    def __init__(
        self,
        context: PoolContext,
        commands: Mapping[str, Sequence[str]],
        watchdog: Watchdog,
        supply: Supply | None,
        steps: ExitStack,
    ) -> None:
        self._context, self._commands, self._watchdog, self._steps = context, commands, watchdog, steps
        self._expires = time.monotonic() + context.spec.ttl
        self._watch = MachineWatch(supply)
        self._packages: Packages | None = None
        self._store: Store | None = None
        self._archive: Path | None = None
        self._shells: list[Shell] = []
        self._running: list[_Running] = []
        self._warned: set[str] = set()
        self._aborted = False

    def set_up(self, machines: Sequence[Machine], patience: float) -> list[Host | SkywardError]:
        if self._context.local:
            return [self._set_up_local(len(machines), time.monotonic() + patience)]
        from skyward.setup.env.remote import Packages
        from skyward.setup.env.requirements import check_python

        check_python(self._context.image)
        self._pack_includes()
        self._packages = Packages(self._context.image)
        self._steps.callback(self._close_shells)
        self._steps.callback(self._end_keepers)
        parts = spread(lambda item: self.set_up_one(*item, patience), list(enumerate(machines)))
        wait(parts)
        hosts = _enough_or_error(parts, self._context)
        self._tell_unlocked(self._packages.new_records)
        return hosts

    def set_up_one(self, node: int, machine: Machine, patience: float, login: float | None = None) -> Host:
        """Login within `ssh_timeout`, setup within `patience` seconds after that. With `login`, that many seconds
        instead, and a failure is not reported because the caller retries.
        """

        shell, key = shell_of(machine), f"{node}-{time.monotonic()}"
        self._shells.append(shell)
        if self._aborted:
            shell.close()
        access, report = self._context.access, self._reporter(node)
        background = ExitStack()
        try:
            if login is None:
                report(f"connecting to {shell.name}", None)
            with self._watch.watching(shell, machine, access.login):
                again = partial(_again, report, shell.name) if login is None else None
                limit = time.monotonic() + (login or access.ssh_timeout)
                shell.connect(limit, booting=self._disposable, report=again)
            settled = background.enter_context(during_setup(shell, machine.ssh, access, self._warn))
            self._watchdog.add(key, (), *shell.ending())
            variables = prepared(shell, machine.id, access, self._warn)
            keep = partial(self._keep, machine, shell, node, settled)
            host = self._start_keeper(shell, key, node, time.monotonic() + patience, report, variables, keep)
            return replace(host, machine=machine)
        except SkywardError as exc:
            if login is None and not self._aborted:
                self._warn(str(exc), f"node {node} ({shell.name}): {exc}")
            raise
        finally:
            background.close()

    def _start_keeper(
        self,
        shell: Shell,
        key: str,
        node: int,
        deadline: float,
        report: Callable[[str, float | None], None],
        variables: Mapping[str, str],
        keep: Callable[[Environment], None],
    ) -> Host:
        from skyward.setup.env.remote import prepare_host, stop_script

        assert self._packages is not None
        context, access = self._context, self._context.access
        stop: Sequence[str] = ()
        try:
            made = prepare_host(
                shell, context.image, pool=context.name, deadline=deadline, report=report, packages=self._packages
            )
            stop = stop_script(made.directory)
            if not self._disposable:
                self._watchdog.add(key, shell.command(stop), *shell.ending())
            keep(made)
            self._send_includes(shell, made.directory)
            self._run_commands(shell, node, made.env, deadline)
            report("starting", None)
            left = max(1.0, min(self._expires - time.monotonic(), context.ends_at - time.time()))
            keeper = KeeperClient(shell, made.python, variables, made.directory, access.lease, left, access.lease_file)
        except SkywardError:
            # there is no keeper that would remove the directory
            if self._disposable or not stop or _run_quietly(shell, stop):
                self._watchdog.drop(key)
            raise
        self._running.append(_Running(key, keeper, stop))
        env = {**made.env, **revealed(context.image.env)}
        return Host(keeper, (node,), env, self._paths(made.directory), _work(made.directory))

    def _keep(self, machine: Machine, shell: Shell, node: int, settled: Callable[[], None], made: Environment) -> None:
        """Lets the provider keep the environment, before any user data is there."""
        if not self._context.image.warm or not made.fresh or node != 0:
            return
        settled()  # it changes files that are taken off the disk for a moment
        self._context.report("keeping the environment for the next pool", node)
        cache = made.python.rpartition("/envs/")[0]
        told = self._context.provider.keep(machine, shell, cache, made.directory)
        if told:
            self._warn(told)

    def _set_up_local(self, nodes: int, deadline: float) -> Host:
        self._pack_includes()
        made = prepare(self._context.image, report=self._context.report)
        self._tell_unlocked([made.record] if made.record else [])
        for node in range(nodes):
            self._context.report("starting", node)
        detached = self._context.handing is not None
        shell = LocalShell(own_session=detached)  # see there
        self._run_commands(shell, 0, made.env, deadline)
        directory = private.fresh(_RUN) if detached else self.store().directory
        self._send_includes(shell, directory)
        # Secrets come later, to the processes that run bodies: what a program is started with can be read from outside.
        env = {**inherited(os.environ), **without_secrets({**made.env, **self._context.image.env})}
        ttl = self._context.spec.ttl
        # this computer costs nothing, and its pool ends with this program: it has a time to live only if one was given
        lease, life = (LOCAL_LEASE, ttl) if detached else (0.0, math.inf if ttl == WEEK else ttl)
        keeper = KeeperClient(shell, made.python, env, directory, lease, life)
        self._steps.callback(lambda: self._end_local(keeper))
        return Host(keeper, tuple(range(nodes)), made.env, self._paths(directory), _working_directory())

    def _end_local(self, keeper: KeeperClient) -> None:
        if self._context.handed_over:
            keeper.leave()
        else:
            keeper.end(0.2 if self._context.hurried() else 10.0)

    def let_go(self) -> None:
        """The machines now belong to a detached run: if this process dies, only its connections end."""
        for running in self._running:
            self._watchdog.add(running.key, (), *running.keeper.shell.ending())

    def store(self) -> Store:
        """Created late: until a keeper runs, nobody else removes it."""
        if self._store is None:
            self._store = Store()
            self._steps.callback(self._store.close)
        return self._store

    def stop(self, host: Host) -> None:
        from skyward.setup.env.remote import stop_script

        host.keeper.shell.run(stop_script(host.keeper.directory), timeout=_STOP_TIMEOUT)

    def release(self, host: Host) -> None:
        for running in [running for running in self._running if running.keeper is host.keeper]:
            self._running.remove(running)
            self._watchdog.drop(running.key)
            running.keeper.end(0.0)
            running.keeper.shell.close()

    def abort(self) -> None:
        self._aborted = True
        settled = {running.keeper.shell for running in self._running}
        for shell in [shell for shell in self._shells if shell not in settled]:
            shell.close()

    @property
    def _disposable(self) -> bool:
        return self._context.access.lease_file is not None

    def _end_keepers(self) -> None:
        each(self._end, self._running)

    def _end(self, running: _Running) -> None:
        keeper = running.keeper
        if self._context.handed_over:
            keeper.leave()
        elif self._context.hurried():
            keeper.end(0.0)
            return  # the watchdog does the rest
        elif self._disposable:
            keeper.end(0.0)
        elif not keeper.end(5.0):
            try:
                keeper.shell.run(running.stop, timeout=_STOP_TIMEOUT)
            except _UNREACHABLE as exc:
                from skyward.setup.joined.members import MachineLeft

                if not isinstance(exc, MachineLeft):  # else nothing is left there
                    self._context.warn(
                        f"{keeper.shell.name} could not be reached when the pool was closed ({_first_line(exc)}). It "
                        f"is tried for another minute; if that fails, what runs there ends by itself, "
                        f"{self._context.access.lease:.0f} s after it last heard from us."
                    )
                    return
        self._watchdog.drop(running.key)

    def _close_shells(self) -> None:
        self._aborted = True
        each(lambda shell: shell.close(), self._shells)

    def _reporter(self, node: int) -> Callable[[str, float | None], None]:
        def report(text: str, seconds: float | None) -> None:
            took = "" if seconds is None else f" ({seconds:.1f} s)"
            self._context.report(text + took, node)

        return report

    def _tell_unlocked(self, records: Sequence[str]) -> None:
        image = self._context.image
        if records and image.pip and image.lock is None:
            self._context.emit(
                Notice(
                    self._context.name,
                    f"the versions of packages are not locked; those chosen now are in {' and '.join(records)}. "
                    "A copy of that file in Image(lock=...) keeps them, and checks their hashes.",
                )
            )

    def package_list(self, host: Host) -> str:
        if self._packages is not None:
            return self._packages.listing()
        made = host.env.get("VIRTUAL_ENV", "")
        listed = Path(made, "packages.txt")
        return listed.read_text() if made and listed.is_file() else ""

    def _warn(self, what: str, text: str = "") -> None:
        if what not in self._warned:
            self._warned.add(what)
            self._context.warn(text or what)

    def _run_commands(self, shell: Shell, node: int, env: Mapping[str, str], deadline: float) -> None:
        for plugin, lines in self._commands.items():
            self._context.report(f"running the commands of {plugin}", node)
            exports = [f"export {name}={shlex.quote(env[name])}" for name in ("PATH", "VIRTUAL_ENV") if name in env]
            text = "\n".join([*exports, *lines, ""])
            done = shell.run(["sh", "-e", "-s"], text.encode(), max(1.0, deadline - time.monotonic()))
            if done.code != 0:
                last = "\n".join(mask(done.err or done.out.decode("utf-8", "replace")).strip().splitlines()[-20:])
                raise PluginError(plugin, "bootstrap", f"a command ended with status {done.code}:\n{last}", node)

    def _pack_includes(self) -> None:
        if self._context.image.includes:
            from skyward.transport.includes import pack

            directory = private.fresh("skyward-includes-")
            self._steps.callback(shutil.rmtree, directory, ignore_errors=True)
            self._archive = Path(directory, "includes.tar")
            with open(self._archive, "xb", opener=lambda path, flags: os.open(path, flags, 0o600)) as archive:
                pack(self._context.image, Path.cwd(), archive)
                size = archive.tell()
            if size > _LARGE_INCLUDES:
                text = (
                    f"includes hold {size >> 20:,} MB, which are sent to every machine at every opening. For data use "
                    "pool.push(local, remote): it sends only what has changed."
                )
                self._context.emit(Notice(self._context.name, text))

    def _send_includes(self, shell: Shell, directory: str) -> None:
        if self._archive is not None:
            shell.upload(self._archive, f"{directory}/includes.tar")

    def _paths(self, directory: str) -> tuple[str, ...]:
        if not self._context.image.includes:
            return ()
        from skyward.transport.includes import import_paths

        found = import_paths(self._context.image, Path.cwd())
        return tuple(f"{_work(directory)}/{path}".rstrip("/.") for path in found)


def _run_quietly(shell: Shell, argv: Sequence[str]) -> bool:
    try:
        shell.run(argv, timeout=_STOP_TIMEOUT)
    except _UNREACHABLE:
        return False
    return True


def _again(report: Callable[[str, float | None], None], host: str, why: str) -> None:
    report(f"connecting to {host} again ({why})", None)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def _enough_or_error(parts: Sequence[Future[Host]], context: PoolContext) -> list[Host | SkywardError]:
    failed = [error for part in parts if (error := part.exception()) is not None]
    foreign = [error for error in failed if not isinstance(error, SkywardError)]
    if not foreign and len(parts) - len(failed) >= context.min_nodes:
        return [error if isinstance(error := part.exception(), SkywardError) else part.result() for part in parts]
    if context.min_nodes < context.nodes and not foreign:
        names = "".join(f"\n- {error}" for error in dict.fromkeys(map(str, failed)))
        raise BootstrapError(
            "connecting",
            f"{len(parts) - len(failed)} of {context.nodes} nodes are available, and min_nodes={context.min_nodes} "
            f"asks for more. What is wrong with the others:{names}",
        ) from failed[0]
    for text in dict.fromkeys(str(other) for other in failed[1:] if str(other) != str(failed[0])):
        failed[0].add_note(f"also: {text}")
    raise failed[0]


def _work(directory: str) -> str:
    return f"{directory}/work"


def _working_directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return os.sep


def shell_of(machine: Machine) -> Shell:
    if machine.joined is not None:
        return machine.joined.open_shell()
    if machine.pod is not None:
        from skyward.setup.pods import PodShell

        return PodShell(machine.pod)
    from skyward.setup.ssh.shell import SshShell

    assert machine.ssh is not None
    return SshShell(machine.ssh)


_INTERVAL = 10.0
_FAILURES = (SkywardError, OSError, subprocess.TimeoutExpired)


@contextmanager
def during_setup(
    shell: Shell, target: SshTarget | None, access: Access, warn: Callable[[str], None]
) -> Generator[Callable[[], None]]:
    """Renews the machine's lease and runs the provider's setup step.

    Yields a function that waits for it; `warn` gets its failure.
    """
    ended = threading.Event()
    renewing = threading.Thread(target=_renew, args=(shell, access, ended), name="skyward-lease", daemon=True)
    settling = threading.Thread(target=_settle, args=(shell, target, access, warn), name="skyward-settle", daemon=True)
    renewing.start()
    settling.start()
    try:
        yield settling.join
    finally:
        settling.join()
        ended.set()


def _renew(shell: Shell, access: Access, ended: threading.Event) -> None:
    while access.lease_file is not None:
        try:
            shell.run(["touch", access.lease_file], timeout=10)
        except _FAILURES:
            pass  # the setup notices by itself if the machine is gone
        if ended.wait(access.lease / 4):
            return


def _settle(shell: Shell, target: SshTarget | None, access: Access, warn: Callable[[str], None]) -> None:
    if access.settle is None or target is None:
        return
    try:
        text = access.settle(shell, target)
    except _FAILURES as exc:
        text = str(exc).partition("\n")[0]
    if text:
        warn(text)


class Knows(Protocol):
    def unanswered(self, machines: Sequence[Machine]) -> list[str]: ...

    def who_is_let_in(self) -> str: ...


def prepared(shell: Shell, id: str, access: Access, warn: Callable[[str], None]) -> dict[str, str]:
    if access.prepare is None:
        return {}
    try:
        variables, text = access.prepare(shell, id)
    except _FAILURES as exc:
        variables, text = {}, str(exc).partition("\n")[0]
    if text:
        warn(text)
    return variables


class MachineWatch:
    def __init__(self, provider: Knows | None) -> None:
        self._provider = provider
        self._lock = threading.Lock()
        self._waiting: dict[Shell, Machine] = {}
        self._gone: dict[Shell, str] = {}
        self._stopped = threading.Event()

    @contextmanager
    def watching(self, shell: Shell, machine: Machine, login: str = "") -> Generator[None]:
        """Closes the shell if its machine is gone; the block's error then says so."""
        with self._lock:
            if self._provider is not None and not self._waiting:
                self._stopped = threading.Event()
                asking = threading.Thread(target=self._ask, args=(self._provider, self._stopped), name="skyward-watch")
                asking.daemon = True
                asking.start()
            self._waiting[shell] = machine
        try:
            yield
        except BootstrapError as exc:
            if shell in self._gone:
                text = (
                    f"{machine.id}: {self._gone[shell]} before it let us in. Open the pool again for another machine."
                )
                raise BootstrapError("starting", text) from exc
            if login and isinstance(exc, AuthenticationFailed):
                raise AuthenticationFailed(exc.step, f"{exc.detail}\n{login}") from exc
            allowed = self._provider.who_is_let_in() if self._provider and isinstance(exc, HostUnreachable) else ""
            if allowed:
                raise HostUnreachable(exc.step, f"{exc.detail}\n{allowed}") from exc
            raise
        finally:
            with self._lock:
                del self._waiting[shell]
                if not self._waiting:
                    self._stopped.set()

    def _ask(self, provider: Knows, stopped: threading.Event) -> None:
        while not stopped.wait(_INTERVAL):
            with self._lock:
                waiting = dict(self._waiting)
            try:
                reasons = provider.unanswered(list(waiting.values()))
            except _FAILURES:
                continue  # it may be our own network that is down
            for shell, reason in zip(waiting, reasons, strict=True):
                if reason:
                    self._gone[shell] = reason
                    shell.close()
