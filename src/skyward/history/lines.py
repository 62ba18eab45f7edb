"""Events as lines of JSON, and back: one object a line, with the name of its kind and its fields.

Lines of a newer version are read as far as they are known: other fields are left out, other kinds give nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, cast

from skyward import events
from skyward.events import EndOfCall, Event

__all__ = ["ended_line", "line", "parsed"]

_LONGEST = 64 << 10


def line(event: Event) -> bytes:
    """An event as one line, with its line end."""
    if isinstance(event, events.Output):
        return _output_line(event)
    if isinstance(event, events.CallEnded):
        end = (event.call, event.name, event.node, event.outcome, event.seconds, event.rank, event.error)
        more = (event.attempt, event.arguments, event.items, event.failed_items)
        return ended_line(event.pool, event.time, (*end, *more)).encode()
    values = {name: getattr(event, name) for name in _NAMES.get(type(event), ())}
    if isinstance(event, events.NodeSample):
        values["gpus"] = [[getattr(gpu, name) for name in _GPU] for gpu in event.gpus]
    if isinstance(event, events.Log | events.Warned) and len(event.text) > _LONGEST:
        values["text"] = event.text[:_LONGEST] + " ..."
    return _encode({"event": type(event).__name__, **values}).encode() + b"\n"


def ended_line(pool: str, time: float, end: EndOfCall) -> str:
    """The end of a call as a line; there are many of these, so it is quick."""
    call, name, node, outcome, seconds, rank, error, attempt, arguments, items, failed_items = end
    more = f',"arguments":{_quoted(arguments)}' if arguments else ""
    if error:
        more += f',"error":{_quoted(error)}'
    if items != 1 or failed_items:
        more += f',"items":{items},"failed_items":{failed_items}'
    return (
        f'{{"event":"CallEnded","pool":{_quoted(pool)},"time":{time!r},"call":{_quoted(call)},"name":{_quoted(name)},'
        f'"node":{node},"outcome":"{outcome}","seconds":{seconds!r},"rank":{"null" if rank is None else rank},'
        f'"attempt":{attempt}{more}}}\n'
    )


def _output_line(event: events.Output) -> bytes:
    """A line of output as a line, likewise."""
    text = event.text if len(event.text) <= _LONGEST else event.text[:_LONGEST] + " ..."
    return (
        f'{{"event":"Output","pool":{_quoted(event.pool)},"time":{event.time!r},"node":{event.node},'
        f'"stream":"{event.stream}","text":{_quoted(text)},"call":{_quoted(event.call) if event.call else "null"},'
        f'"progress":{"true" if event.progress else "false"},"rank":{"null" if event.rank is None else event.rank}}}\n'
    ).encode()


def parsed(text: bytes) -> Event | None:
    """The event of a line; None for a line that is damaged, or of a kind that is not known."""
    try:
        found: Any = json.loads(text)
        kind = _KINDS.get(found["event"])
        return None if kind is None else kind(**_known(kind, found))
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def _known(kind: type[Event], found: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a line that the event has, as the types that it has them in."""
    values = {name: found[name] for name in _NAMES[kind] if name in found}
    if any(name not in values for name in _WANTED[kind]):
        raise ValueError("a field is missing")
    if kind is events.NodeSample:
        given = cast("list[list[Any]]", values.get("gpus") or [])
        values["gpus"] = tuple(events.GpuSample(*gpu[: len(_GPU)]) for gpu in given)
    if kind is events.Warned:
        values["kinds"] = tuple(map(str, values["kinds"]))
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
_encode = json.JSONEncoder(default=_other, separators=(",", ":")).encode
_quoted = json.encoder.encode_basestring_ascii
_GPU = tuple(field.name for field in fields(events.GpuSample))
