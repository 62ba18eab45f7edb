"""A detached run as seen from outside: status, output, its end. Watching never disturbs it."""

from __future__ import annotations

import fcntl
import json
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, Literal

from skyward.api.compute import Compute
from skyward.api.shell import PodTarget, SshTarget
from skyward.errors import HostUnreachable, InvalidArgument, SkywardError
from skyward.history import runs
from skyward.history.store import Entry, entries
from skyward.machines.ledger import histories
from skyward.node.run_files import Fetched, fetch, pieces
from skyward.node.run_folder import JOURNAL, OUTPUT, RAISED, RETURNED, RunFolder
from skyward.pool import run_record
from skyward.pool.inspect_socket import Answer, ask_all, spent
from skyward.pool.run_call import Call, packed, raised
from skyward.pool.run_history import copy
from skyward.setup.remote_folder import RemoteFolder
from skyward.transport import journal

if TYPE_CHECKING:
    from skyward.pool.pool import ComputePool

__all__ = ["Run", "RunStatus", "attach", "copy_histories", "detach", "take_note"]

_LOOK = 0.2
_LAST = 2000

Stage = Literal["submitting", "running", "stopping", "copying", "finished", "failed", "stopped", "expired", "lost"]


@dataclass(frozen=True)
class RunStatus:
    """What is known of a run at a moment; times are seconds since 1970."""

    stage: Stage
    """`copying`: its program has ended, its files are being copied to `results=`. `expired`: its time or its budget was
    over. `lost`: its steward or machine is gone, and no end was written.
    """
    code: int | None = None
    """The program's exit status, when it has ended."""
    began: float | None = None
    ended: float | None = None
    until: float | None = None
    """When it ends at the latest."""
    restarts: int = 0
    """How often its program was started again."""
    not_copied: str = ""
    """Why its files were not copied to `results=`, if they should have been."""
    spent: float | None = None
    """Dollars that its machines have cost; None if that is not known."""

    @property
    def over(self) -> bool:
        return self.stage not in ("submitting", "running", "stopping", "copying")


