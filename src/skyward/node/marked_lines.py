"""Lines of stderr that are more than text: a mark, a kind, and JSON. Records, warnings, and reports of progress.

They take the way of all output, so they come in the order in which the body said things, and are held back, silenced
and redirected with the rest. Bodies can write what they like: a line that is not quite right stays a line.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any, Literal, cast

__all__ = ["LONGEST_NAME", "MARK", "Kind", "parsed", "readable", "write"]

Kind = Literal["log", "progress", "warning"]

MARK = "\x1eskyward-"
LONGEST_NAME = 1000
_MOST_NAMES = 20
_LARGEST = 1 << 64
_LAST_YEAR = 253_402_300_800.0  # the end of the last that dates can have
_NUMBER = (int, float)
_FIELDS: dict[str, dict[str, tuple[type, ...]]] = {
    "log": {
        "logger": (str,),
        "level": (int,),
        "created": (float,),
        "text": (str,),
        "path": (str,),
        "line": (int,),
        "function": (str,),
    },
    "warning": {"kinds": (list,), "text": (str,), "path": (str,), "line": (int,), "source": (str,)},
    "progress": {"step": _NUMBER, "total": (*_NUMBER, type(None)), "metrics": (dict,)},
}


def write(kind: Kind, about: Mapping[str, Any]) -> bool:
    """Writes such a line; False if what is written now goes elsewhere than home."""
    from skyward.node.stdio import CallStream  # the client, which only reads such lines, does without

    stream = sys.stderr
    if not isinstance(stream, CallStream) or stream.is_redirected():
        return False
    stream.write(f"{MARK}{kind} {json.dumps(about)}\n")
    return True


def parsed(text: str) -> tuple[Kind, dict[str, Any]] | None:
    """What such a line says, or None if it is an ordinary one."""
    kind, _, data = text.removeprefix(MARK).partition(" ")
    fields = _FIELDS.get(kind)
    if not text.startswith(MARK) or fields is None:
        return None
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return None
    about = cast("dict[str, Any]", found) if isinstance(found, dict) else {}
    if not all(name in about and type(about[name]) in kinds for name, kinds in fields.items()):
        return None
    metrics: dict[str, Any] = about.get("metrics", {})
    if not all(type(value) in _NUMBER for value in metrics.values()):
        return None
    if any(type(value) is int and abs(value) >= _LARGEST for value in (*about.values(), *metrics.values())):
        return None
    if kind == "log" and not (len(about["logger"]) <= LONGEST_NAME and 0 <= about["created"] < _LAST_YEAR):
        return None
    if kind == "warning" and not _are_names(about["kinds"]):
        return None
    return cast(Kind, kind), {name: about[name] for name in fields}


def readable(text: str) -> str:
    """The text as people read it: records and warnings in words, no reports of progress."""
    import logging  # runners, which only write such lines, do without

    shown: list[str] = []
    for line in text.split("\n"):
        before, mark, said = line.partition(MARK)
        shown += [before] if before or not mark else []
        found = parsed(mark + said) if mark else None
        if found is not None and found[0] == "log":
            level: int = found[1]["level"]
            shown.append(f"{logging.getLevelName(level)} {found[1]['logger']}: {found[1]['text']}")
        elif found is not None and found[0] == "warning":
            about = found[1]
            shown.append(f"{about['path']}:{about['line']}: {about['kinds'][0].rpartition(':')[2]}: {about['text']}")
    return "\n".join(shown)


def _are_names(names: list[Any]) -> bool:
    if not 0 < len(names) <= _MOST_NAMES:
        return False
    return all(isinstance(name, str) and len(name) <= LONGEST_NAME for name in names)
