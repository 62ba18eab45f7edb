"""The folder of a detached run on node 0, and the socket of its steward: all that is known of the run there.

<folder>/journal     facts (transport/journal.py): head, epoch, started, restarted, ended; the driver's lines after that
<folder>/output      what the program printed, as it came
<folder>/results/    what it returned

It is read while the run lives and afterwards, by offset, and by other versions of Skyward. This file is also a program
that a shell runs on the machine where the folder is, as `python -c TEXT`, so it needs the standard library only.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
from typing import Any

__all__ = ["FOLDER", "JOURNAL", "OUTPUT", "PROGRAM", "RESULTS", "RUN", "RunFolder", "ask", "main", "piece"]

RUN = "SKYWARD_RUN"
"""The variable that tells a run's program where its steward listens."""

FOLDER = "SKYWARD_RUN_FOLDER"
"""The variable that tells it where the run's folder is."""

JOURNAL, OUTPUT, RESULTS, PROGRAM = "journal", "output", "results", "program"

_PIECE = 1 << 20
_ANSWER = 10.0


def piece(folder: str, name: str, offset: int, most: int = _PIECE) -> bytes:
    """A part of a file in the folder; nothing if there is no such file, or nothing more in it."""
    try:
        fd = os.open(os.path.join(folder, name), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return b""
    with open(fd, "rb") as file:
        file.seek(offset)
        return file.read(most)


def ask(path: str, question: dict[str, Any]) -> dict[str, Any]:
    """The steward's answer, which listens at this path. OSError if none does."""
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
    """The folder of a run on this computer, and its steward."""

    def __init__(self, path: str, steward: str) -> None:
        self._path, self._steward = path, steward

    def piece(self, name: str, offset: int) -> bytes:
        return piece(self._path, name, offset)

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """OSError if the steward does not answer."""
        return ask(self._steward, question)

    def remove(self) -> None:
        shutil.rmtree(self._path, ignore_errors=True)


def main() -> None:
    """Answers lines of JSON from standard input: a line that says whether it worked and how many bytes follow, then
    these bytes.
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
                case _:
                    folder.remove()
            worked = "ok"
        except (OSError, ValueError) as exc:
            worked, content = "failed", str(exc).encode()
        sys.stdout.buffer.write(f"{worked} {len(content)}\n".encode() + content)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
