"""Answers `sky stacks` and `sky ps` in another terminal: a socket in the pool's private directory, for this user only.

They send one word, "stacks" or "summary", and get one JSON value; then the connection is closed.
"""

from __future__ import annotations

import glob
import json
import logging
import os
import socket
import tempfile
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

from skyward.api.stacks import Stacks
from skyward.errors import SkywardError
from skyward.transport import local_sockets

if TYPE_CHECKING:
    from skyward.pool.summary import Summary

__all__ = ["Answer", "Silent", "StacksSocket", "ask_all", "summaries"]

log = logging.getLogger("skyward.pool")

_NAME = "stacks"
_PATIENCE = 15.0
_SUMMARY_PATIENCE = 5.0
_LONGEST_WORD = 16
_WORD_PATIENCE = 2.0


class Answer(NamedTuple):
    """What a pool has said, or why it has not."""

    pool: str
    pid: int
    """Of its program; 0 if it does not answer."""
    text: str
    stacks: list[dict[str, Any]] = []  # noqa: RUF012 - a tuple of JSON's, and nobody appends to it
    """The same as records: the fields of `Stack`."""


class Silent(NamedTuple):
    """A pool that does not answer: its program is stopped, or very busy."""

    pid: int
    """Of its program; 0 if that is not known."""
    why: str


class StacksSocket(AbstractContextManager[None]):
    """Says how a pool is and where its bodies stand, to whoever connects, until it is left."""

    def __init__(self, directory: str, pool: str, stacks: Callable[[], Stacks], summary: Callable[[], Summary]) -> None:
        self._path, self._pool = os.path.join(directory, _NAME), pool
        self._stacks, self._summary = stacks, summary
        self._listener = local_sockets.listen(self._path)

    def __enter__(self) -> None:
        threading.Thread(target=self._serve, name="skyward-stacks", daemon=True).start()

    def __exit__(self, *exc: object) -> None:
        try:
            os.unlink(self._path)
        except FileNotFoundError:
            pass
        try:
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        except OSError:
            pass
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # the pool is closing
            with connection:
                try:
                    local_sockets.check_peer(connection)
                    connection.settimeout(_WORD_PATIENCE)
                    word = connection.recv(_LONGEST_WORD)
                    connection.settimeout(_PATIENCE)
                    connection.sendall(json.dumps(self._answer(word)).encode())
                except OSError:
                    continue  # another user, or somebody who said nothing or did not wait for the answer
                except Exception:  # a mistake of ours: the next one who asks gets an answer all the same
                    log.exception("a question about this pool could not be answered")

    def _answer(self, word: bytes) -> object:
        if word == b"summary":
            return asdict(self._summary())
        try:
            stacks = self._stacks()
        except SkywardError as exc:
            return Answer(self._pool, os.getpid(), str(exc))
        return Answer(self._pool, os.getpid(), str(stacks), [asdict(stack) for stack in stacks])


def ask_all() -> list[Answer]:
    """Asks every pool that a process of this user and computer has open where its bodies stand."""
    answers: list[Answer] = []
    for path in _paths():
        try:
            pool, pid, text, stacks = _asked(path, b"stacks", _PATIENCE)
            answers.append(Answer(str(pool), int(pid), str(text), list(stacks)))
        except ConnectionRefusedError:
            continue  # of a process that was killed; the next pool removes it
        except (OSError, ValueError) as exc:
            answers.append(Answer(os.path.basename(os.path.dirname(path)), 0, f"does not answer: {exc}"))
    return answers


def summaries() -> tuple[list[Summary], list[Silent]]:
    """How every pool is that a process of this user and computer has open; and those that do not answer."""
    from skyward.pool.summary import Summary

    found: list[Summary] = []
    silent: list[Silent] = []

    def ask(path: str) -> None:
        try:
            found.append(Summary(**_asked(path, b"summary", _SUMMARY_PATIENCE)))
        except (ConnectionRefusedError, FileNotFoundError, PermissionError):
            pass  # of a process that was killed, closed a moment ago, or another user's
        except TimeoutError:
            silent.append(Silent(_pid(path), "it does not answer: its program is stopped, or very busy"))
        except (OSError, ValueError, TypeError):
            silent.append(Silent(_pid(path), "its answer cannot be read: its program has another version of Skyward"))

    threads = [threading.Thread(target=ask, args=(path,), daemon=True) for path in _paths()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sorted(found, key=lambda each: each.began), silent


def _pid(path: str) -> int:
    """Of the process that made the pool's directory; 0 if its name does not say."""
    _, _, rest = os.path.basename(os.path.dirname(path)).partition("-")
    pid = rest.partition("-")[0]
    return int(pid) if pid.isdecimal() else 0


def _paths() -> list[str]:
    bases = dict.fromkeys(("/dev/shm", tempfile.gettempdir()))
    return [path for base in bases for path in sorted(glob.glob(f"{base}/skyward-*/**/{_NAME}", recursive=True))]


def _asked(path: str, word: bytes, patience: float) -> Any:
    with local_sockets.connect(path, patience) as connection:
        connection.sendall(word)
        data = b""
        while piece := connection.recv(1 << 16):
            data += piece
    return json.loads(data)
