"""Values of shared collections as bytes: pickled like arguments and results, in one piece."""

from __future__ import annotations

import pickle
from typing import Any

from skyward.transport.payload import Packer, unpack

__all__ = ["pack_value", "unpack_value"]

_PLAIN = frozenset({int, float, str, bool, type(None)})
_BUFFERS = b"B"  # what a pickle does not begin with


def pack_value(packer: Packer, value: object, what: str) -> bytes:
    """Bytes for a value, called `what` in errors."""
    if type(value) in _PLAIN:
        return pickle.dumps(value, 5)
    head, buffers = packer.pack(value, what)
    if not buffers:
        return head
    return _BUFFERS + pickle.dumps((head, [bytearray(buffer) for buffer in buffers]), 5)


def unpack_value(data: Any, *, keep_classes: bool = False) -> Any:
    """The value again; arrays can be written to."""
    if data[:1] != _BUFFERS:
        return unpack(data, (), keep_classes=keep_classes)
    head, buffers = pickle.loads(memoryview(data)[1:])
    return unpack(head, buffers, keep_classes=keep_classes)
