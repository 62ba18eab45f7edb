"""Histories of a detached run on another machine, copied to this computer: its commands show them like any other's.

node 0: <folder>/state/history/<id>/events.jsonl --what is new--> <state>/history/<id>/events.jsonl
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from skyward.errors import SkywardError
from skyward.history.store import AWAY, FILE, FOLDER
from skyward.machines.ledger import state_dir
from skyward.node.run_files import pieces
from skyward.node.run_folder import RunFolder
from skyward.transport import private

__all__ = ["copy", "repeated"]

_EVERY = 1.0
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*-[0-9]{8}-[0-9]{6}-[0-9a-f]{4}")


def copy(folder: RunFolder, away: Mapping[str, Any], over: bool) -> None:
    """`away`: the run's name, until when it counts as running, and the name of rented machines."""
    for name in filter(_ID.fullmatch, folder.histories()):
        path = private.make(state_dir(), FOLDER, name) / FILE
        mark = path.with_name(AWAY)
        if path.exists() and not mark.exists():
            continue  # it is whole, or of a pool of this computer
        mark.write_text(json.dumps(away))
        with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600), "ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue  # another process copies it
            for piece in pieces(folder, f"state/{FOLDER}/{name}/{FILE}", os.fstat(file.fileno()).st_size):
                file.write(piece)
            file.flush()
            if over:
                mark.unlink()


@contextmanager
def repeated(act: Callable[[], object]) -> Generator[None]:
    """Does it again and again inside, in a thread; what cannot be reached now may be later."""
    over = threading.Event()

    def work() -> None:
        while not over.wait(_EVERY):
            with suppress(SkywardError, OSError):
                act()

    thread = threading.Thread(target=work, name="skyward-look", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