class Run:
    """A detached run that this computer knows, by its name; see `sky.attach`."""

    def __init__(self, name: str) -> None:
        self.name, self._record = name, run_record.find(name)
        self._reached: RunFolder | None = None
        self.receipt: object = None
        """What rented machines have cost, if this process has let them go; or what it could not."""

    def __repr__(self) -> str:
        return f"<Run {self.name} {self.status.stage}>"

    @property
    def about(self) -> dict[str, Any]:
        """Its program, pool and provider, as they were submitted."""
        return self._record.facts.get("submitted", {})

    @property
    def limit(self) -> str:
        """What sets when it ends at the latest, if that is not the pool's `ttl` or budget."""
        return self._record.facts.get("handed", {}).get("limit", "")

    @property
    def results(self) -> str:
        """The directory of node 0 to which its files are copied at its end, if there is one."""
        return self._record.facts.get("handed", {}).get("results", "")

    @property
    def status(self) -> RunStatus:
        if "handed" not in self._record.facts:
            self._record = run_record.find(self.name)
        if "handed" not in self._record.facts:
            return RunStatus("submitting" if runs.find(self.name).in_use else "lost")
        if known := self._record.end:
            return RunStatus(**known)
        try:
            found = self._status()
            if found.stage == "lost":
                found = self._status()  # its steward may have ended after the journal was read
        except HostUnreachable as exc:
            if known := self._record.end:
                return RunStatus(**known)  # another process has brought it home just now
            handed = self._record.facts["handed"]
            until = handed["time"] + handed["left"]
            if until < time.time() or self._machines not in (None, *(held.pool for held in histories())):
                return RunStatus("lost", until=until)  # its machines were given back
            if self._machines is None:
                raise
            text = f"If its machines have ended, `sky down {self._machines} --yes` removes what is left of them."
            text += f" Its files were to be copied to {self.results} there." if self.results else ""
            raise HostUnreachable(exc.step, f"{exc.detail}\n{text}") from exc
        if found.over and self._remote is not None and not self._fleeting:
            self._record.end = asdict(found)
        return found

    def bring_home(self) -> None:
        """Once it is over: copies what rented or joined machines have of it, and lets them go."""
        if self._fleeting and self._record.end is None and self.status.over:
            self.receipt = self._bring_home()
        with suppress(SkywardError, OSError):  # they stay as they were last seen
            self.copy_histories()

    def _bring_home(self) -> object:
        from skyward.machines.reaper import down, renting_providers

        with open(self._record.path / "home", "ab") as held:
            fcntl.flock(held, fcntl.LOCK_EX)  # another terminal may be doing it
            if self._record.end is not None:
                return None
            found = self.status
            with suppress(HostUnreachable):  # lost, and its machines have ended
                fetch(self.name, self._folder, self._record.path / "folder", over=True)
            if self._machines is None:
                self._ask({"do": "stop"})
            self._record.end = asdict(found)
        if self._machines is None:
            return None
        outcomes = down(renting_providers(), [self._machines], really=True)
        return next((outcome.receipt or outcome.why for outcome in outcomes), None)

    def copy_histories(self) -> None:
        """What `sky view`, `sky ps` and others show of its pools, if these are on another machine."""
        if self._target is None or self._record.whole:
            return
        status = self.status
        away = {"run": self.name, "until": status.until or 0.0, "machines": self._machines or ""}
        copy(self._folder, away, status.over)
        self._record.whole = status.over

    def histories(self) -> list[Entry]:
        """Of its pools, on this computer, the last one first."""
        socket = self._record.facts.get("handed", {}).get("socket")
        return [entry for entry in entries() if socket and entry.about.get("steward") == socket]

    def stacks(self) -> list[Answer]:
        """Where the bodies of its pool are."""
        pid = (self._ask({"do": "status"}) or {}).get("pid")
        folder = self._folder
        if not pid or not isinstance(folder, RemoteFolder):
            return [answer for answer in ask_all() if answer.pid == pid]
        lines = folder.sky("stacks", "--json", str(pid)).splitlines()
        return [Answer(**json.loads(line)) for line in lines]

    def _status(self) -> RunStatus:
        facts = self._journal()
        first = {fact["fact"]: fact for fact in reversed(facts)}
        last = {fact["fact"]: fact for fact in facts}
        began, until = first.get("started", {}).get("time"), last.get("head", {}).get("until")
        made = partial(RunStatus, began=began, until=until, restarts=sum(f["fact"] == "restarted" for f in facts))
        made = partial(
            made, spent=spent(last.get("head", {}).get("prices", ()), last.get("ended", {}).get("time", time.time()))
        )
        if "ended" in last:
            why, code, when = last["ended"]["why"], last["ended"]["code"], last["ended"]["time"]
            stages: dict[str, Stage] = {"stop": "stopped", "deadline": "expired"}
            stage = stages.get(why, "finished" if code == 0 else "failed")
            if not last["head"].get("results") or "copied" in last:
                return made(stage, code, ended=when, not_copied=last.get("copied", {}).get("why", ""))
            if self._ask({"do": "status"}):
                return made("copying", code, ended=when)
            return made(stage, code, ended=when, not_copied="the steward ended before")
        if never := next((last[word] for word in ("stop", "deadline", "late") if word in last), None):
            return made("stopped" if "stop" in last else "expired", ended=never["time"])
        answer = self._ask({"do": "status"})
        if answer is None:
            return made("lost")
        return made("stopping" if answer["state"] == "stopping" else "running")

    def output(self, offset: int = 0) -> Iterator[bytes]:
        """What its program has printed so far, from byte `offset` on, in pieces."""
        return pieces(self._folder, OUTPUT, offset)

    def follow(self, offset: int = 0) -> Iterator[bytes]:
        """The same until the run is over."""
        while True:
            over = self.status.over
            try:
                for piece in self.output(offset):
                    offset += len(piece)
                    yield piece
            except HostUnreachable:
                if self._record.end is None:
                    raise
                continue  # another process has brought it home just now
            if over:
                self.bring_home()
                return
            time.sleep(_LOOK)

    def wait(self, timeout: float | None = None) -> RunStatus:
        """Its status when it is over; TimeoutError if it is not within `timeout` seconds."""
        limit = None if timeout is None else time.monotonic() + timeout
        while not (status := self.status).over:
            if limit is not None and time.monotonic() > limit:
                raise TimeoutError(f"the run {self.name} is {status.stage} after {timeout:g} s.")
            time.sleep(_LOOK)
        self.bring_home()
        return status

    def result(self, timeout: float | None = None) -> Any:
        """What the function of `sky.detach` returned; its exception is raised. Waits until the run is over."""
        status = self.wait(timeout)
        if status.stage in ("finished", "failed"):
            if content := b"".join(pieces(self._folder, RETURNED)):
                return pickle.loads(content)
            if content := b"".join(pieces(self._folder, RAISED)):
                raise raised(content)
        if status.stage == "finished":
            raise SkywardError(f"the run {self.name} is finished; a program has no return value, only its output.")
        last = b"".join(self.output())[-_LAST:].decode("utf-8", "replace")
        raise SkywardError(f"the run {self.name} is {status.stage} and has returned nothing. It printed last:\n{last}")

    def fetch(self, directory: str | Path | None = None) -> Fetched:
        """Copies its output, its result and what its program has written to `results/` in the run's folder.

        While it runs, too; what was copied before, or in part, is not copied again.

        Args:
            directory: a new directory, or that of an earlier fetch. Default: the run's name, in the current one.
        """
        over = self.status.over  # known before its files are looked at
        if "handed" not in self._record.facts:
            raise SkywardError(f"the run {self.name} has no files: its program was not started.")
        return fetch(self.name, self._folder, Path(directory or self.name), over)

    def stop(self) -> RunStatus:
        """Ends it: its program is told (SIGTERM), then killed after the pool's grace; machines are released."""
        if not self.status.over and self._ask({"do": "stop"}) is None and not self.status.over:
            raise SkywardError(f"the steward of {self.name} does not answer. Its machines end by themselves.")
        return self.wait()

    @property
    def folder(self) -> str:
        return self._record.facts.get("handed", {}).get("folder", "")

    def remove(self) -> None:
        self._folder.remove()

    def check_over(self) -> None:
        """Raises unless it is over: only then may it be forgotten."""
        if not self.status.over:
            raise InvalidArgument(f"the run {self.name} is not over. Stop it first: `sky stop {self.name}`.")

    @property
    def seen(self) -> int:
        """Bytes of its output that were shown on this computer."""
        return self._record.seen

    @seen.setter
    def seen(self, offset: int) -> None:
        self._record.seen = offset

    @property
    def _remote(self) -> dict[str, Any] | None:
        """How node 0 is reached; None if the files are on this computer."""
        return None if self._fleeting and self._record.end is not None else self._target

    @property
    def _target(self) -> dict[str, Any] | None:
        return self._record.facts.get("handed", {}).get("target")

    @property
    def _fleeting(self) -> bool:
        """Whether node 0 cannot be reached for good when it is over."""
        return self._machines is not None or run_record.JOIN in (self._target or {})

    @property
    def _machines(self) -> str | None:
        """The name under which its machines were rented."""
        return self._record.facts.get("handed", {}).get("machines")

    @property
    def _folder(self) -> RunFolder:
        handed = self._record.facts.get("handed", {"folder": str(self._record.path / "folder"), "socket": ""})
        if self._fleeting and self._record.end is not None:
            return RunFolder(str(self._record.path / "folder"), "")
        if self._remote is None:
            return RunFolder(handed["folder"], handed["socket"])
        if self._reached is None:
            self._reached = _reached(handed, self._remote, self._record.path)
        return self._reached

    def _journal(self) -> list[dict[str, Any]]:
        return journal.read(b"".join(pieces(self._folder, JOURNAL)))[0]

    def _ask(self, question: dict[str, Any]) -> dict[str, Any] | None:
        try:
            return self._folder.ask(question)
        except (OSError, ValueError):
            return None


