"""Runs a failed call again on this computer: its environment, its ranks as processes, what differs from its node.

kept call ─► environment (this Python, or one made by uv) ─► a process for each rank ─► result, exception, debugger
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import IO, Any

from skyward.api.image import Image, PipIndex
from skyward.api.info import VARIABLE, AcceleratorInfo, InstanceInfo, NetworkInfo, Peer
from skyward.client.call import Packed, unpacked
from skyward.errors import BootstrapError, InvalidArgument, TaskCrashed, TaskTimeout
from skyward.history.failed_calls import find, load
from skyward.history.lines import summary
from skyward.node.failed_call import FailedCall, Rerun, Verdict, read, system
from skyward.node.gpu_shares import names
from skyward.node.gpus import look
from skyward.node.shared.server import serving
from skyward.setup.env.local import Environment, prepare
from skyward.setup.local_shell import inherited
from skyward.setup.node_settings import thread_counts
from skyward.transport import blobs, exceptions, private

__all__ = ["Replay", "call_of", "replay"]

_NOTES = re.compile(r"`sky replay (\w+)`|^raised on .*, call (\w+), attempt ", re.M)
_PINNED = re.compile(r"^(?:# )?([A-Za-z0-9][\w.-]*)==([^\s;\\]+)", re.M)
_SOURCE = re.compile(r'^  File "(.+)", line \d+, in ', re.M)
_MISSING = re.compile(r"FileNotFoundError: .*No such file or directory: (.*)")
_TERMINAL = ("TERM", "COLORTERM", "COLUMNS", "LINES", "NO_COLOR", "PYTHONBREAKPOINT", "MPLBACKEND")
_PORTS = ("torch", "jax", "tensorflow")
_MOST_DIFFERENT = 6
_ENDING = 10.0
_SHARE = 0.8  # of the memory that is free here, for a call that ran out of memory

Report = Callable[[str], None]


def replay(call: str | BaseException, /, *, rank: int | None = None, pdb: bool = False) -> Any:
    """Runs a call that failed again, on this computer: same function, arguments, `instance_info`, variables, packages.

    Args:
        call: the exception that it raised, or its id, which the exception's note names; the beginning is enough.
        rank: of a broadcast, whose result or exception is wanted. Default: the rank that failed first.
        pdb: whether the debugger is opened at the line that fails, in this terminal. Default: False.

    Returns what the function returns, of a generator a list of its items; raises what it raises.
    """
    again = Replay(call, rank)
    for text in again.differences():
        _tell(text)
    return again.run(pdb=pdb, shown=False).value()


def call_of(error: BaseException) -> str:
    """The id of the call that has raised an exception, as its notes name it."""
    for note in reversed(getattr(error, "__notes__", ())):
        if isinstance(note, str) and (found := _NOTES.search(note)):
            return found[1] or found[2]
    raise InvalidArgument(
        f"{type(error).__name__} does not come from a call that can be run again: no note of it names one. Give the "
        "id of the call; `sky replay` lists those that are kept."
    )


@dataclass(frozen=True)
class Ended:
    """How a call ended that was run again."""

    call: FailedCall
    verdict: Verdict
    pieces: Sequence[Any]
    status: int

    @property
    def failed(self) -> bool:
        return self.verdict.kind != "done"

    def summary(self) -> str:
        """One line: type and message."""
        verdict = self.verdict
        if verdict.kind == "error":
            return summary("error", str(verdict.error["traceback"]))
        return "" if verdict.kind == "done" else exceptions.as_text(self._error()).partition("\n")[0]

    def value(self) -> Any:
        """The result, or raises the exception."""
        if not self.failed:
            return unpacked(self.call.name, Packed({}, list(self.pieces)))
        raise self._error()

    def _error(self) -> BaseException:
        call, verdict = self.call, self.verdict
        if verdict.kind == "error":
            where = f"raised on this computer when {call.name}, call {call.id}, was run again"
            described: Any = verdict.error
            return exceptions.packed(described, self.pieces[0], where).rebuilt()
        if verdict.kind == "timeout":
            error = TaskTimeout(call.name, call.node, call.metadata.get("timeout", 0.0), call.attempt, False)
            exceptions.with_frames(error, "where the body stood when its time was over:", verdict.error["stack"])
            return error
        code = int(verdict.error.get("code", self.status))
        signal_name = signal.Signals(-code).name if code < 0 else None
        return TaskCrashed(call.name, call.node, call.attempt, code, signal_name)


class Replay:
    """A kept call, ready to be run again as one of its ranks."""

    def __init__(self, call: str | BaseException, rank: int | None = None, report: Report | None = None) -> None:
        self._path, self._report = Path(), report or _tell
        id = call_of(call) if isinstance(call, BaseException) else call
        if not isinstance(id, str):  # pyright: ignore[reportUnnecessaryIsInstance] - callers may be untyped
            raise InvalidArgument(f"replay({id!r}): the exception of a call, or its id as text, is wanted.")
        found = find(id)
        self._path = found.path
        self.call, self.pool = load(found)
        here = f"{sys.version_info[0]}.{sys.version_info[1]}"
        if self.pool.python != here:
            raise InvalidArgument(
                f"{self.call.name} ran on Python {self.pool.python}, and this is {here}; functions cannot cross from "
                f"one to the other. Run it with that one: uv run --python {self.pool.python} sky replay {self.call.id}."
            )
        self._info = InstanceInfo.from_json(self.call.info)
        world = self._info.world_size
        self.rank = rank if rank is not None else self.call.rank if self.call.rank is not None else self._info.rank
        if not 0 <= self.rank < world or (not self.call.group and rank not in (None, self.rank)):
            known = f"ranks 0 to {world - 1}" if world > 1 else "only rank 0"
            raise InvalidArgument(f"there is no rank {rank}: the call was sent to {known}.")
        if not self.call.group and rank is not None and rank != self.call.rank:
            raise InvalidArgument(f"the call was sent to rank {self.call.rank} alone. Leave rank={rank} out.")
        together = self.call.group or any(around for _, _, around in self.pool.hooks)
        self._ranks = list(range(world)) if together and world > 1 else [self.rank]
        self._gpus = look().gpus if len(self._ranks) == 1 else ()

    def differences(self) -> list[str]:
        """What is not here as it was on the node, in sentences."""
        call, pool, facts = self.call, self.pool, self.call.facts
        told: list[str] = []
        if facts.hostname != os.uname().nodename:
            told.append(f"it ran on node {call.node}, {facts.hostname}; this is {os.uname().nodename}")
        pairs = {
            "Python": (".".join(map(str, facts.python)), ".".join(map(str, sys.version_info[:3]))),
            "system": (facts.system, system()),
            "CPUs": (str(facts.cpus), str(_cpus())),
            "GPUs": (", ".join(facts.gpus) or "none", ", ".join(gpu.name for gpu in self._gpus) or "none"),
        }
        told += [f"{what}: {there} on the node, {here} here" for what, (there, here) in pairs.items() if there != here]
        if facts.gpus and not self._gpus:
            told.append("it runs on the CPU here; tensors of GPUs come to the CPU")
        told += self._other_packages()
        for name in pool.secret_variables:
            state = "has the value of this terminal" if name in os.environ else "is not set"
            told.append(f"variable {name} is not kept, since it may be a secret; here it {state}")
        told += [f"plugin {name} is left out: its hooks hold a secret, and are not kept" for name in pool.left_out]
        if not os.path.isdir(pool.directory):
            told.append(f"the directory {pool.directory} of the program is gone")
        for path in dict.fromkeys(_SOURCE.findall(call.error)):
            if os.path.isfile(path) and os.path.getmtime(path) > call.time:
                told.append(f"{path} has changed since: the code of then runs, and lines are shown as they are now")
        return told

    def _other_packages(self) -> list[str]:
        if not self._satisfied():
            return []  # those of the node are installed
        found = [(name, there, here) for name, there in _PINNED.findall(self.pool.packages) if (here := _version(name))]
        different = [f"{name} {there} (here {here})" for name, there, here in found if _public(there) != _public(here)]
        more = f" and {len(different) - _MOST_DIFFERENT} more" if len(different) > _MOST_DIFFERENT else ""
        return [f"packages on the node: {', '.join(different[:_MOST_DIFFERENT])}{more}"] if different else []

    def compared(self, ended: Ended) -> list[str]:
        """How it ended, beside how it had ended on the node."""
        before = summary(self.call.outcome, self.call.error)
        if not ended.failed:
            return [f"it returned here. On the node it failed: {before}"]
        now = ended.summary()
        if _kind(now) != _kind(before):
            told = [f"it failed here in another way: {now}", f"on the node: {before}"]
            missing = _MISSING.match(now)
            return [*told, f"{missing[1]} is not on this computer"] if missing else told
        return [f"it failed as on the node: {now}"]

    def run(self, *, pdb: bool = False, shown: bool = True) -> Ended:
        """Runs it; `shown` has the process print the traceback."""
        if pdb and not sys.stdin.isatty():
            raise InvalidArgument(
                "the debugger needs a terminal. In one, write " + f"`sky replay {self.call.id} --pdb`."
            )
        environment = self._environment()
        with ExitStack() as stack:
            scratch = private.fresh("skyward-replay-")
            stack.callback(shutil.rmtree, scratch, ignore_errors=True)
            infos = dict(self._infos())
            shared = os.path.join(scratch, "shared")
            stack.enter_context(serving(shared, infos[self.rank]))
            others = [stack.enter_context(self._other(environment, infos[rank], rank, scratch)) for rank in infos
                      if rank != self.rank]  # fmt: skip
            verdict = os.path.join(scratch, "verdict")
            order = Rerun(
                scratch=scratch, shared=shared, verdict=verdict, cpu=not self._gpus, debugger=pdb, shown=shown,
                limit=self.call.metadata.get("timeout") if self.call.outcome == "timeout" else None,
                memory=_memory() if "TaskOutOfMemory" in self.call.error else None,
            )  # fmt: skip
            status = self._watched(environment, infos[self.rank], order)
            for other in others:
                assert other.stdin is not None
                other.stdin.close()  # no more need to wait for us
            ended, pieces = Verdict(kind="crashed"), list[Any]()
            if os.path.exists(verdict):
                ended, pieces[:] = read(Path(verdict), Verdict)
            for index, blob in ended.blobs.items():
                pieces[int(index)] = blobs.read(blob)  # while its file is there
            for other in others if ended.kind == "done" else ():
                _wait(other)
            return Ended(self.call, ended, pieces, status)

    # the processes

    def _watched(self, environment: Environment, info: InstanceInfo, order: Rerun) -> int:
        """Runs the rank that is asked for in this terminal; returns its exit status."""
        ours = sys.stdout is sys.__stdout__ and sys.stderr is sys.__stderr__
        pipe = None if ours else subprocess.PIPE  # in a notebook the terminal is not where its cells print
        process = self._start(environment, info, order, None, pipe, pipe)
        pumps = [_pump(process.stdout, lambda: sys.stdout, ""), _pump(process.stderr, lambda: sys.stderr, "")]
        try:
            with _interrupts_ignored():  # they are for the body, and for the debugger
                status = process.wait()
        except BaseException:
            process.kill()
            process.wait()
            raise
        for pump in pumps:
            pump.join(_ENDING)
        return status

    @contextmanager
    def _other(
        self, environment: Environment, info: InstanceInfo, rank: int, scratch: str
    ) -> Generator[subprocess.Popen[bytes]]:
        shared = os.path.join(scratch, "shared")
        order = Rerun(scratch=scratch, shared=shared, body=bool(self.call.group), cpu=True)
        process = self._start(environment, info, order, subprocess.PIPE, subprocess.PIPE, subprocess.STDOUT, apart=True)
        pump = _pump(process.stdout, lambda: sys.stderr, f"[rank {rank}] ")
        try:
            yield process
        finally:
            process.kill()
            process.wait()
            assert process.stdin is not None
            process.stdin.close()
            pump.join(_ENDING)

    def _start(
        self,
        environment: Environment,
        info: InstanceInfo,
        order: Rerun,
        stdin: int | None,
        stdout: int | None,
        stderr: int | None,
        apart: bool = False,
    ) -> subprocess.Popen[bytes]:
        passed = {name: os.environ[name] for name in (*_TERMINAL, *self.pool.secret_variables) if name in os.environ}
        counts = thread_counts(len(self._ranks), _cpus(), self.pool.env, True, os.environ)
        hidden = {} if self._gpus else {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
        env = {**inherited(os.environ), **passed, **counts, **environment.env, **self.pool.env, **hidden}
        env |= {VARIABLE: info.to_json(), "PYTHONUNBUFFERED": "1", blobs.SCRATCH: order.scratch}
        argv = [environment.python, "-P", "-m", "skyward.node.replay", str(self._path), json.dumps(asdict(order))]
        return subprocess.Popen(argv, env=env, stdin=stdin, stdout=stdout, stderr=stderr, start_new_session=apart)

    # as the node was

    def _infos(self) -> Generator[tuple[int, InstanceInfo]]:
        """Of every process that is started: its own number and node, at addresses of this computer."""
        info, ports = self._info, _free_ports(1 + len(_PORTS))
        alone = len(self._ranks) == 1
        gpus = names(self._gpus, os.environ) if self._gpus else []
        kind = info.accelerator
        for rank in self._ranks:
            node = info.node_of(rank)
            workers = info.ranks_per_node[node] if info.ranks_per_node else info.workers_per_node
            first = sum(info.ranks_per_node[:node]) if info.ranks_per_node else node * info.workers_per_node
            yield (
                rank,
                replace(
                    info,
                    node=node,
                    worker=rank - first,
                    workers_per_node=workers,
                    accelerators=len(gpus),
                    total_accelerators=len(gpus),
                    node_gpus=tuple(gpus),
                    gpu_conflict=None,
                    head_addr=info.head_addr if alone else "127.0.0.1",
                    head_port=ports[0],
                    peers=info.peers if alone else tuple(Peer(peer.node, "127.0.0.1") for peer in info.peers),
                    accelerator=kind and AcceleratorInfo(kind.type, len(gpus), kind.memory_gb, kind.is_trainium),
                    network=NetworkInfo("lo" if sys.platform == "linux" else None),
                    ports=dict(zip(_PORTS, ports[1:], strict=True)),
                ),
            )

    def _satisfied(self) -> bool:
        """Whether the interpreter that runs this has the packages of the image."""
        from skyward.setup.env.uv import missing_pip

        return not missing_pip(self.pool.pip)

    def _environment(self) -> Environment:
        if self._satisfied():
            return Environment(sys.executable)
        indexes = [PipIndex(str(url), packages) for url, packages in self.pool.pip_indexes]
        image = Image(pip=self.pool.pip, pip_indexes=indexes, build=self.pool.build)
        with ExitStack() as stack:
            if self.pool.locked:
                directory = private.fresh("skyward-lock-")
                stack.callback(shutil.rmtree, directory, ignore_errors=True)
                lock = Path(directory, "packages.txt")
                lock.write_text(self.pool.packages)
                try:
                    return prepare(replace(image, lock=str(lock)), report=self._report)
                except (BootstrapError, InvalidArgument) as exc:
                    why = str(exc).partition("\n")[0]
                    self._report(
                        f"the packages of the node cannot be installed here as they were ({why}); trying others"
                    )
            return prepare(image, report=self._report)


def _tell(text: str) -> None:
    print(f"replay: {text}", file=sys.stderr, flush=True)


def _kind(summary: str) -> str:
    """The name of an exception's class, from its first line."""
    return summary.partition(":")[0].rpartition(".")[2]


def _public(version: str) -> str:
    """Without what says how it was built, such as `+cpu`."""
    return version.partition("+")[0]


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _memory() -> int | None:
    """How many bytes a body may use here, so that it fails by itself before this computer does."""
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.M)
    except OSError:
        return None
    return int(int(found[1]) * 1024 * _SHARE) if found else None


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


def _pump(source: IO[bytes] | None, target: Callable[[], Any], prefix: str) -> threading.Thread:
    """Passes on what a process prints."""

    def work() -> None:
        if source is None:
            return
        with source:
            for line in source:
                target().write(prefix + line.decode("utf-8", "replace"))
                target().flush()

    thread = threading.Thread(target=work, name="skyward-replay", daemon=True)
    thread.start()
    return thread


def _wait(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(_ENDING)
    except subprocess.TimeoutExpired:
        pass  # it is killed


@contextmanager
def _interrupts_ignored() -> Generator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
