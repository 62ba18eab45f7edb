"""The program that joins a pool, as the text of one file: a machine needs any Python from 3.8 on, and nothing else."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from skyward.node import join

__all__ = ["join_program"]

_IMPORT = re.compile(r"^from skyward\.node\.(join_\w+) import .*\n", re.MULTILINE)
_FUTURE = "from __future__ import annotations\n"


@cache
def join_program() -> str:
    """The source of the program; it holds no secret."""
    home = Path(join.__file__).parent
    parts = [(home / f"{name}.py").read_text() for name in _IMPORT.findall((home / "join.py").read_text())]
    inserted = "".join(part.partition(_FUTURE)[2] for part in parts)
    text = (home / "join.py").read_text()
    first = _IMPORT.search(text)
    assert first is not None
    return text[: first.start()] + inserted + _IMPORT.sub("", text[first.start() :])