def _reached(handed: Mapping[str, Any], target: Mapping[str, Any], record: Path) -> RunFolder:
    from skyward.setup.ssh.shell import SshShell

    place = handed["python"], handed["folder"], handed["socket"]
    if run_record.JOIN in target:
        from skyward.setup.joined.door import DoorShell

        return RemoteFolder(DoorShell(record), *place)
    if pod := target.get("pod"):
        from skyward.setup.pods import PodShell

        return RemoteFolder(PodShell(PodTarget(**pod)), *place)
    job, ssh = target.get("job"), {name: value for name, value in target.items() if name != "job"}
    if job is None:
        return RemoteFolder(SshShell(SshTarget(**ssh)), *place)
    from skyward.api.secret import slurm_environment
    from skyward.providers.slurm.commands import on_node
    from skyward.setup.local_shell import LocalShell

    shell, env = (SshShell(SshTarget(**ssh)), {}) if ssh else (LocalShell(), slurm_environment(os.environ))
    return RemoteFolder(shell, *place, partial(on_node, *job), env)


def take_note(name: str, host: str) -> None:
    """Has this computer know a run that another one submitted.

    `host` is the run's first one, as `sky.SSH` takes it, or pod/NAME in the cluster and namespace that kubectl means.
    """
    from skyward.setup.remote_folder import find

    if host.startswith("pod/"):
        from skyward.setup.kubectl import Kubectl
        from skyward.setup.pods import PodShell

        kubectl = Kubectl.find(None, None)
        pod = PodTarget(host.removeprefix("pod/"), kubectl.namespace, kubectl.context)
        shell, way = PodShell(pod), {"pod": asdict(pod)}
    else:
        from skyward.providers.ssh import SSH
        from skyward.setup.ssh.shell import SshShell

        (target,) = SSH([host]).targets
        shell, way = SshShell(target), asdict(target)
    with closing(shell):
        folder, head = find(shell, name)
    record = run_record.create(name)
    record.write("submitted", pool=head["pool"], program=head["program"], provider=head["provider"])
    left = head["until"] - time.time()
    way |= {"job": head["job"]} if head.get("job") else {}
    place = {
        "folder": folder,
        "socket": head["socket"],
        "python": head.get("python", ""),
        "results": head.get("results", ""),
    }
    record.write("handed", **place, target=way, left=left)
    record.write("running")
    record.close()


