"""The joining program as the text of one file: it needs Python 3.8 or later, and nothing else."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from skyward.node import join, join_relay
from skyward.node.join import MARK

__all__ = ["join_file", "join_program", "relay_program"]

_FUTURE = "from __future__ import annotations\n"
_ALONE = """
import sys

if __name__ == "__main__" and not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
    del sys.path[0]  # nothing is imported from where the file lies: others may write there
"""


@cache
def join_program() -> str:
    whole = Path(join.__file__).read_text()
    return whole.replace(_FUTURE, _FUTURE + _ALONE, 1)


@cache
def relay_program() -> str:
    return Path(join_relay.__file__).read_text()


def join_file(text: str) -> str:
    return f"{MARK}{text}\n{join_program()}"
