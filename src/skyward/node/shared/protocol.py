"""The messages about shared collections, and how keys are written in them.

Keys are texts: the same text if and only if Python calls them equal. Many keys travel as one buffer, one per line.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from operator import index
from typing import Annotated, Any

from skyward.errors import (
    InvalidArgument,
    SharedTooLarge,
)
from skyward.node.protocol import Share
from skyward.transport.codec import Buffers, Direction, Message, Within

__all__ = [
    "COUNTER_END",
    "AgentToHead",
    "AskerToServer",
    "HeadToAgent",
    "ServerToAsker",
    "joined_keys",
    "read_key",
    "split_keys",
    "written_key",
]

_LONGEST = 1 << 20  # characters of its text
_DEEPEST = 20  # tuples within tuples; the parser that reads them takes some more
_MOST_BITS = 1 << 13  # Python turns numbers of up to 4300 digits into text


def written_key(key: object) -> str:
    text = repr(key if type(key) is str else _plain(key, key))
    if len(text) > _LONGEST:
        raise SharedTooLarge(
            f"a key of a shared collection takes {len(text):,} characters; keys have up to {_LONGEST:,}. Use something "
            "short that stands for it, such as its hash."
        )
    return text


def read_key(text: str) -> Any:
    if text[:1] in ("'", '"') and "\\" not in text:
        return text[1:-1]  # a plain text, as most keys are
    import ast  # not needed by those who only look things up

    return ast.literal_eval(text)


def joined_keys(texts: Iterable[str]) -> bytes:
    return "\n".join(texts).encode("utf-8", "surrogatepass")


def split_keys(data: Any) -> list[str]:
    return str(data, "utf-8", "surrogatepass").split("\n") if len(data) else []


def _plain(key: Any, whole: object, depth: int = 0) -> object:
    if key is None:
        return None
    if isinstance(key, str):
        return str.__str__(key)
    if isinstance(key, bytes):
        return bytes(key)
    if isinstance(key, tuple):
        if depth == _DEEPEST:
            raise InvalidArgument(f"a key of a shared collection has at most {_DEEPEST} tuples within each other.")
        return tuple(_plain(part, whole, depth + 1) for part in key)  # pyright: ignore[reportUnknownVariableType] - any parts
    if isinstance(key, float):
        if not math.isfinite(key):
            raise InvalidArgument(
                f"{whole!r} cannot be a key of a shared collection: {key} is not a number to look up."
            )
        return int(key) if key.is_integer() else float(key)
    try:
        number = index(key)  # whole numbers of numpy, too
    except TypeError:
        raise InvalidArgument(
            f"{whole!r} cannot be a key of a shared collection: a {type(key).__name__} is not a text, number, bytes, "
            "None or tuple of these. Use its name, or something else that stands for it."
        ) from None
    if number.bit_length() > _MOST_BITS:
        raise InvalidArgument(
            f"a whole number of {number.bit_length():,} bits cannot be a key: keys have up to {_MOST_BITS:,}."
        )
    return int(number)


# The messages about shared collections: between a process that uses them and the server on node 0.
#
# A runner of a local pool has a connection of its own to the server. All others send these messages inside `share`
# messages of links that exist (`node/protocol.py`), or over the link of their agent to that of node 0.


LARGEST = 16 << 20
COUNTER_END = 1 << 63


Limit = Annotated[float | None, Within(-math.inf, math.inf)]


class AskerToServer(Direction):
    class Open(Message):
        """The first message: what errors call the process, and its rank (none: the client)."""

        label: str
        rank: int | None

    class Ask(Message):
        """Do this with the collection of this name. `epoch` is that of the last answer. Operations are methods in
        `node/shared/state.py`. Buffers: values, pickled.
        """

        id: int
        epoch: str
        kind: str
        name: str
        operation: str
        arguments: list[Any]
        timeout: Limit
        buffers: Buffers

    class Withdraw(Message):
        """Stop waiting; what was answered stays answered."""

        id: int

    class Gone(Message):
        """The process has ended, by its agent's word."""

        why: str


class ServerToAsker(Direction):
    class Answer(Message):
        """The answer to `ask`. `code` is empty, or says what went wrong; then the result is a text, or a list that
        begins with one. Buffers: values, pickled.
        """

        id: int
        epoch: str
        code: str
        result: Any
        buffers: Buffers


class AgentToHead(Direction):
    """From the sending node's runners to the server."""

    Share = Share


class HeadToAgent(Direction):
    """From the server to the receiving node's runners."""

    Share = Share
