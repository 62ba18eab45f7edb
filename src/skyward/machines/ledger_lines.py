"""The lines of a ledger: how a fact is written, and what of a file is believed when it is read.

What a ledger says decides where requests go and what is ended, so it is read like the word of a stranger: a line with
anything in it that we could not have written counts as damaged.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, cast, get_args

__all__ = ["Fact", "Record", "content", "line", "parsed"]

log = logging.getLogger("skyward.ledger")

Fact = Literal["open", "intent", "answer", "refused", "gone", "note"]

_MOST = 64 << 20
_LONGEST_LINE = 1 << 20
_TEXTS = ("provider", "region", "profile", "endpoint_url", "owner", "host", "ssh_from", "token", "name")
_NUMBERS = ("expires", "pid", "price", "count")
_UNKNOWN = {"price": math.inf}  # what stands for a number that nobody knows
_PLACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class Record:
    """One fact: `call` ties an answer to its intent."""

    fact: Fact
    call: str = ""
    kind: str = ""
    ids: tuple[str, ...] = ()
    time: float = 0.0
    data: Mapping[str, Any] = field(default_factory=dict[str, Any])


def line(record: Record) -> bytes:
    """A fact as it stands in the file; a Secret in it is refused, as everything is that JSON does not know."""
    body = {
        "fact": record.fact,
        "call": record.call,
        "kind": record.kind,
        "ids": list(record.ids),
        "time": record.time,
        "data": dict(record.data),
    }
    text = json.dumps(body, separators=(",", ":"), sort_keys=True).encode()
    return _checksum(text) + b" " + text + b"\n"


def parsed(line: bytes) -> Record | None:
    """The fact of a line, or None if the line is damaged."""
    checksum, _, text = line.partition(b" ")
    if len(text) > _LONGEST_LINE or checksum != _checksum(text):
        return None
    try:
        body = json.loads(text)
        return _checked(cast("dict[str, Any]", body)) if isinstance(body, dict) else None
    except (ValueError, KeyError, RecursionError):
        return None


def content(path: Path) -> bytes | None:
    """What a ledger holds; None if it is no plain file of this user's, or others can write to it."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as exc:  # a link, or a file that we may not open
        log.warning("the ledger %s is not read: %s", path, exc.strerror)
        return None
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        os.close(fd)
        log.warning("the ledger %s is not read: it is no plain file, or not this user's alone", path)
        return None
    with open(fd, "rb") as file:
        return file.read(_MOST)


def _checked(body: dict[str, Any]) -> Record | None:
    fact, call, kind, ids, when, data = (body[name] for name in ("fact", "call", "kind", "ids", "time", "data"))
    if not isinstance(ids, list) or not isinstance(data, dict):
        return None
    listed, told = cast("list[Any]", ids), cast("dict[str, Any]", data)
    good = (
        isinstance(fact, str)
        and fact in get_args(Fact)
        and all(map(_is_text, (call, kind, *listed)))
        and _is_number(when)
        and all(told.get(name) is None or _is_text(told[name]) for name in _TEXTS)
        and all(told.get(name) in (None, _UNKNOWN.get(name)) or _is_number(told[name]) for name in _NUMBERS)
        and (told.get("region") is None or _PLACE.fullmatch(told["region"]) is not None)
    )
    return Record(cast("Fact", fact), call, kind, tuple(listed), when, told) if good else None


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value.isprintable()


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e15 and math.isfinite(value)


def _checksum(text: bytes) -> bytes:
    return blake2b(text, digest_size=8).hexdigest().encode()
