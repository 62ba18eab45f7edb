"""Events as lines of JSON, and back. Unknown fields and kinds of newer versions are ignored."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, cast

from skyward import events
from skyward.events import EndOfCall, Event

__all__ = ["Skipped", "ended_line", "failure", "line", "parsed", "summary"]


_LONGEST = 64 << 10
_MOST_NODES = 100_000
_LARGEST = 1 << 64


@dataclass(frozen=True, slots=True)
class Skipped(Event):
    count: int = 0
    ok: int = 0


def line(event: Event) -> bytes:
    if isinstance(event, events.Output):
        return _output_line(event)
    if isinstance(event, events.CallEnded):
        end = (event.call, event.name, event.node, event.outcome, event.seconds, event.rank, event.error)
        more = (event.attempt, event.arguments, event.items, event.failed_items, event.group, event.waited)
        return ended_line(event.pool, event.time, (*end, *more)).encode()
    values = {name: getattr(event, name) for name in _NAMES.get(type(event), ())}
    if isinstance(event, events.NodeSample):
        values["gpus"] = [[getattr(gpu, name) for name in _GPU] for gpu in event.gpus]
    if isinstance(event, events.Log | events.Warned) and len(event.text) > _LONGEST:
        values["text"] = event.text[:_LONGEST] + " ..."
    return _encode({"event": type(event).__name__, **values}).encode() + b"\n"


def ended_line(pool: str, time: float, end: EndOfCall) -> str:
    call, name, node, outcome, seconds, rank, error, attempt, arguments, items, failed_items, group, waited = end
    more = f',"arguments":{_quoted(arguments)}' if arguments else ""
    if error:
        more += f',"error":{_quoted(error)}'
    if items != 1 or failed_items:
        more += f',"items":{items},"failed_items":{failed_items}'
    if group:
        more += f',"group":{_quoted(group)}'
    if waited >= 0.0001:
        more += f',"waited":{waited:.4f}'
    return (
        f'{{"event":"CallEnded","pool":{_quoted(pool)},"time":{time!r},"call":{_quoted(call)},"name":{_quoted(name)},'
        f'"node":{node},"outcome":"{outcome}","seconds":{seconds!r},"rank":{"null" if rank is None else rank},'
        f'"attempt":{attempt}{more}}}\n'
    )


def _output_line(event: events.Output) -> bytes:
    text = event.text if len(event.text) <= _LONGEST else event.text[:_LONGEST] + " ..."
    return (
        f'{{"event":"Output","pool":{_quoted(event.pool)},"time":{event.time!r},"node":{event.node},'
        f'"stream":"{event.stream}","text":{_quoted(text)},"call":{_quoted(event.call) if event.call else "null"},'
        f'"progress":{"true" if event.progress else "false"},"rank":{"null" if event.rank is None else event.rank}}}\n'
    ).encode()


def parsed(text: bytes) -> Event | None:
    try:
        found: Any = _decode(text.decode())
        kind = _KINDS.get(found["event"])
        return None if kind is None else kind(**_known(kind, found))
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def _known(kind: type[Event], found: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, right in _CHECKS[kind]:
        if name in found:
            value = values[name] = found[name]
            if not right(value):
                raise ValueError(f"{name} is no such value")
        elif name in _WANTED[kind]:
            raise ValueError("a field is missing")
    if kind is events.NodeSample:
        given = cast("list[list[Any]]", values.get("gpus") or [])
        values["gpus"] = tuple(_gpu(gpu) for gpu in given)
    if kind is events.Warned:
        values["kinds"] = tuple(map(str, values["kinds"])) or ("builtins:Warning",)
    return values


def _gpu(values: list[Any]) -> events.GpuSample:
    found = events.GpuSample(*values[: len(_GPU)])
    for name in _GPU[2:]:
        if not _is_perhaps_number(getattr(found, name)):
            raise ValueError(f"{name} is not a number")
    if not _is_node(found.index) or not isinstance(cast(Any, found.name), str):
        raise ValueError("no GPU")
    return found


def _is_number(value: Any) -> bool:
    return (type(value) is float or type(value) is int) and -1e18 < value < 1e18


def _is_any_number(value: Any) -> bool:
    return _is_number(value) or (type(value) is float and not math.isfinite(value))


def _is_metric(value: Any) -> bool:
    """Bodies report what they like, such as a loss that is not a number."""
    return type(value) is float or (type(value) is int and abs(value) < _LARGEST)


def _is_time(value: Any) -> bool:
    return _is_number(value) and 0 <= value < 1e11


def _is_price(value: Any) -> bool:
    return _is_any_number(value) and value >= 0


def _is_perhaps_number(value: Any) -> bool:
    return value is None or _is_number(value)


def _is_node(value: Any) -> bool:
    return type(value) is int and -1 <= value <= _MOST_NODES


def _is_perhaps_node(value: Any) -> bool:
    return value is None or _is_node(value)


def _is_text(value: Any) -> bool:
    return type(value) is str


def _is_perhaps_text(value: Any) -> bool:
    return value is None or type(value) is str


def _is_list(value: Any) -> bool:
    return type(value) is list


def _is_object(value: Any) -> bool:
    return type(value) is dict


def _is_bool(value: Any) -> bool:
    return type(value) is bool


def _are_numbers(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_metric, cast("dict[str, Any]", value).values()))


def _is_processes(value: Any) -> bool:
    return _is_node(value) or type(value) is str


_RIGHT: dict[str, Callable[[Any], bool]] = {
    "bool": _is_bool,
    "float": _is_number,
    "float | None": _is_perhaps_number,
    "int": _is_number,
    "int | None": _is_perhaps_number,
    "int | str": _is_processes,
    "str": _is_text,
    "str | None": _is_perhaps_text,
    "Mapping[str, Any]": _is_object,
    "Mapping[str, float]": _are_numbers,
    "tuple[str, ...]": _is_list,
    "tuple[GpuSample, ...]": _is_list,
}


def _check(name: str, kind: str) -> Callable[[Any], bool]:
    if name in ("node", "nodes", "rank"):
        return _is_perhaps_node if "None" in kind else _is_node
    if name == "time":
        return _is_time
    if name == "hourly":
        return _is_price
    return _is_text if kind.startswith("Literal") else _RIGHT[kind]  # a new event may need a new row there


def _other(value: object) -> str:
    return str(value)  # a number of numpy's among the metrics, for one


# The stacks of a broadcast that gets nowhere stay out: its text says where ranks stand.
_KINDS: dict[str, type[Event]] = {
    name: found
    for name in events.__all__
    if isinstance(found := getattr(events, name), type) and issubclass(found, Event) and found is not Event
}
_KINDS.pop("BroadcastStalled")
_KINDS["Skipped"] = Skipped
_NAMES = {kind: tuple(field.name for field in fields(kind)) for kind in _KINDS.values()}
_WANTED = {
    kind: tuple(f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING)
    for kind in _KINDS.values()
}
_CHECKS = {kind: tuple((field.name, _check(field.name, str(field.type))) for field in fields(kind)) for kind in _NAMES}
_decode = json.JSONDecoder().decode
_encode = json.JSONEncoder(default=_other, separators=(",", ":")).encode
_quoted = json.encoder.encode_basestring_ascii
_GPU = tuple(field.name for field in fields(events.GpuSample))


_LONGEST_SUMMARY = 300

_TRACEBACK = re.compile(r"^Traceback( \(most recent call last\):)?\n", re.M)
_FRAME = re.compile(r'^  File ".*\n', re.M)
_GROUP = re.compile(r"^ *\+ Exception Group Traceback \(most recent call last\):\n", re.M)
_TOLD = re.compile(r"^[^\s].*", re.M)
_TOLD_OF_GROUP = re.compile(r"^ *\| ([^\s|+].*)", re.M)


def failure(ended: events.CallEnded) -> str:
    told = summary(ended.outcome, ended.error)[:_LONGEST_SUMMARY]
    where = f"on node {ended.node}" if ended.node >= 0 else "before it was started"
    if ended.items > 1 and ended.outcome == "error" and ended.failed_items:
        return f"{ended.name}, {where}: {ended.error.partition(chr(10))[0][:_LONGEST]}: {told}"
    return f"{ended.name}({ended.arguments}) failed {where}: {told}"


def summary(outcome: str, error: str) -> str:
    """The `Type: message` line of an exception, or the first line of a crash, a time limit or a lost node."""
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
