"""A failed call as a file: everything that is needed to run it again on another computer.

digest of the rest
{"file": "FailedCall", ..., "pieces": [sizes]}
pieces
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, TypeVar

from skyward.errors import InvalidArgument

__all__ = [
    "POOL",
    "FailedCall",
    "NodeFacts",
    "PoolOfCalls",
    "Rerun",
    "Verdict",
    "contents_digest",
    "glance",
    "read",
    "system",
    "write",
]

POOL = "pool"
"""The name of the file with what the failed calls of one pool share."""

_LONGEST = 64 << 20
_CHUNK = 4 << 20


@dataclass(frozen=True, kw_only=True)
class NodeFacts:
    """What the node was like, to be compared with the computer that runs the call again."""

    hostname: str = ""
    python: Sequence[int] = ()
    system: str = ""
    cpus: int = 0
    gpus: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class FailedCall:
    """One call that failed. Pieces: function and arguments, as they were sent; empty where they are files of their own.

    If `refused` says why, nothing but these facts was kept.
    """

    id: str
    name: str
    arguments: str
    time: float
    outcome: str
    error: str
    node: int
    rank: int | None
    attempt: int
    group: str = ""
    """The same for all ranks of a broadcast; empty for a call to one node."""
    size: int = 0
    refused: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What a runner is told of a call, as in `node/protocol.py: Header`, without blobs."""
    large: Mapping[str, Sequence[Any]] = field(default_factory=dict[str, Sequence[Any]])
    """Pieces that are files beside this one: their number, then name and size."""
    info: str = ""
    """`instance_info` of the process that ran it, as COMPUTE_POOL has it."""
    facts: NodeFacts = NodeFacts()


@dataclass(frozen=True, kw_only=True)
class PoolOfCalls:
    """What the failed calls of one pool share. Pieces: hooks of plugins, pickled."""

    pool: str
    interpreter: str
    """The Python of the program that opened the pool."""
    python: str
    pip: Sequence[str] = ()
    pip_indexes: Sequence[Sequence[Any]] = ()
    """Addresses, each with the packages that come from there."""
    build: Sequence[str] = ()
    packages: str = ""
    """What the nodes had installed, as a requirements.txt."""
    locked: bool = False
    """Whether `packages` has hashes, so that exactly the same can be installed."""
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    secret_variables: Sequence[str] = ()
    """Variables that are not kept, since they are secrets or look like ones."""
    directory: str = ""
    paths: Sequence[str] = ()
    """Where modules were imported from, relative to `directory`."""
    hooks: Sequence[Sequence[Any]] = ()
    """Each plugin that has hooks on nodes: its name, the number of its pieces, and whether it has `around_app`."""
    left_out: Sequence[str] = ()
    """Plugins whose hooks hold a secret, and are not kept."""


@dataclass(frozen=True, kw_only=True)
class Rerun:
    """What a process is told that runs a call again."""

    scratch: str
    """A directory for large results."""
    shared: str = ""
    """The socket of what serves shared collections."""
    verdict: str = ""
    """The file that says how it ended; empty for a process that others have to wait for, and nobody asks."""
    body: bool = True
    """Whether it runs the function, and does not only enter the hooks with the others."""
    cpu: bool = False
    """Whether hooks that ask for a backend on GPUs get the one on the CPU."""
    debugger: bool = False
    shown: bool = True
    """Whether it prints the traceback."""
    limit: float | None = None
    memory: int | None = None
    """How many bytes the function may use beside what the process has; more gives a MemoryError at its line."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """How a call ended that was run again. Pieces: its result or its exception, pickled."""

    kind: str
    error: Mapping[str, Any] = field(default_factory=dict[str, Any])
    blobs: Mapping[str, Sequence[Any]] = field(default_factory=dict[str, Sequence[Any]])
    """Pieces of the result that are in files: path and size, by their number."""


def system() -> str:
    """Operating system and processor of this computer, in words."""
    about = os.uname()
    return f"{about.sysname} {about.release} on {about.machine}"


Kind = TypeVar("Kind", FailedCall, PoolOfCalls, Verdict)


def write(path: Path, facts: FailedCall | PoolOfCalls | Verdict, pieces: Sequence[bytes | memoryview] = ()) -> None:
    """Writes a file for this user alone; it has its name when all of it is there."""
    about = {"file": type(facts).__name__, **asdict(facts), "pieces": [len(piece) for piece in pieces]}
    line = json.dumps(about, separators=(",", ":")).encode() + b"\n"
    digest = hashlib.blake2b(line, digest_size=16)
    for piece in pieces:
        digest.update(piece)
    part = path.with_name(f".{path.name}.part")
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    try:
        with open(fd, "wb") as file:
            file.writelines([digest.hexdigest().encode(), b"\n", line, *pieces])
        os.rename(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def read(path: Path, kind: type[Kind]) -> tuple[Kind, list[bytes]]:
    """What was written; an error if it is not that any more."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(fd, "rb") as file:
            said, line, rest = file.readline(64).strip(), file.readline(_LONGEST), file.read()
    except OSError as exc:
        raise _damaged(path, exc.strerror or str(exc)) from None
    digest = hashlib.blake2b(line, digest_size=16)
    digest.update(rest)
    if digest.hexdigest().encode() != said:
        raise _damaged(path, "its content is not what was written")
    facts, sizes = _facts(path, kind, line)
    ends = list(accumulate(sizes, initial=0))
    return facts, [rest[start:end] for start, end in pairwise(ends)]


def glance(path: Path) -> FailedCall | None:
    """The facts of a call without its pieces, not checked against the digest; None if they cannot be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(fd, "rb") as file:
            file.readline(64)
            return _facts(path, FailedCall, file.readline(_LONGEST))[0]
    except (OSError, InvalidArgument):
        return None


def contents_digest(path: str | Path) -> str:
    """A digest of a file's content."""
    digest = hashlib.blake2b(digest_size=16)
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as view:
                for at in range(0, len(view), _CHUNK):
                    digest.update(view[at : at + _CHUNK])
    return digest.hexdigest()


def _facts(path: Path, kind: type[Kind], line: bytes) -> tuple[Kind, list[int]]:
    try:
        about: dict[str, Any] = json.loads(line)
        if about.pop("file") != kind.__name__:
            raise ValueError
        sizes = [int(size) for size in about.pop("pieces")]
        if kind is FailedCall:
            about["facts"] = NodeFacts(**_known(NodeFacts, about["facts"]))
        return kind(**_known(kind, about)), sizes
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise _damaged(path, f"it holds no {kind.__name__}") from None


def _known(kind: type[Any], about: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that this version knows."""
    names = {each.name for each in fields(kind)}
    return {name: value for name, value in about.items() if name in names}


def _damaged(path: Path, why: str) -> InvalidArgument:
    return InvalidArgument(f"what was kept of this call is damaged: {why} ({path}). It cannot be run again from there.")
