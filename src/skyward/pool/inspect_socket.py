"""Lets other terminals ask an open pool for its stacks and its summary, or close it."""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from skyward.api.context import PoolContext
from skyward.api.stacks import Stacks
from skyward.errors import SkywardError
from skyward.machines.ledger import shown
from skyward.node.peers import accept_all
from skyward.pool.lifetime import PoolState
from skyward.transport import local_sockets, private

if TYPE_CHECKING:
    from skyward.client.engine import Engine

__all__ = [
    "Answer",
    "Silent",
    "StacksSocket",
    "Summary",
    "ask_all",
    "close",
    "program",
    "spent",
    "summaries",
    "summary_of",
]


# Answers `sky stacks`, `sky ps` and `sky down` in another terminal: a socket in the pool's private directory.
#
# They send one word, "stacks", "summary" or "close", and get one JSON value; then the connection is closed. Only this
# user can connect.


log = logging.getLogger("skyward.pool")

_NAME = "stacks"
_PATIENCE = 15.0
_SUMMARY_PATIENCE = 5.0
_LONGEST_WORD = 16
_WORD_PATIENCE = 2.0
_TERM_PATIENCE = 20.0
_KILL_PATIENCE = 20.0


class Answer(NamedTuple):
    pool: str
    pid: int
    text: str
    stacks: list[dict[str, Any]] = []  # noqa: RUF012 - a tuple of JSON's, and nobody appends to it


class Silent(NamedTuple):
    pid: int
    why: str
    socket: str = ""


class StacksSocket(AbstractContextManager[None]):
    """Tells whoever connects the pool's state and where its bodies are, and closes it."""

    def __init__(
        self,
        directory: str,
        pool: str,
        stacks: Callable[[], Stacks],
        summary: Callable[[], Summary],
        close: Callable[[], None],
    ) -> None:
        self._path, self._pool = os.path.join(directory, _NAME), pool
        self._stacks, self._summary, self._close = stacks, summary, close
        self._listener = local_sockets.listen(self._path)

    def __enter__(self) -> None:
        arguments = self._listener, self._take
        threading.Thread(target=accept_all, args=arguments, name="skyward-stacks", daemon=True).start()

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

    def _take(self, connection: socket.socket, _: str) -> None:
        with connection:
            try:
                local_sockets.check_peer(connection)
                connection.settimeout(_WORD_PATIENCE)
                word = connection.recv(_LONGEST_WORD)
                connection.settimeout(_PATIENCE)
                if word == b"close":
                    self._begin_closing(connection.dup())
                else:
                    connection.sendall(json.dumps(self._answer(word)).encode())
            except OSError:
                pass  # another user, or somebody who said nothing or did not wait for the answer
            except Exception:  # a mistake of ours: the next one who asks gets an answer all the same
                log.exception("a question about this pool could not be answered")

    def _begin_closing(self, connection: socket.socket) -> None:
        def act() -> None:
            with connection:
                try:
                    self._close()
                    problem = ""
                except Exception as exc:  # whoever asked shows it
                    problem = str(exc) or repr(exc)
                try:
                    connection.sendall(json.dumps({"problem": problem}).encode())
                except OSError:
                    pass  # nobody waits any more

        threading.Thread(target=act, name="skyward-close", daemon=True).start()

    def _answer(self, word: bytes) -> object:
        if word == b"summary":
            return asdict(self._summary())
        try:
            stacks = self._stacks()
        except SkywardError as exc:
            return Answer(self._pool, os.getpid(), str(exc))
        return Answer(self._pool, os.getpid(), str(stacks), [asdict(stack) for stack in stacks])


def ask_all() -> list[Answer]:
    answers: list[Answer] = []
    for path in _paths():
        try:
            pool, pid, text, stacks = _asked(path, b"stacks", _PATIENCE)
            answers.append(Answer(str(pool), int(pid), str(text), list(stacks)))
        except ConnectionRefusedError:
            continue  # of a process that was killed; the next pool removes it
        except (OSError, ValueError) as exc:
            answers.append(Answer(shown(os.path.basename(os.path.dirname(path))), 0, f"does not answer: {exc}"))
    return answers


