"""The failed calls that are kept beside a pool's history: written while it is open, found and read later.

<history of the pool>/failed/pool             what its calls share
                             <call>           one call
                             <digest>.data    a large argument, once for all calls that have it
"""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from skyward.errors import InvalidArgument
from skyward.history.store import FAILED, Entry, entries
from skyward.node.failed_call import POOL, FailedCall, PoolOfCalls, contents_digest, glance, read, write
from skyward.transport import private

__all__ = ["Kept", "KeptCalls", "find", "kept", "load", "replayable"]

_LARGE = ".data"
_MOST_CALLS = 1_000
_PATIENCE = 2.0  # a call that has failed just now is written a moment later


class KeptCalls:
    """The calls of one open pool: at most `limit` bytes of functions and arguments, the newest ones."""

    def __init__(self, history: Path, limit: int) -> None:
        self.folder, self._limit = history / FAILED, limit
        self._calls: dict[str, tuple[int, tuple[str, ...]]] = {}
        self._uses: Counter[str] = Counter()

    def keep_pool(self, pool: PoolOfCalls, pieces: Sequence[bytes | memoryview]) -> None:
        private.make(self.folder.parent, FAILED)
        write(self.folder / POOL, pool, pieces)

    def keep(self, call: FailedCall, pieces: Sequence[bytes], large: Mapping[str, tuple[str, int]]) -> None:
        """Writes a call; `large` are files of its pieces, by their number."""
        names: dict[str, tuple[str, int]] = {}
        for index, (path, size) in large.items():
            names[index] = contents_digest(path) + _LARGE, size
        self._make_room(call.size)
        used = tuple({name for name, _ in names.values()})
        try:
            for index, (name, _) in names.items():
                if not (self.folder / name).exists():
                    _copy(large[index][0], self.folder / name)
            write(self.folder / call.id, replace(call, large=names), pieces)
        finally:
            self._calls[call.id] = call.size, used
            self._uses.update(used)

    def _make_room(self, size: int) -> None:
        while self._calls and (
            len(self._calls) >= _MOST_CALLS or sum(kept for kept, _ in self._calls.values()) + size > self._limit
        ):
            oldest = next(iter(self._calls))
            _, used = self._calls.pop(oldest)
            (self.folder / oldest).unlink(missing_ok=True)
            self._uses.subtract(used)
            for name in used:
                if self._uses[name] <= 0:
                    (self.folder / name).unlink(missing_ok=True)


@dataclass(frozen=True)
class Kept:
    """A call that is kept, and the history that it belongs to."""

    call: FailedCall
    path: Path
    entry: Entry


def kept(entry: Entry) -> list[Kept]:
    """The failed calls of a pool, the newest first, also those of which too little was kept."""
    folder = entry.path.parent / FAILED
    if not private.check(entry.path.parent, FAILED):
        return []
    found = [Kept(call, path, entry) for path in folder.iterdir() if (call := _glance(path)) is not None]
    return sorted(found, key=lambda each: each.call.time, reverse=True)


def replayable(entry: Entry, call: str) -> bool:
    """Whether enough of a call was kept to run it again."""
    found = _glance(entry.path.parent / FAILED / call)
    return found is not None and not found.refused


def find(call: str, root: Path | None = None) -> Kept:
    """The call with this id, or the only one whose id begins so."""
    found = _matching(call, root)
    end = time.monotonic() + _PATIENCE
    while not found and time.monotonic() < end and any(entry.running for entry in entries(root)):
        time.sleep(0.05)
        found = _matching(call, root)
    same = [each for each in found if each.call.id == call] or found
    if not same:
        raise InvalidArgument(
            f"no failed call {call!r} is kept on this computer. Its id is in the error's note; `sky replay` lists the "
            "calls that can be run again. None is kept of a pool with history=False or max_replay_bytes=0, or after "
            "thirty days."
        )
    if len({each.call.id for each in same}) > 1:
        names = ", ".join(each.call.id for each in same[:5])
        raise InvalidArgument(f"{len(same)} failed calls begin with {call!r}: {names}. Write more of the id.")
    return same[0]


def load(found: Kept) -> tuple[FailedCall, PoolOfCalls]:
    """All of it, checked: an error says what is damaged, or why there is too little."""
    call, _ = read(found.path, FailedCall)
    if call.refused:
        raise InvalidArgument(f"{call.name}, call {call.id}, cannot be run again: {call.refused}.")
    pool, _ = read(found.path.with_name(POOL), PoolOfCalls)
    for name, _ in call.large.values():
        path = found.path.with_name(str(name))
        if not path.is_file() or contents_digest(path) + _LARGE != name:
            raise InvalidArgument(f"what was kept of this call is damaged: {path} is not what was written.")
    return call, pool


def _matching(call: str, root: Path | None) -> list[Kept]:
    found: list[Kept] = []
    for entry in entries(root):
        named = _named(entry.path.parent / FAILED, call)
        found += [Kept(seen, path, entry) for path in named if (seen := _glance(path)) is not None]
    return found


def _named(folder: Path, beginning: str) -> Iterator[Path]:
    try:
        names = os.listdir(folder)
    except OSError:
        return
    for name in names:
        if beginning and name.startswith(beginning):
            yield folder / name


def _glance(path: Path) -> FailedCall | None:
    found = glance(path) if path.name.isalnum() and path.name != POOL else None
    return found if found is not None and found.id == path.name else None


def _copy(source: str, target: Path) -> None:
    part = target.with_name(f".{target.name}.part")
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    try:
        with open(source, "rb") as content, open(fd, "wb") as file:
            shutil.copyfileobj(content, file, 1 << 20)
        os.rename(part, target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
