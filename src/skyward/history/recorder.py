"""Writes a pool's events to its history, in a thread of its own.

    any thread --record--> a list in memory --twice a second--> the writer's thread --> events.jsonl

Near the size limit, only failures, warnings and what concerns the whole pool are written.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from skyward import events
from skyward.events import EndOfCall, Event
from skyward.history.lines import Skipped, ended_line, line
from skyward.history.store import FILE, FOLDER, prune
from skyward.machines.ledger import state_dir
from skyward.node.run_folder import RUN, RUN_NAME
from skyward.transport import private

__all__ = ["Recorder", "working_directory"]

log = logging.getLogger("skyward.history")

_PAUSE = 0.5
_MOST_BYTES = 64 << 20
_MOST_WAITING = 100_000
_MOST_LINES = 2_000
_AT_ONCE = 250  # lines that are made and written together; in between other threads get their turn
_NODES_A_SECOND = 10
_CLOSING = 5.0
_TELL = 5.0
_DISPENSABLE = (
    *(events.Output, events.Log, events.Warned, events.CallStarted, events.NodeSample),
    *(events.Progress, events.GroupProgress, events.QueueLength),
)


class Recorder:
    def __init__(
        self,
        pool: str,
        root: Path | None = None,
        limit: int = _MOST_BYTES,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.root, self._limit, self._owner = root or state_dir(), limit, os.getpid()
        began = clock()
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(began))
        self.id = f"{pool}-{stamp}-{secrets.token_hex(2)}"
        self.path = private.make(self.root, FOLDER, self.id) / FILE
        self._file = private.hold(str(self.path))
        self._size, self._skipped, self._skipped_ok, self._failed = 0, 0, 0, False
        self._pool, self._told = pool, (0, 0.0)
        self._waiting: list[Event | tuple[float, EndOfCall]] = []
        self._writing = threading.Lock()
        self._closed = threading.Event()
        self.meanwhile: Callable[[], None] | None = None
        """Runs in this thread, as often."""
        self._sampled: dict[int, float] = {}
        self._reported: dict[tuple[object, ...], float] = {}
        self._write(_header(pool, began))
        self._thread = threading.Thread(target=self._work, name="skyward-history", daemon=True)
        self._thread.start()

    def record(self, event: Event) -> None:
        if len(self._waiting) < _MOST_WAITING:
            self._waiting.append(event)
            if isinstance(event, events.Output | events.Progress) and len(self._waiting) > _MOST_LINES:
                self.flush()  # in the listeners' thread: nodes send no more output than was taken
        else:
            self._skipped += 1

    def record_end(self, end: EndOfCall) -> None:
        """For a pool without other listeners: costs a microsecond."""
        if len(self._waiting) < _MOST_WAITING:
            self._waiting.append((time.time(), end))
        else:
            self._skipped += 1

    def flush(self) -> None:
        if os.getpid() != self._owner:
            return
        with self._writing:
            batch = self._waiting[:]
            del self._waiting[: len(batch)]  # others only append to it
            ended = {event[1][0] for event in batch if type(event) is tuple}
            ended |= {event.call for event in batch if type(event) is events.CallEnded}
            for start in range(0, len(batch), _AT_ONCE):
                lines: list[bytes] = []
                for event in batch[start : start + _AT_ONCE]:
                    written = self._line(event, ended)
                    self._size += len(written)
                    lines.append(written)
                if data := b"".join(lines):
                    self._write(data)  # and lets go of the interpreter
            if self._skipped and (told := self._count_skipped(_TELL)):
                self._write(told)

    def close(self) -> None:
        if os.getpid() != self._owner:
            return
        self._closed.set()
        self._thread.join(_CLOSING)
        self.flush()
        with self._writing:
            self._write(self._count_skipped(0.0))
            self._file = -1
            private.let_go(str(self.path))

    def _work(self) -> None:
        closed, looked = False, False
        while not closed:
            closed = self._closed.wait(_PAUSE)
            try:
                self.flush()
                if self.meanwhile is not None:
                    self.meanwhile()
            except Exception:  # the pool goes on without it
                log.exception("the history of this pool is no longer written")
                self._failed = True
                return
            if not looked:  # not sooner: a pool that opens has better things to do
                looked = True
                self._prune()

    def _prune(self) -> None:
        try:
            prune(self.root)
        except OSError as exc:
            log.info("old histories stay: %s", exc)

    def _line(self, event: Event | tuple[float, EndOfCall], ended: set[str]) -> bytes:
        if type(event) is tuple:
            if self._size < self._limit:
                return ended_line(self._pool, *event).encode()
            event = _made(self._pool, *event)
        assert isinstance(event, Event)
        return _written(event) if self._wanted(event, ended) else b""

    def _wanted(self, event: Event, ended: set[str]) -> bool:
        if type(event) is events.CallStarted and event.call in ended:
            return False
        if type(event) is events.Output and event.progress:
            return False
        if type(event) is events.NodeSample:
            due = self._sampled.get(event.node, 0.0) + max(1.0, len(self._sampled) / _NODES_A_SECOND) - 0.1
            if event.time < due:
                return False
            self._sampled[event.node] = event.time
        if type(event) is events.Progress and self._size > self._limit // 2 and self._too_soon(event):
            self._skipped += 1
            return False
        if self._size < self._limit:
            return True
        ok = isinstance(event, events.CallEnded) and event.outcome == "ok"
        if ok or isinstance(event, _DISPENSABLE) or self._size > self._limit + self._limit // 8:
            self._skipped += 1
            self._skipped_ok += event.done if isinstance(event, events.CallEnded) else 0
            return False
        return True

    def _too_soon(self, event: events.Progress) -> bool:
        key = (event.call, event.node, event.rank, *event.metrics)
        if event.time < self._reported.get(key, 0.0) + 1.0:
            return True
        if len(self._reported) > _MOST_LINES:
            self._reported.clear()
        self._reported[key] = event.time
        return False

    def _count_skipped(self, every: float) -> bytes:
        told, last = self._told
        now = time.monotonic()
        if self._skipped == told or (told and now - last < every):
            return b""
        self._told = self._skipped, now
        return line(Skipped(self._pool, self._skipped, self._skipped_ok))

    def _write(self, data: bytes) -> None:
        if self._failed or self._file < 0:
            return
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(self._file, view) :]
        except OSError as exc:
            self._failed = True
            log.warning("the history of this pool is no longer written: %s (%s)", exc.strerror, self.path)


def _made(pool: str, at: float, end: EndOfCall) -> Event:
    made: Any = events.CallEnded
    return made(pool, *end, time=at)


def _written(event: Event) -> bytes:
    if isinstance(event, events.BroadcastStalled):
        return line(events.Notice(event.pool, event.text, "warning", time=event.time))
    return line(event)


def working_directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:  # it has been removed
        return ""


def _header(pool: str, began: float) -> bytes:
    from skyward import __version__

    about = {
        "history": 1,
        "pool": pool,
        "began": began,
        "program": os.path.basename(sys.argv[0]) if sys.argv and sys.argv[0] else "python",
        "directory": working_directory(),
        "pid": os.getpid(),
        "python": sys.version.split()[0],
        "skyward": __version__,
    }
    if RUN in os.environ:
        about |= {"run": os.environ[RUN_NAME], "steward": os.environ[RUN]}
    return json.dumps(about).encode() + b"\n"
