"""Checks the form of what a node sends before anything acts on it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

__all__ = ["checked_greeting", "messages_of"]


def messages_of(messages: Any, buffers: list[Any]) -> Iterator[tuple[list[Any], list[Any]]]:
    """The messages of a frame, each with its buffers; raises ValueError if they are none of ours."""
    if not isinstance(messages, list):
        raise ValueError("a frame without a list of messages")
    at = 0
    for message in cast("list[Any]", messages):
        if not isinstance(message, list) or len(cast("list[Any]", message)) < 2:
            raise ValueError("a message that is no list of a kind and its parts")
        kind, count = cast("str", message[0]), cast("int", message[-1])
        if not isinstance(kind, str) or type(count) is not int or not 0 <= count <= len(buffers) - at:
            raise ValueError("a message without its kind or its number of buffers")
        yield cast("list[Any]", message), buffers[at : at + count]
        at += count


def checked_greeting(welcome: Any) -> dict[str, Any]:
    """An agent's greeting, if it is one."""
    known: dict[str, Any] = cast("dict[str, Any]", welcome) if isinstance(welcome, dict) else {}
    if not isinstance(known.get("incarnation"), str) or type(known.get("received")) is not int:
        raise ValueError("what answers there is no agent of ours")
    return known
