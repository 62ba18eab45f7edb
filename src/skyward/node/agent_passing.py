"""What the client says that an agent passes on to its runners, or to its blobs: streams, objects that stay or go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from skyward.node.agent_calls import AgentCalls
from skyward.node.blob_cache import BlobCache
from skyward.node.protocol import AgentToRunner
from skyward.node.receiver import Message

__all__ = ["PassedOn"]


class PassedOn:
    """Handles these messages; `do` carries out what `AgentCalls` says."""

    def __init__(
        self,
        calls: AgentCalls,
        blobs: BlobCache,
        send_all: Callable[[Message], None],
        do: Callable[[list[Any]], None],
        tell: Callable[[Message], None],
    ) -> None:
        self._calls, self._blobs, self._send_all, self._do, self._tell = calls, blobs, send_all, do, tell

    def _from_client_grant(self, id: str, count: int) -> None:
        self._do(self._calls.stream(id, AgentToRunner.grant(id, count), []))

    def _from_client_close(self, id: str) -> None:
        self._do(self._calls.stream(id, AgentToRunner.close(id), []))

    def _from_client_items(self, id: str, argument: str, counts: list[int], buffers: list[Any]) -> None:
        self._do(self._calls.stream(id, AgentToRunner.items(id, argument, counts, len(buffers)), buffers))

    def _from_client_end(self, id: str, argument: str, error: dict[str, Any], buffers: list[Any]) -> None:
        self._do(self._calls.stream(id, AgentToRunner.end(id, argument, error, len(buffers)), buffers))

    def _from_client_bring(self, request: int, key: str) -> None:
        self._blobs.bring(request, key, self._tell)

    def _from_client_forget(self, keys: list[str]) -> None:
        self._blobs.forget(keys)
        self._send_all(AgentToRunner.forget(keys))
