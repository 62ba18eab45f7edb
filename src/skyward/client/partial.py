"""What had finished when a group failed: on the exception, as `partial`, with a note that says which call it was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, cast

from skyward.api.brief import described
from skyward.api.compute import PendingCompute
from skyward.transport.exceptions import noted

__all__ = ["failed_part", "partial_of", "say_how_many", "set_partial"]


def failed_part(
    error: Exception,
    failed: Future[Any],
    parts: Sequence[Future[Any]],
    calls: Sequence[PendingCompute[Any]],
    partial: bool = True,
) -> None:
    """Says on `error` which of the calls it comes from; keeps the results of those that have finished."""
    index = next((index for index, part in enumerate(parts) if part is failed), None)
    if index is not None and index < len(calls):
        call = calls[index]
        noted(error, f"call {index} of {len(parts)}: {described(call.name, call.args, call.kwargs)}")
    if partial and len(parts) > 1:
        set_partial(error, {index: part.result() for index, part in enumerate(parts) if _is_good(part)})
        say_how_many(error, len(parts), "calls")


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
