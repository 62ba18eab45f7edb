"""Which failed calls are kept so that they can be run again here, and what of them.

engine: a call has failed --(lock)--> a list --twice a second, in the history's thread--> files beside the history
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from skyward.api.secret import any_hidden, hide_bytes
from skyward.client.call import Call
from skyward.events import EndOfCall
from skyward.history.failed_calls import KeptCalls
from skyward.node.failed_call import FailedCall, NodeFacts, PoolOfCalls
from skyward.transport import blobs
from skyward.transport.exceptions import noted
from skyward.transport.frames import nbytes

__all__ = ["FailedCalls", "holds_secret", "rerun_note"]

log = logging.getLogger("skyward.history")

_MOST_WAITING = 64 << 20
_SECRET = b"skyward.api.secret"
_CHUNK = 16 << 20
_OVERLAP = 1 << 16  # a secret may lie across the end of a chunk
_LEFT_OUT = ("blobs", "keep", "log", "place", "streams")  # of what a runner is told
_WITH_SECRET = "its function or its arguments hold a sky.Secret"

Shared = Callable[[], tuple[PoolOfCalls, Sequence[bytes | memoryview]]]
Place = Callable[[int], tuple[str, NodeFacts]]
"""Of a node: `instance_info` of its first process, and what the node is like."""


def rerun_note(call: str) -> str:
    return f"`sky replay {call}` runs it again on this computer, with --pdb in the debugger."


class FailedCalls:
    """Hears of calls that failed in an open pool; nothing is done for those that succeed."""

    def __init__(self, kept: KeptCalls, limit: int, store: blobs.Store, shared: Shared, place: Place) -> None:
        self._kept, self._limit, self._store, self._shared, self._place = kept, limit, store, shared, place
        self._waiting: list[tuple[FailedCall, Sequence[bytes], _Files]] = []
        self._size = 0  # of what waits to be written
        self._writing = threading.Lock()
        self._told = self._closed = self._shared_written = False
        self._owner = os.getpid()

    def failed(self, call: Call, end: EndOfCall, error: BaseException | None) -> None:
        """Notes a call with the engine's lock held, while it still has its arguments; `error` gets a note."""
        if self._closed or call.node is None:
            return
        size = sum(map(nbytes, call.pieces)) + sum(size for _, size in call.uploads.values())
        info, facts = self._place(call.node)
        id, name, node, outcome, _, rank, text, attempt, arguments, _, _, group, _ = end
        made = FailedCall(
            id=id, name=name, arguments=arguments, time=time.time(), outcome=outcome, error=text, node=node,
            rank=rank, attempt=attempt, group=group, size=size, refused=self._refusal(call, size), info=info,
            facts=facts, metadata={key: value for key, value in call.about.items() if key not in _LEFT_OUT},
        )  # fmt: skip
        if made.refused:
            self._waiting.append((replace(made, size=0, metadata={}), (), _Files()))
            return
        self._size += size
        self._store.retain(call.uploads)
        self._waiting.append((made, call.pieces, _Files(call.uploads, call.about.get("blobs", {}))))
        if error is not None:
            noted(error, rerun_note(id))

    def _refusal(self, call: Call, size: int) -> str:
        """Why a call is not kept; empty if it is."""
        if call.inputs:
            return "an argument of it was an iterator, which can be read once"
        if call.needs:
            return "it took a result that stays on a node"
        if size > self._limit:
            return f"with its arguments it has {size:,} bytes, and max_replay_bytes={self._limit} of its pool is less"
        if any(holds_secret(piece) for piece in call.pieces):
            return _WITH_SECRET
        if self._size and self._size + size > max(_MOST_WAITING, self._limit):
            return "too many calls failed at once, and it was not one of the first"
        return ""

    def flush(self) -> None:
        """Writes what is noted."""
        while self._waiting and os.getpid() == self._owner:
            with self._writing:
                if not self._waiting:
                    return
                call, pieces, files = self._waiting.pop(0)
                try:
                    self._write(call, pieces, files)
                except Exception as exc:  # the pool continues without it, and `sky replay` says that it is not there
                    log.log(logging.DEBUG if self._told else logging.WARNING, "a failed call is not kept: %s", exc)
                    self._told = True
                finally:
                    if not call.refused:
                        self._size -= call.size
                        self._store.release(list(files.uploads))

    def close(self) -> None:
        """Writes what is left, while the large arguments are there."""
        self._closed = True
        self.flush()

    def _write(self, call: FailedCall, pieces: Sequence[bytes], files: _Files) -> None:
        if not self._shared_written:
            self._kept.keep_pool(*self._shared())
            self._shared_written = True
        if any(_file_holds_secret(path) for path, _ in files.uploads.values()):
            call, pieces, files = replace(call, refused=_WITH_SECRET, size=0), (), _Files()
        self._kept.keep(call, pieces, files.by_piece())


@dataclass(frozen=True)
class _Files:
    """The large arguments of a call."""

    uploads: Mapping[str, blobs.Blob] = field(default_factory=dict[str, blobs.Blob])
    pieces: Mapping[str, Sequence[Any]] = field(default_factory=dict[str, Sequence[Any]])
    """As the call names them: by path on this computer, by name elsewhere."""

    def by_piece(self) -> dict[str, tuple[str, int]]:
        return {index: self.uploads.get(name, (name, size)) for index, (name, size) in self.pieces.items()}


def holds_secret(data: bytes | memoryview) -> bool:
    """Whether a pickle makes a `sky.Secret`, or the value of one that is known here stands in it."""
    content = bytes(data)
    return _SECRET in content or (any_hidden() and hide_bytes(content) is not content)


def _file_holds_secret(path: str) -> bool:
    with open(path, "rb") as file:
        before = b""
        while chunk := file.read(_CHUNK):
            if holds_secret(before + chunk):
                return True
            before = chunk[-_OVERLAP:]
    return False
