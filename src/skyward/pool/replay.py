"""Runs a failed call again: a pool on this computer gets what was sent to the node.

kept call ─► image, hooks, bytes ─► ComputePool with a process for each rank ─► result or exception, beside the old one
"""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import sys
import termios
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from skyward.api.compute import PendingCompute
from skyward.api.image import Image
from skyward.api.info import InstanceInfo
from skyward.api.plugin import Plugin
from skyward.api.secret import Secret
from skyward.client import gather
from skyward.client.futures import wait_for_all
from skyward.client.packing import Sent
from skyward.errors import BootstrapError, InvalidArgument, NodeLost, PluginError
from skyward.events import CallEnded, Event, Output, Warned
from skyward.history.failed_calls import PoolOfCalls, find, load
from skyward.history.lines import summary
from skyward.node import replay as hooks
from skyward.node.body import Hook
from skyward.node.gpus import look
from skyward.node.settings import in_words, system
from skyward.pool.pool import ComputePool
from skyward.setup.env.local import prepare
from skyward.transport import exceptions, private
from skyward.transport.payload import unpack

__all__ = ["Replay", "call_of", "replay"]

_NOTES = re.compile(r"`sky replay (\w+)`|^raised on .*, call (\w+), attempt ", re.M)
_TERMINAL = ("TERM", "COLORTERM", "COLUMNS", "LINES", "NO_COLOR", "MPLBACKEND")
_NO_GPUS = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
_PATIENCE, _FOREVER = 5.0, 1e6  # seconds that failed ranks wait for the one that is wanted; while someone debugs
_SHARE = 0.8  # of the memory that is free here, for a call that ran out of memory


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
    ended = again.run(pdb=pdb)
    if ended.error is None:
        return ended.result
    if ended.rank != again.rank:
        exceptions.noted(ended.error, f"rank {again.rank} did not fail: it was rank {ended.rank}.")
    raise ended.error


def call_of(error: BaseException) -> str:
    """The id of the call that raised an exception, from its notes."""
    for note in reversed(getattr(error, "__notes__", ())):
        if isinstance(note, str) and (found := _NOTES.search(note)):
            return found[1] or found[2]
    if isinstance(error, NodeLost):
        raise InvalidArgument(
            "the call cannot be run again: its machine was lost while it ran, so no line of it has failed, and nothing "
            "of it was kept. Send it again, or give it retries."
        )
    raise InvalidArgument(
        f"{type(error).__name__} does not come from a call that can be run again: no note of it names one. Give the "
        "id of the call; `sky replay` lists those that are kept."
    )


@dataclass(frozen=True)
class Ended:
    rank: int
    """That failed, or whose result it is."""
    result: Any = None
    error: BaseException | None = None
    text: str = ""
    """The error as listeners get it."""
    outcome: str = "error"


