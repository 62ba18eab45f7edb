"""Failed calls that can be run again, as files beside the history of their pool.

<history of the pool>/failed/<call>           a line of a journal, and pieces whose digest is in that line
                             <digest>.data    a piece that is large or that calls share, once for all of them
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from skyward.errors import InvalidArgument
from skyward.history.store import FAILED, Entry, entries
from skyward.transport import blobs, journal, private
from skyward.transport.frames import Buffer, nbytes

__all__ = ["FailedCall", "KeptCalls", "PoolOfCalls", "find", "kept", "load", "replayable", "write"]

_FILE = ".data"
_HEAD = 1 << 20
_MOST_CALLS = 1_000
_PATIENCE = 2.0  # a call that has failed just now is written a moment later


@dataclass(frozen=True, kw_only=True)
class FailedCall:
    """Pieces: what was sent, the traceback's source files as JSON, a pickled `PoolOfCalls`.

    If `refused` says why, only these facts were kept.
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
    size: int = 0
    refused: str = ""
    about: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """See `node/protocol.py: Header`; empty if a plugin's hook failed."""
    files: Mapping[str, str] = field(default_factory=dict[str, str])
    """Digests of the pieces that are files, by number of the piece."""
    info: str = ""
    """`instance_info` of the node, as JSON."""
    machine: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, kw_only=True)
class PoolOfCalls:
    name: str
    interpreter: str
    image: bytes
    """Pickled, and without secrets."""
    packages: str = ""
    """What the nodes had installed, as a requirements.txt with hashes."""
    secret_variables: Sequence[str] = ()
    """Variables left out because they are secrets or look like ones."""
    directory: str = ""
    paths: Sequence[str] = ()
    """Where modules were imported from."""
    hooks: Sequence[bytes] = ()
    left_out: Sequence[str] = ()
    """Plugins whose hooks hold a secret."""


class KeptCalls:
    """Keeps at most `limit` bytes of functions and arguments, the newest ones."""

    def __init__(self, history: Path, limit: int) -> None:
        self._folder, self._limit = history / FAILED, limit
        self._calls: dict[str, FailedCall] = {}

    def keep(self, call: FailedCall, pieces: Sequence[Buffer], files: Mapping[str, Buffer]) -> None:
        """`files`: digests of pieces that are files."""
        private.make(self._folder.parent, FAILED)
        self._make_room(call.size)
        self._calls[call.id] = call
        for name, content in files.items():
            if not (path := self._folder / (name + _FILE)).exists():
                _save(path, [content])
        write(self._folder / call.id, call, pieces)

    def _make_room(self, size: int) -> None:
        calls = self._calls
        while calls and (len(calls) >= _MOST_CALLS or sum(c.size for c in calls.values()) + size > self._limit):
            oldest = calls.pop(next(iter(calls)))
            used = {name for call in calls.values() for name in call.files.values()}
            for name in (oldest.id, *(digest + _FILE for digest in {*oldest.files.values()} - used)):
                (self._folder / name).unlink(missing_ok=True)


def kept(entry: Entry) -> list[tuple[FailedCall, Path]]:
    """Newest first, including those of which too little was kept."""
    folder = entry.path.parent / FAILED
    if not private.check(entry.path.parent, FAILED):
        return []
    return sorted(_named(folder, ""), key=lambda found: found[0].time, reverse=True)


def replayable(entry: Entry, call: str) -> bool:
    return any(found.id == call and not found.refused for found, _ in _named(entry.path.parent / FAILED, call))


def find(call: str) -> tuple[FailedCall, Path]:
    """By id, or by an unambiguous beginning of it."""
    end, found = time.monotonic() + _PATIENCE, list[tuple[FailedCall, Path]]()
    while call and not found:
        known = entries()
        found = [each for entry in known for each in _named(entry.path.parent / FAILED, call)]
        if time.monotonic() > end or not any(entry.running for entry in known):
            break
        time.sleep(0.05)
    same = [each for each in found if each[0].id == call] or found
    if not same:
        raise InvalidArgument(
            f"no failed call {call!r} is kept on this computer. Its id is in the error's note; `sky replay` lists the "
            "calls that can be run again. Calls are not kept if their machine was lost, if their pool has "
            "history=False or max_replay_bytes=0, or for more than thirty days."
        )
    if len({each.id for each, _ in same}) > 1:
        names = ", ".join(each.id for each, _ in same[:5])
        raise InvalidArgument(f"{len(same)} failed calls begin with {call!r}: {names}. Give more of the id.")
    return same[0]


def load(call: FailedCall, path: Path) -> list[Buffer]:
    """An error says what is damaged."""
    if call.refused:
        raise InvalidArgument(f"{call.name}, call {call.id}, cannot be run again: {call.refused}.")
    try:
        line, _, body = journal.content(path).partition(b"\n")
        facts = journal.parsed(line)
        if facts is None or facts["digest"] != blobs.digest(body):
            raise OSError("it is not what was written")
        pieces: list[Buffer] = [body[start:end] for start, end in pairwise(accumulate(facts["pieces"], initial=0))]
        for index, digest in call.files.items():
            path = path.with_name(digest + _FILE)
            pieces[int(index)] = blobs.read((str(path), path.stat().st_size))
            if blobs.digest(pieces[int(index)]) != digest:
                raise OSError("it is not what was written")
    except (OSError, KeyError) as exc:
        raise InvalidArgument(
            f"what was kept of this call is damaged ({exc}; {path}). It cannot be run again."
        ) from None
    return pieces


def write(path: Path, call: FailedCall, pieces: Sequence[Buffer] = ()) -> None:
    """For this user alone; complete or absent."""
    body, sizes = b"".join(pieces), [nbytes(piece) for piece in pieces]
    _save(path, [journal.line({**asdict(call), "digest": blobs.digest(body), "pieces": sizes}), body])


def _named(folder: Path, beginning: str) -> Iterator[tuple[FailedCall, Path]]:
    """Without their pieces."""
    for name in os.listdir(folder) if folder.is_dir() else ():
        if not name.startswith(beginning) or not name.isalnum():
            continue
        try:
            facts = journal.parsed(journal.content(folder / name, _HEAD).partition(b"\n")[0])
            if facts is not None and facts["id"] == name:
                known = {each.name for each in fields(FailedCall)}  # another version may have written more
                yield FailedCall(**{name: facts[name] for name in known & facts.keys()}), folder / name
        except (OSError, TypeError, KeyError):
            continue  # removed at this moment, or none of ours


def _save(path: Path, content: Iterable[Buffer]) -> None:
    part = path.with_name(f".{path.name}.part")
    try:
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb") as file:
            file.writelines(content)
        part.rename(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