def summaries() -> tuple[list[Summary], list[Silent]]:
    found: list[Summary] = []
    silent: list[Silent] = []

    def ask(path: str) -> None:
        try:
            found.append(replace(Summary(**_asked(path, b"summary", _SUMMARY_PATIENCE)), socket=path))
        except (ConnectionRefusedError, FileNotFoundError, PermissionError):
            pass  # of a process that was killed, closed a moment ago, or another user's
        except TimeoutError:
            silent.append(Silent(_pid(path), "it does not answer: its program is stopped, or very busy", path))
        except (OSError, ValueError, TypeError):
            silent.append(
                Silent(_pid(path), "its answer cannot be read: its program has another version of Skyward", path)
            )

    threads = [threading.Thread(target=ask, args=(path,), daemon=True) for path in _paths()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sorted(found, key=lambda each: each.began), silent


def close(path: str, patience: float, tell: Callable[[str], None]) -> str:
    """Has a program close its pool as `pool.close()` does, and waits; says what was left undone, or "".

    A program that is too slow gets SIGTERM, then SIGKILL. What its pool started ends itself or is ended by its
    watchdog.
    """
    try:
        connection = local_sockets.connect(path, _PATIENCE)
        connection.sendall(b"close")
    except (ConnectionRefusedError, FileNotFoundError, BrokenPipeError):
        return ""  # it was closed a moment ago, or its program has ended
    except OSError as exc:
        return f"its program could not be asked: {exc}"
    with connection:
        try:
            answer = _read(connection, patience)
            return str(json.loads(answer)["problem"]) if answer else ""  # no answer: the program ended with the pool
        except TimeoutError:
            pass
        except (ValueError, TypeError, KeyError):
            return "its program has another version of Skyward. End the program instead"
        pid = local_sockets.peer_pid(connection)
        if not pid:
            return "its program does not close it, and runs in a container. End the program there"
        for number, seconds in ((signal.SIGTERM, _TERM_PATIENCE), (signal.SIGKILL, _KILL_PATIENCE)):
            tell(f"process {pid} has not closed it in time, so it gets {number.name}")
            try:
                os.kill(pid, number)
                _read(connection, seconds)
                return ""
            except ProcessLookupError:
                return ""
            except TimeoutError:
                continue
    return f"process {pid} does not end"


def _pid(path: str) -> int:
    _, _, rest = os.path.basename(os.path.dirname(path)).partition("-")
    pid = rest.partition("-")[0]
    return int(pid) if pid.isdecimal() else 0


def _paths() -> list[str]:
    """In directories that are this user's alone; a body's pool lies within the one that runs it."""
    found: list[str] = []
    for base in dict.fromkeys(("/dev/shm", tempfile.gettempdir())):
        try:
            tops = [os.path.join(base, name) for name in sorted(os.listdir(base)) if name.startswith("skyward-")]
        except OSError:
            continue  # this system has no such place
        for top in tops:
            if private.is_private(top):  # anybody can make directories and links beside it
                found += [os.path.join(here, _NAME) for here, _, files in os.walk(top) if _NAME in files]
    return found


def _asked(path: str, word: bytes, patience: float) -> Any:
    with local_sockets.connect(path, patience) as connection:
        connection.sendall(word)
        return json.loads(_read(connection, patience))


def _read(connection: socket.socket, patience: float) -> bytes:
    connection.settimeout(patience)
    data = b""
    try:
        while piece := connection.recv(1 << 16):
            data += piece
    except ConnectionResetError:
        pass
    return data


_HOUR = 3600.0


@dataclass(frozen=True)
class Summary:
    pool: str
    pid: int
    program: str
    state: str
    provider: str
    region: str
    machines: str
    began: float
    nodes: int
    up: int
    running: int
    waiting: int
    done: int
    failed: int
    cost: float | None
    hourly: float | None
    grace: float = 10.0
    socket: str = ""


def summary_of(context: PoolContext, machines: str, engine: Engine, state: PoolState) -> Summary:
    running, waiting, done, failed = engine.counts()
    hourly = context.prices[-1][1] if context.prices else 0.0
    return Summary(
        pool=context.name,
        pid=os.getpid(),
        program=program(),
        state=state.now,
        provider=context.provider.name,
        region=getattr(context.provider, "region", None) or "",
        machines=machines if context.provider.rented else "",
        began=state.began,
        nodes=context.nodes,
        up=len(engine.up()),
        running=running,
        waiting=waiting,
        done=done,
        failed=failed,
        cost=spent(context.prices, time.time()),
        hourly=hourly if math.isfinite(hourly) else None,
        grace=context.grace,
    )


def spent(prices: Sequence[tuple[float, float]], until: float) -> float | None:
    ends = [*(since for since, _ in prices), until][1:]
    total = math.fsum(
        hourly * max(0.0, end - since) / _HOUR  # the clock may have been set back
        for (since, hourly), end in zip(prices, ends, strict=True)
    )
    return total if math.isfinite(total) else None


def program() -> str:
    return os.path.basename(sys.argv[0]) if sys.argv and sys.argv[0] else "python"