class Replay:
    """A kept call, ready to run again as one of its ranks."""

    def __init__(self, call: str | BaseException, rank: int | None = None) -> None:
        id = call_of(call) if isinstance(call, BaseException) else call
        if not isinstance(id, str):  # pyright: ignore[reportUnnecessaryIsInstance] - callers may be untyped
            raise InvalidArgument(f"replay({id!r}): expected the exception of a call, or its id as text.")
        if sys.platform != "linux":
            raise InvalidArgument(
                "calls are run again in a pool on this computer, which needs Linux, or WSL on Windows."
            )
        self.call, path = find(id)
        self._pieces = load(self.call, path)
        self.pool: PoolOfCalls = pickle.loads(self._pieces.pop())
        self._sources: dict[str, str] = json.loads(bytes(self._pieces.pop()))
        self._image: Image = pickle.loads(self.pool.image)
        there, here = ((*each[:2],) for each in (self._image.python_version, sys.version_info))
        if there != here:
            command = f"{self.pool.interpreter} -m skyward replay {self.call.id}"
            raise InvalidArgument(
                f"{self.call.name} was sent with Python {there[0]}.{there[1]}, and this is {here[0]}.{here[1]}: "
                f"functions cannot cross from one to the other. `{command}` runs it again if that Python is still "
                "there; otherwise another one of this version that has Skyward does."
            )
        hooks = self.pool.hooks
        self._hooks: list[Hook] = unpack(hooks[0], hooks[1:]) if hooks else []
        world = InstanceInfo.from_json(self.call.info).world_size
        failed = 0 if self.call.rank is None else self.call.rank
        self.rank, self._asked = failed if rank is None else rank, rank is not None
        if not 0 <= self.rank < world or (not self.call.group and self.rank != failed):
            known = f"ranks 0 to {world - 1}" if self.call.group and world > 1 else f"rank {failed} alone"
            raise InvalidArgument(f"there is no rank {rank}: the call was sent to {known}.")
        together = self.call.group or any(around for _, around, _ in self._hooks)
        self._world = world if together else 1
        self._at = self.rank if together else 0  # the rank that it has here
        self._gpus = look().gpus if self._world == 1 else ()

    def differences(self) -> list[str]:
        """What is not as it was on the node, in sentences."""
        call, pool = self.call, self.pool
        gpus, cpus = [{"name": gpu.name} for gpu in self._gpus], len(os.sched_getaffinity(0))
        about = {"hostname": os.uname().nodename, "python": sys.version_info[:3], "system": system()}
        here = in_words({**about, "cpus": cpus, "gpus": gpus})
        told = [f"{what}: {there} on the node, {here[what]} here" for what, there in call.machine.items()
                if what in here and there != here[what]]  # fmt: skip
        if call.machine.get("GPUs", "none") != "none" and not gpus:
            told.append("it runs on the CPU here; tensors of GPUs come to the CPU")
        for name in pool.secret_variables:
            state = "has the value of this terminal" if name in os.environ else "is not set"
            told.append(f"variable {name} is not kept, since it may be a secret; here it {state}")
        told += [f"plugin {name} is left out: its hooks hold a secret, and are not kept" for name in pool.left_out]
        if not os.path.isdir(pool.directory):
            told.append(f"the directory {pool.directory} of the program is gone")
        changed = [path for path, text in self._sources.items() if _text(path) not in (text, None)]
        return [*told, *(f"{path} has changed since: the code as it was then runs and is shown" for path in changed)]

    def compared(self, ended: Ended) -> list[str]:
        before, now = summary(self.call.outcome, self.call.error), summary(ended.outcome, ended.text)
        if ended.error is None:
            return [f"it returned here. On the node it failed: {before}"]
        told = [f"it failed as on the node: {now}"]
        if _kind(now) != _kind(before):
            told = [f"it failed here in another way: {now}", f"on the node: {before}"]
        if ended.rank != self.rank:
            told.append(f"rank {self.rank} did not fail: it was rank {ended.rank}")
        return told

    def run(self, *, pdb: bool = False) -> Ended:
        if pdb and not sys.stdin.isatty():
            rank = f" --rank {self.rank}" if self._asked else ""
            command = f"sky replay {self.call.id}{rank} --pdb"
            raise InvalidArgument(f"the debugger needs a terminal. In one, write `{command}`.")
        ends: dict[int, CallEnded] = {}
        with ExitStack() as stack:
            if pdb:
                stack.callback(termios.tcsetattr, 0, termios.TCSADRAIN, termios.tcgetattr(0))
            pool = self._pool(self._packages(stack), pdb)
            pool.on_event(partial(self._heard, ends))
            try:
                stack.enter_context(pool)
            except PluginError as exc:
                rank = exc.rank if exc.rank is not None else exc.node
                rank = self.rank if rank is None or self._world == 1 else rank
                return Ended(rank, None, exc, exceptions.as_text(exc))
            at, result, error = self._sent(pool) if self.call.about else (self._at, None, None)
        if error is None:
            return Ended(self.rank, result)
        return Ended(self.rank if at == self._at else at, None, error, ends[at].error, ends[at].outcome)

    def _packages(self, stack: ExitStack) -> Image:
        """With exactly the packages of the node, where these were installed for it and can be here."""
        env = {name: os.environ[name] for name in _TERMINAL if name in os.environ}
        env |= {name: Secret(os.environ[name]) for name in self.pool.secret_variables if name in os.environ}
        hidden = {} if self._gpus else _NO_GPUS
        image = replace(self._image, env={**env, **self._image.env, **hidden})
        if not self.pool.packages:
            return image
        directory = private.fresh("skyward-lock-")
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        lock = Path(directory, "packages.txt")
        lock.write_text(self.pool.packages)
        exact = replace(image, lock=str(lock))
        try:
            prepare(exact, report=_tell)
        except (BootstrapError, InvalidArgument) as exc:
            why = str(exc).partition("\n")[0]
            _tell(f"the packages of the node cannot be installed here as they were ({why}); trying others")
            return image
        return exact

    def _pool(self, image: Image, pdb: bool) -> ComputePool:
        call, pool = self.call, self.pool
        order = hooks.Order(
            info=call.info,
            rank=self.rank,
            directory=pool.directory,
            paths=pool.paths,
            sources=self._sources,
            memory=_memory(self._world) if "TaskOutOfMemory" in call.error else None,
            terminal=os.ttyname(0) if pdb else "",
            patience=_FOREVER if pdb else _PATIENCE,
        )
        theirs = [Plugin(name, around_app=around if self._gpus else _on_the_cpu(around), decorate=decorate)
                  for name, around, decorate in self._hooks]  # fmt: skip
        before = Plugin("replay", around_app=partial(hooks.around_app, order))
        last = Plugin("replay, last", decorate=partial(hooks.decorate, order))
        return ComputePool(
            nodes=self._world, image=image, plugins=[before, *theirs, last], retries=0, stall_timeout=None,
            max_result_bytes=1 << 62, grace=_FOREVER if pdb else 10.0, console=False, history=False,
        )  # fmt: skip

    def _sent(self, pool: ComputePool) -> tuple[int, Any, BaseException | None]:
        """Sends it to all ranks or to the one that had it; returns how which of them ended."""
        engine, packing = pool._engine, pool._sender.packing  # pyright: ignore[reportPrivateUsage] - same folder
        about = {**self.call.about}
        if self.call.outcome != "timeout":
            about.pop("timeout", None)
        pending = PendingCompute[Any](Sent(cast("Any", about), self._pieces), label=self.call.name)
        made = packing.copies(pending, self._world if self.call.group else 1, self.call.attempt, 0)
        calls = dict(enumerate(made)) if self.call.group else {self._at: made[0]}
        calls[self._at].id = calls[self._at].future.call = self.call.id
        engine.send_to(list(calls.items()))
        wait_for_all([call.future for call in made])
        errors = {at: error for at, call in calls.items() if (error := gather.error_of(call.future)) is not None}
        if not errors:
            return self._at, calls[self._at].future.result(), None
        # the rank that failed by itself, not those that were stopped because of it
        at = min(errors, key=lambda at: (calls[at].stopping is not None, at != self._at))
        return at, None, errors[at]

    def _heard(self, ends: dict[int, CallEnded], event: Event) -> None:
        if isinstance(event, CallEnded):
            ends[event.node] = event  # each has one rank
        elif isinstance(event, Warned):
            print(f"{event.path}:{event.line}: {event.text}", file=sys.stderr, flush=True)
        elif isinstance(event, Output) and not event.progress:
            other = event.rank != self._at
            stream = sys.stderr if other or event.stream == "stderr" else sys.stdout
            print(f"[rank {event.rank}] {event.text}" if other else event.text, file=stream, flush=True)


def _tell(text: str) -> None:
    print(f"replay: {text}", file=sys.stderr, flush=True)


def _kind(summary: str) -> str:
    """Of an exception, from its first line."""
    return summary.partition(":")[0].rpartition(".")[2]


def _text(path: str) -> str | None:
    try:
        return Path(path).read_text()
    except (OSError, ValueError):
        return None


def _memory(processes: int) -> int | None:
    """Bytes that a body may use here: it fails before this computer does."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", _text("/proc/meminfo") or "", re.M)
    return int(int(found[1]) * 1024 * _SHARE / processes) if found else None


def _on_the_cpu(around: Any) -> Any:
    """The hook, without a backend that needs GPUs."""
    asking: Any = around
    if isinstance(around, partial) and asking.keywords.get("backend") == "nccl":
        return partial(asking, backend=None)
    return asking
