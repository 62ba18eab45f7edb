"""Checks of options that several functions have in common."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, cast

from skyward.api.brief import brief
from skyward.errors import InvalidArgument

__all__ = ["check_pairs", "check_path", "check_port", "check_switches"]


def check_switches(**given: object) -> None:
    for name, value in given.items():
        if not isinstance(value, bool):
            raise InvalidArgument(f"{name}={brief(value)}: expected True or False.")


def check_pairs(name: str, given: Any, example: str) -> list[tuple[Any, Any]]:
    pairs: Any = cast(Any, given).items() if isinstance(given, Mapping) else given
    try:
        return [(key, value) for key, value in pairs]
    except (TypeError, ValueError):
        raise InvalidArgument(
            f"{name}={brief(cast(object, given))}: expected a dictionary, {name}={example}."
        ) from None


def check_port(port: object) -> None:
    if type(port) is not int or not 0 <= port <= 65535:
        raise InvalidArgument(f"port={port!r} is not a port. Give a number from 1 to 65535, or 0 for one that is free.")


def check_path(what: str, value: object, example: str) -> str:
    if isinstance(value, str | os.PathLike):
        text = os.fspath(cast("str | os.PathLike[str]", value))
        if isinstance(text, str):
            return text
    several = " Call it for each of them." if isinstance(value, list | tuple | set) else ""
    raise InvalidArgument(
        f"{what}={brief(cast(object, value))}: expected the path of a file or folder, as a text or a pathlib.Path. "
        f"Write {example}.{several}"
    )
