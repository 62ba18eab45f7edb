"""The line of a call's error that says what happened, for lists and logs that have room for one line."""

from __future__ import annotations

import re

__all__ = ["summary"]

_TRACEBACK = re.compile(r"^Traceback( \(most recent call last\):)?\n", re.M)
_FRAME = re.compile(r'^  File ".*\n', re.M)
_GROUP = re.compile(r"^ *\+ Exception Group Traceback \(most recent call last\):\n", re.M)
_TOLD = re.compile(r"^[^\s].*", re.M)
_TOLD_OF_GROUP = re.compile(r"^ *\| ([^\s|+].*)", re.M)


def summary(outcome: str, error: str) -> str:
    """The `Type: message` line of an exception; of a crash, a time limit or a lost node, the first line.

    `outcome` and `error` are those of `events.CallEnded`.
    """
    text = error.strip()
    if outcome == "error":
        if group := _GROUP.search(text):
            found = _TOLD_OF_GROUP.search(text, group.end())
            return found[1] if found else text.partition("\n")[0]
        # A chain ends with the exception that was raised. Of a long text the beginning may be left out.
        starts = list(_TRACEBACK.finditer(text)) or list(_FRAME.finditer(text))
        if starts and (found := _TOLD.search(text, starts[-1].end())):
            return found[0]
    return text.partition("\n")[0]
