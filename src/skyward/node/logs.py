"""Records that bodies log, on their way to the client: as records where it has handlers, else as readable lines.

They are written to stderr like any other line, so they come in the order in which the body said things, and are held
back, silenced and redirected with the rest. A record is one line: `MARK`, then JSON.

    a body ──► its own handlers, if it has configured any
         └───► none: the handler of last resort, which is ours here
"""

from __future__ import annotations

import json
import logging
import sys
from typing import Any, cast

from skyward.node.stdio import CallStream

__all__ = ["MARK", "apply", "install", "parsed"]

MARK = "\x1eskyward-log "
_MOST = 1 << 16

Settings = dict[str, Any]
"""`levels`: of loggers by name, as the client has set them; `records`: whether the client has handlers."""

_FIELDS = {"logger": str, "level": int, "created": float, "text": str, "path": str, "line": int, "function": str}
_applied: Settings = {}


def install(settings: Settings | None) -> None:
    """Sends on what no handler of the body's takes."""
    logging.lastResort = _Forward()
    if settings:
        apply(settings)


def apply(settings: Settings) -> None:
    """Has loggers log what the client would."""
    global _applied
    if settings == _applied:
        return
    for name in _applied.get("levels", {}):
        if name and name not in settings["levels"]:
            logging.getLogger(name).setLevel(logging.NOTSET)
    for name, level in settings["levels"].items():
        logging.getLogger(name or None).setLevel(level)
    _applied = settings


def parsed(text: str) -> dict[str, Any] | None:
    """The record in a line, or None if it is another line. Bodies can write what they like: everything is checked."""
    if not text.startswith(MARK):
        return None
    try:
        found = json.loads(text[len(MARK) :])
    except (ValueError, RecursionError):
        return None
    about = cast("dict[str, Any]", found) if isinstance(found, dict) else {}
    good = all(type(about.get(key)) is kind for key, kind in _FIELDS.items())
    return {key: about[key] for key in _FIELDS} if good else None


class _Forward(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
            stream = sys.stderr
            if _applied.get("records") and isinstance(stream, CallStream) and not stream.is_redirected():
                about = {
                    "logger": record.name,
                    "level": record.levelno,
                    "created": record.created,
                    "text": text[:_MOST],
                    "path": record.pathname,
                    "line": record.lineno,
                    "function": record.funcName or "",
                }
                stream.write(f"{MARK}{json.dumps(about)}\n")
            elif stream is not None:
                stream.write(f"{record.levelname} {record.name}: {text}\n")
        except Exception:
            self.handleError(record)