def copy_histories(within: float = 5.0) -> None:
    """Of all runs on other machines; those that cannot be reached so soon stay as they were last seen."""

    def look(name: str) -> None:
        with suppress(SkywardError, OSError):
            Run(name).copy_histories()

    deadline = time.monotonic() + within
    threads = [Thread(target=look, args=(run.name,), daemon=True) for run in runs.runs(run_record.KIND)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def attach(name: str) -> Run:
    """The detached run `name` of this computer, whoever submitted it."""
    return Run(name)


def detach(
    fn: Callable[..., object],
    /,
    *args: Any,
    pool: ComputePool | None = None,
    name: str | None = None,
    restarts: int = 0,
    results: str | Path | None = None,
    hold: float | None = None,
    **kwargs: Any,
) -> Run:
    """Runs `fn(*args, **kwargs)` without this program, which may end; returns when the function has been started.

    Args:
        fn: a function that sends calls, as a program does: `>> sky` and `@ sky` mean the pool.
        args: its arguments.
        pool: the pool that is open while it runs, as `sky.ComputePool(...)`, not opened. Default: this computer.
        name: what the run is called, for `sky.attach` and `sky runs`. Default: the function's name.
        restarts: how often the function is started again if it raises. Default: 0.
        results: a directory that node 0 can write to. When the run ends, and when node 0 is about to be taken away, its
            files are copied there, to a directory with its name, as `Run.fetch` does.
        hold: how many seconds a rented node 0 stays after the end, within `ttl` and budget, so that its files can be
            fetched. Default: an hour, or two minutes if they were copied to `results`.
        kwargs: its arguments by name.
    """
    from skyward.pool.detached import AtEnd, Program, submit
    from skyward.pool.pool import ComputePool
    from skyward.pool.program_files import imported, loaded, own_folders
    from skyward.pool.program_imports import of_function

    if isinstance(fn, Compute) or not callable(fn):
        raise InvalidArgument(
            "sky.detach(fn, ...): expected a plain function that sends calls to the pool: `def main(): "
            "train(1) >> sky`, then `sky.detach(main)`."
        )
    used = ComputePool() if pool is None else pool
    called, root, local = getattr(fn, "__name__", "run"), Path.cwd(), used.provider.access.local
    folders, files = [Path(path).resolve() for path in sys.path], list[str]()
    if not local:  # what is elsewhere is sent by value
        folders, modules = own_folders(folders, root), loaded(root)
        files = [os.path.relpath(path, root.resolve()) for path in (*modules, *imported(modules, folders))]
    call = packed(Call(fn, args, kwargs, used.given), [os.path.relpath(path) for path in folders])
    imports, path = of_function(pickle.loads(call)[1], root), [str(path) for path in folders if local]
    program = Program("skyward.pool.run_call", [], str(root), f"{called}()", call, imports, path, files)
    at_end = AtEnd(restarts, None if results is None else str(results), hold)
    record = submit(used, name or run_record.free_name(called), program, at_end)
    return Run(record.name)
