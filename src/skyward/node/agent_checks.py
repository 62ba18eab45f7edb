"""What the client says, looked into before an agent acts on it: the metadata of calls. Raises Malformed."""

from __future__ import annotations

from typing import Any

from skyward.node.fields import Check, is_number, is_texts, is_whole
from skyward.node.receiver import Malformed
from skyward.node.status_page import ID_BYTES

__all__ = ["CHECKS"]


def _call(message: list[Any], buffers: list[Any]) -> None:
    _, id, metadata, _ = message
    known = {
        "name": isinstance(metadata.get("name"), str),
        "fn": isinstance(metadata.get("fn"), str),
        "split": is_whole(metadata.get("split")) and metadata["split"] <= len(buffers),
        "attempt": is_whole(metadata.get("attempt")),
        "timeout": metadata.get("timeout") is None or is_number(metadata["timeout"]),
        "streams": is_texts(metadata.get("streams", [])),
        "gang": isinstance(metadata.get("gang", ""), str),
        "keep": isinstance(metadata.get("keep", ""), str),
        "each": isinstance(metadata.get("each", True), bool),
        "place": is_whole(metadata.get("place", 0)),
        "blobs": isinstance(metadata.get("blobs", {}), dict),
    }
    if len(id.encode("utf-8", "surrogatepass")) != ID_BYTES or not all(known.values()):
        raise Malformed(f"a call without its {next((name for name, good in known.items() if not good), 'id')}")


def _blob(message: list[Any], buffers: list[Any]) -> None:
    if len(buffers) != 1:
        raise Malformed(f"{message[0]!r} with {len(buffers)} buffers")


CHECKS: dict[str, Check] = {"call": _call, "blob": _blob}
"""What is looked into, by the kind of the message."""
