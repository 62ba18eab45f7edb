"""The folder of a detached run on node 0, and its steward's socket: all that is known of the run there.

<folder>/journal     facts (transport/journal.py): head, epoch, started, restarted, ended; the driver's lines after that
<folder>/output      what the program printed, as it came
<folder>/results/    files of the program, and what it returned: return.pkl, or its exception in raised
<folder>/program/    the program's working files, in which it runs, if this computer is not the one that submitted it
<folder>/state/      its history then, with failed calls, and what `resume=` keeps

It is read while the run lives and afterwards, by offset, also by other versions of Skyward. This file is also a program
that `setup/remote_folder.py` sends to the folder's machine, so it needs the standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import stat
import sys
import time
from typing import Any

__all__ = [
    "FOLDER",
    "JOURNAL",
    "OUTPUT",
    "PROGRAM",
    "RAISED",
    "RESERVE",
    "RESULTS",
    "RETURNED",
    "RUN",
    "RUN_NAME",
    "RunFolder",
    "ask",
    "listing",
    "main",
    "piece",
]

RUN = "SKYWARD_RUN"
"""Tells a run's program where its steward listens."""

FOLDER = "SKYWARD_RUN_FOLDER"

RUN_NAME = "SKYWARD_RUN_NAME"

JOURNAL, OUTPUT, RESERVE, RESULTS, PROGRAM = "journal", "output", "reserve", "results", "program"
RETURNED, RAISED = f"{RESULTS}/return.pkl", f"{RESULTS}/raised"

_COPIED = {".": [RESULTS, "state"], "state": ["runs", "history"]}  # of these folders, only these folders
_PIECE = 1 << 20
_ANSWER = 10.0


def piece(folder: str, name: str, offset: int, most: int = _PIECE) -> bytes:
    """Of a file in the folder; empty if there is no file, or nothing more."""
    try:
        fd = os.open(os.path.join(folder, name), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return b""
    with open(fd, "rb") as file:
        file.seek(offset)
        return file.read(most)


def listing(folder: str) -> dict[str, Any]:
    """What is to be copied, as entries of `transport/trees.py`, and the time on this machine."""
    entries: list[list[Any]] = []
    for path, folders, names in os.walk(folder):
        inner = os.path.relpath(path, folder)
        if inner in _COPIED:
            folders[:], names = [each for each in folders if each in _COPIED[inner]], []
        if inner == ".":
            continue
        entries.append([inner, "d", 0, 0, 0o700, ""])
        for name in sorted([*names, *(each for each in folders if os.path.islink(os.path.join(path, each)))]):
            try:
                found = os.lstat(os.path.join(path, name))
                target = os.readlink(os.path.join(path, name)) if stat.S_ISLNK(found.st_mode) else ""
            except FileNotFoundError:
                continue  # it was removed or renamed just now
            if target:
                entries.append([f"{inner}/{name}", "l", 0, 0, 0, target])
            elif stat.S_ISREG(found.st_mode):
                mode = stat.S_IMODE(found.st_mode) & 0o777
                entries.append([f"{inner}/{name}", "f", found.st_size, found.st_mtime_ns, mode, ""])
    return {"entries": entries, "now": time.time_ns()}


def ask(path: str, question: dict[str, Any]) -> dict[str, Any]:
    """The answer of the steward at this path. OSError if none listens."""
    directory, name = os.path.split(path)
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(_ANSWER)
            sock.connect(f"/proc/self/fd/{fd}/{name}")  # a path may be longer than a socket's address
            sock.sendall(json.dumps(question).encode() + b"\n")
            with sock.makefile("rb") as file:
                line = file.readline(_PIECE)
    finally:
        os.close(fd)
    if not line:
        raise ConnectionError("the steward gave no answer")
    answer: dict[str, Any] = json.loads(line)
    return answer


class RunFolder:
    def __init__(self, path: str, steward: str) -> None:
        self._path, self._steward = path, steward

    def piece(self, name: str, offset: int) -> bytes:
        return piece(self._path, name, offset)

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """OSError if the steward does not answer."""
        try:
            return ask(self._steward, question)
        except (ConnectionRefusedError, FileNotFoundError):  # it is gone, and writes nothing any more
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(self._path, RESERVE))
            raise

    def listing(self) -> dict[str, Any]:
        return listing(self._path)

    def histories(self) -> list[str]:
        """The folders in state/history."""
        with contextlib.suppress(FileNotFoundError):
            return sorted(os.listdir(os.path.join(self._path, "state", "history")))
        return []

    def remove(self) -> None:
        shutil.rmtree(self._path, ignore_errors=True)


def main() -> None:
    """Answers lines of JSON from standard input: a line that says whether it worked and how many bytes follow, then
    these.
    """
    while line := sys.stdin.buffer.readline():
        word, path, steward, *rest = json.loads(line)
        folder, content = RunFolder(path, steward), b""
        try:
            match word:
                case "piece":
                    content = folder.piece(*rest)
                case "ask":
                    content = json.dumps(folder.ask(*rest)).encode()
                case "listing":
                    content = json.dumps(folder.listing()).encode()
                case "histories":
                    content = json.dumps(folder.histories()).encode()
                case "remove":
                    folder.remove()
                case _:
                    raise ValueError(f"there is no word {word}")
            worked = "ok"
        except (OSError, ValueError) as exc:
            worked, content = "failed", str(exc).encode()
        sys.stdout.buffer.write(f"{worked} {len(content)}\n".encode() + content)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
