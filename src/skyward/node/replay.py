"""Runs a failed call again, as a runner would, in a process that has the terminal: what `sky replay` starts.

python -m skyward.node.replay FILE ORDER      the file of the call, and a `Rerun` as JSON
"""

from __future__ import annotations

import faulthandler
import functools
import json
import math
import os
import pickle
import re
import resource
import signal
import socket
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, cast

from skyward.api.info import call_context
from skyward.node import decorators
from skyward.node.body import Bodies, Hook, RunnerCall, Stopped
from skyward.node.failed_call import POOL, FailedCall, PoolOfCalls, Rerun, Verdict, read, write
from skyward.node.items import EachItem
from skyward.node.processes import die_with_parent
from skyward.node.protocol import Header, Returned
from skyward.node.shared.runner_side import RunnerShared
from skyward.transport import exceptions
from skyward.transport.payload import unpack

__all__ = ["main"]

_GRACE = 5.0  # a body that does not get back to Python after its time limit is ended then
_BACKENDS = ("nccl",)
_NOTHING = [pickle.dumps(None)]


def main(arguments: Sequence[str]) -> NoReturn:
    path, order = Path(arguments[0]), Rerun(**json.loads(arguments[1]))
    die_with_parent(os.getppid(), signal.SIGTERM)
    faulthandler.enable()
    verdict, pieces = _Replay(path, order).run()
    if order.verdict:
        write(Path(order.verdict), verdict, pieces)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if verdict.kind == "done" else 1)  # what the body has started must not hold us up


class _Replay:
    def __init__(self, path: Path, order: Rerun) -> None:
        self._order = order
        self._call, self._pieces = read(path, FailedCall)
        pool, hooks = read(path.with_name(POOL), PoolOfCalls)
        if os.path.isdir(pool.directory):
            os.chdir(pool.directory)
        paths = [str(Path(pool.directory, each)) for each in pool.paths]
        sys.path[:0] = paths
        decorators.decide_by(lambda _: True)
        self._hooks = _unpacked(pool, hooks)
        settings = {"paths": paths, "blobs": order.scratch, "max_result": math.inf, "node": self._call.node}
        self._bodies = Bodies(settings, lambda message: None)
        RunnerShared(lambda message: None, _write, list).install({"paths": paths, "shared": order.shared})
        large = {index: (str(path.with_name(name)), size) for index, (name, size) in self._call.large.items()}
        self._about = cast("Header", {**self._call.metadata, **({"blobs": large} if large else {})})

    def run(self) -> tuple[Verdict, Sequence[Any]]:
        """How it ended, after the debugger was left."""
        with ExitStack() as stack:
            try:
                hooks = map(_on_the_cpu, self._hooks()) if self._order.cpu else self._hooks()
                self._bodies.enter(hooks, stack)
                if not self._order.body:
                    sys.stdin.read()  # until the call has ended in the other process
                    return Verdict(kind="done"), ()
                if not self._pieces:
                    return Verdict(kind="done"), _NOTHING  # it was a hook that failed
                self._bodies.decorators.append(_stopping_at_the_first)
                broadcast = self._about.get("gang")
                with call_context(self._call.id, self._call.attempt, threads=False, broadcast=broadcast):
                    return self._run_body()
            except Stopped as exc:
                return self._failed(exc, Verdict(kind="timeout", error={"stack": exceptions.frames_of(exc)}))
            except SystemExit as exc:
                return self._failed(exc, Verdict(kind="exited", error={"code": _status(exc)}))
            except BaseException as exc:  # the user's exception: shown here, and told to whoever waits
                described, data = exceptions.capture(exc)
                return self._failed(exc, Verdict(kind="error", error=described), [data])

    def _run_body(self) -> tuple[Verdict, Sequence[Any]]:
        call = RunnerCall(self._call.id, self._about, list(self._pieces))
        if self._order.memory is not None:
            _limit_memory(self._order.memory)
        if self._order.limit is not None:
            call.enter = functools.partial(_limit, self._order.limit)
        try:
            result: Any = self._bodies.result_of(call)
            if isinstance(result, AsyncGenerator):
                import asyncio

                result = asyncio.run(_drained(cast("AsyncGenerator[Any, None]", result)))
            elif isinstance(result, Generator):
                items = cast("Iterator[Any]", result)
                result = [(self._bodies.packed_item(call, item), item)[1] for item in items]
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            faulthandler.cancel_dump_traceback_later()
        made = self._bodies.packed_result(call, result)(id=call.id)
        assert isinstance(made, Returned)
        return Verdict(kind="done", blobs=made.blobs), made.buffers

    def _failed(
        self, exc: BaseException, verdict: Verdict, pieces: Sequence[bytes] = ()
    ) -> tuple[Verdict, Sequence[bytes]]:
        if self._order.shown:
            if verdict.kind == "timeout":
                text = (
                    f"the time limit of {self._order.limit:g} s is over; the body stood here:\n{verdict.error['stack']}"
                )
            else:
                text = exceptions.capture(exc)[0]["traceback"].rstrip()
            print(text, file=sys.stderr, flush=True)
        if self._order.debugger:
            import pdb  # takes longer to load than all the rest

            pdb.post_mortem(_where(exc))
        return verdict, pieces


def _write(sock: socket.socket, lock: threading.Lock, pieces: list[Any]) -> None:
    with lock:
        for piece in pieces:
            sock.sendall(piece)


def _unpacked(pool: PoolOfCalls, pieces: Sequence[bytes]) -> Callable[[], list[Hook]]:
    def hooks() -> list[Hook]:
        found: list[Hook] = []
        rest = list(pieces)
        for _, count, _ in pool.hooks:
            mine, rest = rest[:count], rest[count:]
            found += unpack(mine[0], mine[1:])
        return found

    return hooks


def _on_the_cpu(hook: Hook) -> Hook:
    """The hook, without a wish for a backend that needs GPUs."""
    name, around, decorate = hook
    asking: Any = around
    if isinstance(around, functools.partial) and asking.keywords.get("backend") in _BACKENDS:
        asking = functools.partial(asking.func, *asking.args, **{**asking.keywords, "backend": None})
    return name, asking, decorate


def _stopping_at_the_first(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Has the items of a map that keeps exceptions end with the first one."""
    if isinstance(fn, EachItem):
        fn.keep = False
    return fn


async def _drained(items: AsyncGenerator[Any, None]) -> list[Any]:
    return [item async for item in items]


def _limit(seconds: float) -> None:
    def over(*_: object) -> None:
        raise Stopped

    signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    faulthandler.dump_traceback_later(seconds + _GRACE, exit=True)


def _limit_memory(more: int) -> None:
    """Has what takes more than this process has now, and so much `more`, fail with a MemoryError."""
    taken = re.search(r"^VmData:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    if taken:
        most = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (int(taken[1]) * 1024 + more, most))


def _status(exc: SystemExit) -> int:
    return int(exc.code) & 0xFF if isinstance(exc.code, int) else int(exc.code is not None)


def _where(exc: BaseException) -> TracebackType | None:
    """The traceback from the user's first frame on; of a hook, that of its own exception."""
    cause = exc.__cause__ if exc.__traceback__ is None or type(exc).__name__ == "PluginError" else None
    return exceptions.users_part((cause or exc).__traceback__)


if __name__ == "__main__":
    main(sys.argv[1:])
