"""Answers `sky stacks` in another terminal: a socket in the pool's private directory, for this user only."""

from __future__ import annotations

import glob
import json
import os
import socket
import tempfile
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

from skyward.api.stacks import Stacks
from skyward.errors import SkywardError
from skyward.transport import local_sockets

__all__ = ["Answer", "StacksSocket", "ask_all"]

_NAME = "stacks"
_PATIENCE = 15.0


class Answer(NamedTuple):
    """What a pool has said, or why it has not."""

    pool: str
    pid: int
    text: str


class StacksSocket(AbstractContextManager[None]):
    """Says where the bodies of a pool stand, to whoever connects, until it is left."""

    def __init__(self, directory: str, pool: str, stacks: Callable[[], Stacks]) -> None:
        self._path, self._pool, self._stacks = os.path.join(directory, _NAME), pool, stacks
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
                    connection.settimeout(_PATIENCE)
                    connection.sendall(json.dumps(Answer(self._pool, os.getpid(), self._text())).encode())
                except OSError:
                    continue  # another user, or somebody who did not wait for the answer

    def _text(self) -> str:
        try:
            return str(self._stacks())
        except SkywardError as exc:
            return str(exc)


def ask_all() -> list[Answer]:
    """Asks every pool that a process of this user and computer has open."""
    answers: list[Answer] = []
    for base in dict.fromkeys(("/dev/shm", tempfile.gettempdir())):
        for path in sorted(glob.glob(f"{base}/skyward-*/**/{_NAME}", recursive=True)):
            directory = os.path.basename(os.path.dirname(path))
            try:
                answers.append(_ask(path))
            except ConnectionRefusedError:
                continue  # of a process that was killed; the next pool removes it
            except (OSError, ValueError) as exc:
                answers.append(Answer(directory, 0, f"does not answer: {exc}"))
    return answers


def _ask(path: str) -> Answer:
    with local_sockets.connect(path, _PATIENCE) as connection:
        data = b""
        while piece := connection.recv(1 << 16):
            data += piece
    pool, pid, text = json.loads(data)
    return Answer(str(pool), int(pid), str(text))
