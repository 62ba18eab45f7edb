"""What a pool tells a machine that is to join, and where the machine finds it.

Part of the program that joins a pool (`node/join.py`): the standard library only, any Python from 3.8 on.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
from typing import Any

__all__ = ["MARK", "VARIABLE", "Over", "read_text"]

MARK = "# skyward-join: "
"""How the line begins in a file of Python that holds the text of a pool."""
VARIABLE = "SKYWARD_JOIN"


class Over(Exception):
    """There is no reason to be here any more."""


def read_text(file: str | None, stdin: bool, own: str) -> dict[str, Any]:
    """What the pool has told: from a file, a variable, a line of standard input, or the `own` file of the program."""
    given = os.environ.pop(VARIABLE, "")
    if file is not None:
        given = _first_line(file)
    elif not given and stdin:
        while not given.endswith("\n"):
            piece = os.read(0, 1)  # not one byte more than the line
            if not piece:
                break
            given += piece.decode()
    elif not given and os.path.isfile(own):
        given = _first_line(own, MARK)
    given = given[len(MARK) :] if given.startswith(MARK) else given
    if not given.strip():
        raise Over(f"nobody has told which pool to join: give --file FILE, or set {VARIABLE}")
    try:
        return json.loads(base64.urlsafe_b64decode(given.strip()))
    except (ValueError, binascii.Error):
        raise Over("what was given is not the text of a pool; copy all of it, and nothing else") from None


def _first_line(path: str, mark: str = "") -> str:
    """The first line of a file that nobody else may read; nothing if it does not begin with `mark`."""
    try:
        with open(path) as file:
            line = file.readline()
            if line.startswith(mark) and os.fstat(file.fileno()).st_mode & 0o077:
                raise Over(f"others can read {path}, which holds a secret. Run: chmod 600 {path}")
    except OSError as exc:
        raise Over(f"{path} cannot be read: {exc.strerror}") from None
    return line if line.startswith(mark) else ""
