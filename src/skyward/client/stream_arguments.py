"""Streams an iterator argument to the runner that wants it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, cast

from skyward.client.call import Call
from skyward.node.protocol import InputEnd, InputItems
from skyward.transport import exceptions
from skyward.transport.blobs import stowed
from skyward.transport.codec import Message
from skyward.transport.frames import nbytes
from skyward.transport.payload import Packer
from skyward.transport.streams import Producer

__all__ = ["feed"]

Post = Callable[[list[Message]], None]


def feed(call: Call, key: str, source: Iterable[Any], post: Post, directory: str | None = None) -> Producer:
    """Reads `source` in its own thread and posts items as there is credit. For a process of this computer, large parts
    are left in `directory`.
    """

    def send(batch: list[list[Any]]) -> None:
        pieces = [piece for item in batch for piece in item]
        post([InputItems(call.id, key, [len(item) for item in batch], pieces)])

    def packed(packer: Packer, item: Any) -> tuple[list[bytes], int]:
        head, buffers = packer.pack(item, f"an item of argument {key} of {call.name}")
        pieces: list[Any] = [head, *buffers]
        size = sum(map(nbytes, pieces))
        if directory is not None:
            pieces = stowed(pieces, directory)
        return list(map(bytes, pieces)), size

    def run() -> None:
        packer = Packer()
        error: BaseException | None = None
        wanted = True
        try:
            for item in source:
                small = packer.pack_small(item)
                pieces, size = ([small], len(small)) if small is not None else packed(packer, item)
                if not producer.put(pieces, size):
                    wanted = False
                    break
        except BaseException as exc:  # raised in the body, where the iterator is used
            error = exc
        try:
            producer.finish()  # what came before the error goes first
        except BaseException as exc:  # an item could not be sent: the body must not take what arrived for the whole
            error = error or exc
        if error is None and not wanted:
            return
        described, data = cast("tuple[Any, bytes]", ({}, b"") if error is None else exceptions.capture(error))
        post([InputEnd(call.id, key, described, [data])])

    producer = Producer(send)
    threading.Thread(target=run, name="skyward-feed", daemon=True).start()
    return producer
