"""What a verdict means to the caller: an exception with all that is known."""

from __future__ import annotations

import functools
import importlib.util
import os
import signal
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING, Any, Literal, cast

from skyward import events
from skyward.api.brief import brief, described
from skyward.api.compute import PendingCompute, name_of
from skyward.api.secret import hide
from skyward.client.kept import KeptResult
from skyward.errors import NodeDiskFull, SkywardError, TaskCrashed, TaskOutOfMemory, TaskTimeout
from skyward.node.protocol import Crashed, Exited, GangStopped, NoRoom, Raised, Returned, Stalled, TimedOut, Verdict
from skyward.transport import exceptions
from skyward.transport.exceptions import as_text, noted, set_partial

if TYPE_CHECKING:
    from skyward.client.call import Call

__all__ = [
    "End",
    "Outcome",
    "failed",
    "failed_part",
    "failure",
    "gang_note",
    "interrupted",
    "missing_module",
    "note_call",
    "note_items",
    "of_argument",
    "partial_of",
    "returned",
    "say_how_many",
    "told",
]


Outcome = Literal["ok", "error", "crashed", "timeout", "cancelled", "lost"]
End = tuple[Outcome, float, str, int]
"""For listeners: outcome, seconds, error as text, number of failed items."""


def returned(call: Call, result: Returned) -> End:
    seconds = result.seconds or 0.0
    if result.failed is None:
        return "ok", seconds, "", 0
    count, first = result.failed
    text = f"{count} of {call.items} items have failed, the first of them " if call.items > 1 else ""
    return "error", seconds, hide(text + first), min(count, call.items)


def failed(call: Call, outcome: Outcome, seconds: float, error: BaseException) -> End:
    """Without a result; also for each item of a map that keeps exceptions."""
    items = call.items if call.chunk is not None and call.chunk.keep and outcome != "cancelled" else 0
    return outcome, seconds, exceptions.as_text(error), items


def told(call: Call, rank: int | None, end: End, now: float) -> events.EndOfCall:
    outcome, seconds, error, failed_items = end
    node, items = -1 if call.node is None else call.node, 1 if call.chunk is None else call.chunk.items
    more = (call.attempt, call.arguments, items, failed_items, *call.sending(now - seconds))
    return call.id, call.name, node, outcome, seconds, rank, error, *more


def failure(
    pool: str, call: Call, node: int, verdict: Verdict, rank: int | None = None
) -> tuple[BaseException, Outcome]:
    """And how it counts; `rank` where the node has several."""
    match verdict:
        case Raised():
            place = f"node {node}" if rank is None else f"rank {rank} (node {node})"
            where = f"raised on {place} in {call.name}, call {call.id}, attempt {call.attempt + 1} (pool {pool})"
            return exceptions.packed(verdict.error, verdict.buffers[0], where, _advice), "error"
        case Exited():
            stderr = hide(verdict.stderr)
            return TaskCrashed(call.name, node, call.attempt, verdict.code, stderr=stderr, rank=rank), "crashed"
        case Crashed():
            return _crash(call, node, verdict, rank), "crashed"
        case TimedOut():
            error = TaskTimeout(call.name, node, verdict.limit, call.attempt, verdict.killed, rank, verdict.loading)
            if verdict.stack:
                exceptions.with_frames(error, "where the body was when its time ran out:", verdict.stack)
            return error, "timeout"
        case NoRoom():
            return NodeDiskFull(call.name, node, verdict.size, verdict.reason), "error"
        case Stalled() if call.stall is not None:
            return call.stall, "timeout"
        case GangStopped():
            other = "node" if rank is None else "rank"
            return CancelledError(f"stopped, since another {other} of the broadcast failed"), "cancelled"
        case _:
            return CancelledError(), "cancelled"


def gang_note(call: Call, others: list[Call], many: bool) -> str:
    text = f"rank {call.rank} of {len(call.gang)} (node {call.node}) failed first in the broadcast of {call.name}"
    if others:
        ranks = "ranks" if many else "nodes"
        text += f"; {ranks} {', '.join(str(other.rank) for other in others)} had not finished and were stopped"
    return text + "."


def of_argument(call: Call, result: KeptResult) -> BaseException:
    error = result.error or SkywardError(f"the result of {result.name} is not there.")
    if result.state == "failed" and not result.noted:
        result.noted = True
        error.add_note(f"{result.name} is an argument of {call.name}, which was not started.")
    return error


