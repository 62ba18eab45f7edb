"""Records that bodies log, on their way to the client: as records where it has handlers, else as readable lines.

a body ──► its own handlers, if it has configured any
     └───► none: the handler of last resort, which is ours here
"""

from __future__ import annotations

import logging
import sys
from functools import partial
from typing import Any

from skyward.api import reporting
from skyward.node import python_warnings
from skyward.node.marked_lines import LONGEST_NAME, write

__all__ = ["apply", "install"]

_MOST = 1 << 16

Settings = dict[str, Any]
"""`levels`: of loggers by name, as the client has set them; `records`: whether it has handlers; `warnings`: filters."""

_applied: Settings = {}


def install(settings: Settings | None) -> None:
    """Sends on what no handler of the body's takes, and what it says with `sky.progress`."""
    logging.lastResort = _Forward()
    reporting.send_by(partial(write, "progress"))
    python_warnings.install()
    if settings:
        apply(settings)


def apply(settings: Settings) -> None:
    """Has loggers log what the client would, and warnings given as it would have them."""
    global _applied
    if settings == _applied:
        return
    for name in _applied.get("levels", {}):
        if name and name not in settings["levels"]:
            logging.getLogger(name).setLevel(logging.NOTSET)
    for name, level in settings["levels"].items():
        logging.getLogger(name or None).setLevel(level)
    python_warnings.apply(settings.get("warnings", []))
    _applied = settings


class _Forward(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
            about: dict[str, Any] = {
                "logger": record.name[:LONGEST_NAME],
                "level": record.levelno,
                "created": record.created,
                "text": text[:_MOST],
                "path": record.pathname,
                "line": record.lineno,
                "function": record.funcName or "",
            }
            if not (_applied.get("records") and write("log", about)) and sys.stderr is not None:
                sys.stderr.write(f"{record.levelname} {record.name}: {text}\n")
        except Exception:
            self.handleError(record)
