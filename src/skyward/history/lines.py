"""Events as lines of JSON, and back: one object a line, with the name of its kind and its fields.

Lines of a newer version are read as far as they are known: other fields are left out, other kinds give nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, cast

from skyward import events
from skyward.events import Event

__all__ = ["line", "parsed"]

_LONGEST = 64 << 10


def line(event: Event, **more: Any) -> bytes:
    """An event as one line, with its line end; `more` are fields that only this file has."""
    values = {name: getattr(event, name) for name in _NAMES.get(type(event), ())}
    if isinstance(event, events.NodeSample):
        values["gpus"] = [[getattr(gpu, name) for name in _GPU] for gpu in event.gpus]
    if isinstance(event, events.Output | events.Log) and len(event.text) > _LONGEST:
        values["text"] = event.text[:_LONGEST] + " ..."
    told = {"event": type(event).__name__, **values, **more}
    return json.dumps(told, default=_other, separators=(",", ":")).encode() + b"\n"


def parsed(text: bytes) -> tuple[Event, ...]:
    """The events of a line; none for a line that is damaged, or of a kind that is not known.

    A call that began and ended between two writings has one line, which gives both.
    """
    try:
        found: Any = json.loads(text)
        kind = _KINDS.get(found["event"])
        if kind is None:
            return ()
        event = kind(**_known(kind, found))
        if isinstance(event, events.CallEnded) and "attempt" in found:
            e, attempt, arguments = event, int(found["attempt"]), str(found.get("arguments", ""))
            at = (e.pool, e.call, e.name, e.node, attempt, e.rank, arguments)
            return events.CallStarted(*at, time=e.time - e.seconds), event
    except (ValueError, TypeError, KeyError, RecursionError):
        return ()
    return (event,)


def _known(kind: type[Event], found: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a line that the event has, as the types that it has them in."""
    values = {name: found[name] for name in _NAMES[kind] if name in found}
    if any(name not in values for name in _WANTED[kind]):
        raise ValueError("a field is missing")
    if kind is events.NodeSample:
        given = cast("list[list[Any]]", values.get("gpus") or [])
        values["gpus"] = tuple(events.GpuSample(*gpu[: len(_GPU)]) for gpu in given)
    return values


def _other(value: object) -> str:
    return str(value)  # a number of numpy's among the metrics, for one


# The stacks of a broadcast that gets nowhere stay out: its text says where ranks stand.
_KINDS: dict[str, type[Event]] = {
    name: found
    for name in events.__all__
    if isinstance(found := getattr(events, name), type) and issubclass(found, Event) and found is not Event
}
_KINDS.pop("BroadcastStalled")
_NAMES = {kind: tuple(field.name for field in fields(kind)) for kind in _KINDS.values()}
_WANTED = {
    kind: tuple(f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING)
    for kind in _KINDS.values()
}
_GPU = tuple(field.name for field in fields(events.GpuSample))