def _advice(error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name:
        return missing_module(error.name.partition(".")[0])
    if isinstance(error, FileNotFoundError) and isinstance(error.filename, str) and os.path.exists(error.filename):
        return (
            f"node: {error.filename} exists on this computer, but not on the node. Send files with "
            f"sky.Image(includes=[...]); small data can be an argument of the call."
        )
    if type(error) in (ValueError, RuntimeError) and "Default process group has not been initialized" in as_text(error):
        return (
            "node: torch has no process group there. Add plugins=[sky.plugins.torch()] to the pool, which forms one on "
            "two nodes or more, or where processes_per_node is given; or put @sky.integrations.torch below "
            "@sky.compute. Send the call with `@`."
        )
    if _misses_torchrun(error):
        return (
            "node: torchrun sets RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and so on, a pool does not by itself. Put "
            "@sky.integrations.torch(init=False) below @sky.compute; or add plugins=[sky.plugins.torch()] to the pool, "
            "which does the same on two nodes or more, or where processes_per_node is given. Send the call with `@`."
        )
    return ""


def _misses_torchrun(error: BaseException) -> bool:
    if isinstance(error, KeyError):
        return any(isinstance(arg, str) and arg in _TORCHRUN for arg in error.args)
    return isinstance(error, ValueError) and "env:// rendezvous: environment variable" in as_text(error)


def missing_module(module: str) -> str:
    package = _package(module)
    pip = f"sky.Image(pip=[{package or module!r}])"
    if module in _PLUGINS:
        return f"node: add plugins=[sky.plugins.{_PLUGINS[module]}] to the pool, or {pip}."
    if package is not None:
        return f"{module} is not installed on the node; add {pip} to the pool."
    try:
        here = importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        here = False
    if here:
        return (
            f"node: {module} exists on this computer only. Import it at the top of your file and not in the function, "
            f"so that it travels along; or send it with sky.Image(includes=[...]), if it is a package with "
            f"Image(pip=[...])."
        )
    return f"{module} is not installed on the node; add {pip} to the pool (the package may have another name)."


def _package(module: str) -> str | None:
    installed = _installed().get(module, [])
    if len(set(installed)) == 1:  # more than one share a namespace, as google's do
        return installed[0]
    return _PACKAGES.get(module)


@functools.cache
def _installed() -> Mapping[str, list[str]]:
    from importlib import metadata

    return metadata.packages_distributions()


_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

_PLUGINS = {
    "torch": "torch()",
    "jax": "jax()",
    "keras": "keras()",
    "transformers": "huggingface(token=...)",
    "datasets": "huggingface(token=...)",
    "joblib": "joblib()",
    "sklearn": "sklearn()",
}

# Modules whose package has another name.
_PACKAGES = {
    "Bio": "biopython",
    "Crypto": "pycryptodome",
    "Levenshtein": "levenshtein",
    "OpenSSL": "pyopenssl",
    "PIL": "pillow",
    "attr": "attrs",
    "bs4": "beautifulsoup4",
    "cv2": "opencv-python-headless",
    "dateutil": "python-dateutil",
    "docx": "python-docx",
    "dotenv": "python-dotenv",
    "faiss": "faiss-cpu",
    "fitz": "pymupdf",
    "git": "gitpython",
    "hydra": "hydra-core",
    "imblearn": "imbalanced-learn",
    "jwt": "pyjwt",
    "magic": "python-magic",
    "mpl_toolkits": "matplotlib",
    "ot": "pot",
    "pkg_resources": "setuptools",
    "psycopg2": "psycopg2-binary",
    "serial": "pyserial",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "slugify": "python-slugify",
    "umap": "umap-learn",
    "yaml": "pyyaml",
    "zmq": "pyzmq",
}


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most of the real-time signals have no name
        return f"signal {number}"


def _crash(call: Call, node: int, crash: Crashed, rank: int | None) -> TaskCrashed:
    code = crash.code
    name = _signal_name(-code) if code < 0 else None
    kind = TaskOutOfMemory if crash.oom else TaskCrashed
    return kind(call.name, node, call.attempt, code, name, hide(crash.stderr), crash.shared, rank)


_MOST_NOTES = 20  # calls that need the same result share its exception


def failed_part(
    error: Exception,
    failed: Future[Any],
    parts: Sequence[Future[Any]],
    calls: Sequence[PendingCompute[Any]],
    partial: bool = True,
) -> None:
    index = next((index for index, part in enumerate(parts) if part is failed), None)
    if index is not None:
        note_call(error, index, calls)
    if partial and len(parts) > 1:
        set_partial(error, {index: part.result() for index, part in enumerate(parts) if _is_good(part)})
        say_how_many(error, len(parts), "calls")


def interrupted(error: BaseException, parts: Sequence[Future[Any]], keep: bool) -> None:
    ended = {index: part for index, part in enumerate(parts) if part.done() and not part.cancelled()}
    # without a wait: a result lets listeners hear of it first, and they may be slow
    errors = {index: part.exception(0) for index, part in ended.items()}
    found = {index: part.result(0) if errors[index] is None else errors[index] for index, part in ended.items()}
    set_partial(error, {index: value for index, value in found.items() if keep or errors[index] is None})
    say_how_many(error, len(parts), "calls")


def note_call(error: BaseException, index: int, calls: Sequence[PendingCompute[Any]]) -> None:
    notes = getattr(error, "__notes__", None)
    if index < len(calls) and not (isinstance(notes, list) and len(cast("list[Any]", notes)) >= _MOST_NOTES):
        call = calls[index]
        noted(error, f"call {index} of {len(calls)}: {described(call.name, call.args, call.kwargs)}")


def note_items(error: BaseException, each: PendingCompute[Any], items: Sequence[Any], start: int) -> None:
    first, last = (f"{name_of(each.fn)}({brief(item)})" for item in (items[0], items[-1]))
    if len(items) == 1:
        noted(error, f"item {start}: {first}")
    else:
        noted(error, f"items {start} to {start + len(items) - 1}, sent as one call: {first} to {last}")


def partial_of(error: BaseException) -> dict[int, Any]:
    found: Any = getattr(error, "partial", None)
    return cast("dict[int, Any]", found) if isinstance(found, dict) else {}


def say_how_many(error: BaseException, count: int, what: str) -> None:
    if isinstance(getattr(error, "partial", None), dict) and count > 1:
        finished = len(partial_of(error))
        noted(error, f"{finished} of {count} {what} had finished: see `partial` of this exception, results by index.")


def _is_good(part: Future[Any]) -> bool:
    try:
        return part.done() and part.exception() is None
    except BaseException:  # it was cancelled, or its result cannot be read
        return False
