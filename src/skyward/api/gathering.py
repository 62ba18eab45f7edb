"""`sky.gather`: many calls as one, to be sent together; their results as a tuple, or one by one."""

from __future__ import annotations

from typing import Any, Literal, TypeVar, Unpack, overload

from skyward.api.compute import (
    GroupOptions,
    PendingCompute,
    PendingComputeGroup,
    PendingStream,
    checked_member,
    resume_options,
)
from skyward.api.usage_errors import FOR_GROUPS, check_switches, corrects_call

__all__ = ["gather"]

T = TypeVar("T")
A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
D = TypeVar("D")

No = Literal[False]
Yes = Literal[True]


@overload
def gather(
    a: PendingCompute[A], /, *, stream: No = ..., return_exceptions: No = ..., **more: Unpack[GroupOptions]
) -> PendingComputeGroup[A]: ...
@overload
def gather(
    a: PendingCompute[A],
    b: PendingCompute[B],
    /,
    *,
    stream: No = ...,
    return_exceptions: No = ...,
    **more: Unpack[GroupOptions],
) -> PendingComputeGroup[A, B]: ...
@overload
def gather(
    a: PendingCompute[A],
    b: PendingCompute[B],
    c: PendingCompute[C],
    /,
    *,
    stream: No = ...,
    return_exceptions: No = ...,
    **more: Unpack[GroupOptions],
) -> PendingComputeGroup[A, B, C]: ...
@overload
def gather(
    a: PendingCompute[A],
    b: PendingCompute[B],
    c: PendingCompute[C],
    d: PendingCompute[D],
    /,
    *,
    stream: No = ...,
    return_exceptions: No = ...,
    **more: Unpack[GroupOptions],
) -> PendingComputeGroup[A, B, C, D]: ...
@overload
def gather(
    *calls: PendingCompute[T],
    stream: No = ...,
    ordered: bool = ...,
    return_exceptions: No = ...,
    **more: Unpack[GroupOptions],
) -> PendingComputeGroup[*tuple[T, ...]]: ...
@overload
def gather(
    *calls: PendingCompute[T],
    stream: No = ...,
    ordered: bool = ...,
    return_exceptions: Yes,
    **more: Unpack[GroupOptions],
) -> PendingComputeGroup[*tuple[T | BaseException, ...]]: ...
@overload
def gather(
    *calls: PendingCompute[T],
    stream: Yes,
    ordered: bool = ...,
    return_exceptions: No = ...,
    **more: Unpack[GroupOptions],
) -> PendingStream[T]: ...
@overload
def gather(
    *calls: PendingCompute[T], stream: Yes, ordered: bool = ..., return_exceptions: Yes, **more: Unpack[GroupOptions]
) -> PendingStream[T | BaseException]: ...
@corrects_call("sky.gather", FOR_GROUPS)
def gather(
    *calls: PendingCompute[Any],
    stream: bool = False,
    ordered: bool = True,
    return_exceptions: bool = False,
    progress: bool = True,
    resume: str | None = None,
    changed: Literal["keep", "redo"] | None = None,
    resume_with: object = None,
) -> Any:
    """Puts calls together, to be sent with `>> pool` or `> pool`; the result is a tuple in their order.

    `stream`: results come one by one instead, as an iterator; with `ordered=False`, as they are ready.
    `return_exceptions`: a failed call has its exception in its place, and the others continue. Otherwise (the default)
    the first failure is raised and the others are stopped; what had finished is in the `partial` of the exception.
    `progress`: whether the live view shows how many are done, how many a second, and the time left (the default).
    `resume`: a name under which results are kept as they finish; given again, only what is missing is computed.
    `changed`: what is done with kept results of code that has changed since: "keep" or "redo" them. Default: an error.
    `resume_with`: what else results depend on, such as the version of a file that bodies read. Default: nothing.
    """
    check_switches(stream=stream, ordered=ordered, return_exceptions=return_exceptions, progress=progress)
    kept = resume_options(resume, changed, resume_with)
    items = tuple(checked_member(c) for c in calls)
    if stream:
        return PendingStream[Any](items, ordered, return_exceptions, progress, kept)
    return PendingComputeGroup[Any](items, None, return_exceptions, progress, kept)
