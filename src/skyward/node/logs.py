"""Log records of bodies on their way to the client: as records if it has handlers, else as readable lines.

a body ──► its own handlers, if it has configured any
       └───► none: the handler of last resort, which is ours here
"""

from __future__ import annotations

import builtins
import json
import linecache
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from functools import partial, wraps
from typing import Any, Literal, TextIO, cast

from skyward.api import reporting
from skyward.node.settings import MARK, LogSettings

__all__ = ["Filter", "Kind", "apply", "install", "parsed", "readable", "write"]


_MOST = 1 << 16

_applied: LogSettings = {}
_configure = logging.basicConfig


def install(settings: LogSettings | None) -> None:
    logging.lastResort = _Forward()
    logging.basicConfig = _basic_config
    reporting.send_by(partial(write, "progress"))
    install_warnings()
    if settings:
        apply(settings)


def apply(settings: LogSettings) -> None:
    global _applied
    if settings == _applied:
        return
    levels = settings.get("levels", {})
    for name in _applied.get("levels", {}):
        if name and name not in levels:
            logging.getLogger(name).setLevel(logging.NOTSET)
    for name, level in levels.items():
        logging.getLogger(name or None).setLevel(level)
    apply_filters(settings.get("warnings", []))
    _applied = settings


@wraps(_configure)
def _basic_config(**options: Any) -> None:
    if sys._getframe(1).f_globals.get("__name__") != "logging":  # pyright: ignore[reportPrivateUsage]
        _configure(**options)


