"""What exceptions of a group say: which call or item it was, as a note, and what had finished, as `partial`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, cast

from skyward.api.brief import brief, described
from skyward.api.compute import PendingCompute, name_of
from skyward.transport.exceptions import noted

__all__ = ["failed_part", "note_call", "note_items", "partial_of", "say_how_many", "set_partial"]

_MOST_NOTES = 20  # calls that need the same result share its exception


def failed_part(
    error: Exception,
    failed: Future[Any],
    parts: Sequence[Future[Any]],
    calls: Sequence[PendingCompute[Any]],
    partial: bool = True,
) -> None:
    """Says on `error` which of the calls it comes from; keeps the results of those that have finished."""
    index = next((index for index, part in enumerate(parts) if part is failed), None)
    if index is not None:
        note_call(error, index, calls)
    if partial and len(parts) > 1:
        set_partial(error, {index: part.result() for index, part in enumerate(parts) if _is_good(part)})
        say_how_many(error, len(parts), "calls")


def note_call(error: BaseException, index: int, calls: Sequence[PendingCompute[Any]]) -> None:
    """Notes which of the calls of a group an exception comes from."""
    notes = getattr(error, "__notes__", None)
    if index < len(calls) and not (isinstance(notes, list) and len(cast("list[Any]", notes)) >= _MOST_NOTES):
        call = calls[index]
        noted(error, f"call {index} of {len(calls)}: {described(call.name, call.args, call.kwargs)}")


def note_items(error: BaseException, each: PendingCompute[Any], items: Sequence[Any], start: int) -> None:
    """Notes which items of a map, from index `start` on, a call had that gave no result."""
    first, last = (f"{name_of(each.fn)}({brief(item)})" for item in (items[0], items[-1]))
    if len(items) == 1:
        noted(error, f"item {start}: {first}")
    else:
        noted(error, f"items {start} to {start + len(items) - 1}, sent as one call: {first} to {last}")


def set_partial(error: Exception, results: Mapping[int, Any]) -> None:
    """Puts results on an exception by their index; nothing happens if it takes no attributes."""
    try:
        error.partial = dict(results)  # type: ignore[attr-defined]
    except Exception:  # one that forbids it, such as a frozen dataclass
        pass


def partial_of(error: BaseException) -> dict[int, Any]:
    """The results on an exception; none if it has no `partial`, or one that is the user's own."""
    found: Any = getattr(error, "partial", None)
    return cast("dict[int, Any]", found) if isinstance(found, dict) else {}


def say_how_many(error: Exception, count: int, what: str) -> None:
    """Notes how many of `count` had finished."""
    if isinstance(getattr(error, "partial", None), dict) and count > 1:
        finished = len(partial_of(error))
        noted(error, f"{finished} of {count} {what} had finished: see `partial` of this exception, results by index.")


def _is_good(part: Future[Any]) -> bool:
    try:
        return part.done() and part.exception() is None
    except BaseException:  # it was cancelled, or its result cannot be read
        return False