class _Forward(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
            content: dict[str, Any] = {
                "logger": record.name[:LONGEST_NAME],
                "level": record.levelno,
                "created": record.created,
                "text": text[:_MOST],
                "path": record.pathname,
                "line": record.lineno,
                "function": record.funcName or "",
            }
            if not (_applied.get("records") and write("log", content)) and sys.stderr is not None:
                sys.stderr.write(f"{record.levelname} {record.name}: {text}\n")
        except Exception:
            self.handleError(record)


# Lines of stderr that are more than text: a mark, a kind, and JSON. Records, warnings, and reports of progress.
#
# They take the way of all output, so they come in the order in which the body said things, and are held back,
# silenced and redirected with the rest. A mark may follow text without a line end; it ends that line only for those
# who read it. Bodies can write what they like: a line that is not quite right stays a line.


Kind = Literal["log", "progress", "warning"]

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


def write(kind: Kind, content: Mapping[str, Any]) -> bool:
    """False if output is redirected."""
    from skyward.node.stdio import CallStream  # the client, which only reads such lines, does without

    stream = sys.stderr
    if not isinstance(stream, CallStream) or stream.is_redirected():
        return False
    stream.write(f"{MARK}{kind} {json.dumps(content)}\n")
    return True


def parsed(text: str, shown: Callable[[str], str] = str) -> tuple[Kind, dict[str, Any]] | None:
    kind, _, data = text.removeprefix(MARK).partition(" ")
    fields = _FIELDS.get(kind)
    if not text.startswith(MARK) or fields is None:
        return None
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return None
    content = cast("dict[str, Any]", found) if isinstance(found, dict) else {}
    if not all(name in content and type(content[name]) in kinds for name, kinds in fields.items()):
        return None
    metrics: dict[str, Any] = content.get("metrics", {})
    if not all(type(value) in _NUMBER for value in metrics.values()):
        return None
    if any(type(value) is int and abs(value) >= _LARGEST for value in (*content.values(), *metrics.values())):
        return None
    if kind == "log" and not (len(content["logger"]) <= LONGEST_NAME and 0 <= content["created"] < _LAST_YEAR):
        return None
    if kind == "warning" and not _are_names(content["kinds"]):
        return None
    return cast(Kind, kind), {name: _shown(content[name], shown) for name in fields}


def readable(text: str) -> str:
    import logging  # runners, which only write such lines, do without

    shown: list[str] = []
    begun = ""
    for line in text.split("\n"):
        begun, *marked = (begun + line).split(MARK)
        found = [parsed(MARK + said) for said in marked]
        if begun and marked and all(one is not None and one[0] == "progress" for one in found):
            continue  # the line continues after it
        shown += [begun] if begun or not marked else []
        begun = ""
        for one in found:
            if one is not None and one[0] == "log":
                level: int = one[1]["level"]
                shown.append(f"{logging.getLevelName(level)} {one[1]['logger']}: {one[1]['text']}")
            elif one is not None and one[0] == "warning":
                content = one[1]
                kind = content["kinds"][0].rpartition(":")[2]
                shown.append(f"{content['path']}:{content['line']}: {kind}: {content['text']}")
    return "\n".join([*shown, begun] if begun else shown)


def _shown(value: Any, shown: Callable[[str], str]) -> Any:
    match value:
        case str():
            return shown(value)
        case list():
            return [shown(name) for name in cast("list[str]", value)]
        case dict():
            return {shown(name): number for name, number in cast("dict[str, Any]", value).items()}
        case _:
            return value


def _are_names(names: list[Any]) -> bool:
    if not 0 < len(names) <= _MOST_NAMES:
        return False
    return all(isinstance(name, str) and len(name) <= LONGEST_NAME for name in names)


# Warnings of bodies: the client's filters count here, and what they let through goes to the client as what it is.
#
# Filters count as they do there, with one difference. One that makes errors of all warnings (`python -W error`) is
# meant for the user's own code: packages may be others here, and what they warn of when they are imported would end
# every call. So it holds where the warning is about the user's code, and elsewhere the warning is shown.


_MOST_KINDS = 20

Filter = tuple[str, str | None, str, str | None, bool, int]
"""Action, message pattern, category as `module:name`, module, whether that is a pattern, line."""

_ALL_ARE_ERRORS: Filter = ("error", None, "builtins:Warning", None, True, 0)
_PYTHON = os.path.dirname(os.__file__) + os.sep
_MOST_SEEN = 10_000

_seen: set[tuple[Any, ...]] = set()  # warnings of packages that would be errors
_applied_filters: list[Any] = []
_told: list[Filter] | None = None
_shown_before = warnings.showwarning


def install_warnings() -> None:
    warnings.showwarning = _show


def apply_filters(filters: list[Filter]) -> None:
    global _applied_filters, _told
    filters = [cast("Filter", tuple(entry)) for entry in filters]  # they may have come as JSON
    if filters == _told:
        return
    replaced = warnings.filters if _told is None else _applied_filters  # at first, what Python begins with
    known = set(map(id, replaced))
    own = [entry for entry in warnings.filters if id(entry) not in known]
    _told, _applied_filters = filters, [_filter(entry) for entry in filters]
    cast("list[Any]", warnings.filters)[:] = [*own, *_applied_filters]
    warnings.simplefilter("ignore", _Nobody, append=True)  # Python notices what is said through its functions only
    _applied_filters.append(warnings.filters[-1])


class _Nobody(Warning):
    """A category that no warning has."""


class _Named(type):
    wanted: str

    def __subclasscheck__(cls, subclass: type) -> bool:
        return any(_name(base) == cls.wanted for base in subclass.__mro__)


def _filter(entry: Filter) -> tuple[Any, ...]:
    action, message, category, module, pattern, line = entry
    if entry == _ALL_ARE_ERRORS:
        action = "always"  # `_show` decides
    owner, _, name = category.partition(":")
    found: Any = (
        getattr(builtins, name, None) if owner == "builtins" else _Named(name, (Warning,), {"wanted": category})
    )
    where = re.compile(module) if module is not None and pattern else module
    return action, re.compile(message, re.I) if message is not None else None, found or _Nobody, where, line


def _is_error(message: Warning | str, category: type[Warning], line: int) -> bool:
    for entry in cast("list[Any]", warnings.filters):
        _, text, kind, module, at = entry
        if module is not None or not issubclass(category, kind) or at not in (0, line):
            continue
        if text is None or text.match(str(message)):
            return (
                entry in _applied_filters
                and _told is not None
                and _told[_applied_filters.index(entry)] == _ALL_ARE_ERRORS
            )
    return False


def _is_own(path: str) -> bool:
    if path.startswith(("<frozen ", _PYTHON)) or f"{os.sep}skyward{os.sep}node{os.sep}" in path:
        return False
    return "site-packages" not in path and "dist-packages" not in path


def _name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"[:LONGEST_NAME]


def _show(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    if _told is not None and _ALL_ARE_ERRORS in _told and _is_error(message, category, lineno):
        if _is_own(filename):
            raise message if isinstance(message, Warning) else category(message)
        if (found := (category, str(message), filename, lineno)) in _seen or len(_seen) > _MOST_SEEN:
            return
        _seen.add(found)
    content: dict[str, Any] = {
        "kinds": [_name(kind) for kind in category.__mro__ if issubclass(kind, Warning)][:_MOST_KINDS],
        "text": str(message)[:_MOST],
        "path": filename,
        "line": lineno,
        "source": (linecache.getline(filename, lineno) if line is None else line).strip()[:_MOST],
    }
    if file is not None or sys.stderr is None or not write("warning", content):
        _shown_before(message, category, filename, lineno, file, line)
