"""What the client says that an agent only passes on to its runners: items of streams, objects that may go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from skyward.node.agent_calls import AgentCalls
from skyward.node.protocol import AgentToRunner
from skyward.node.receiver import Message

__all__ = ["PassedOn"]


class PassedOn:
    """Handles these messages; `do` carries out what `AgentCalls` says."""

    def __init__(self, calls: AgentCalls, send_all: Callable[[Message], None], do: Callable[[list[Any]], None]) -> None:
        self._calls, self._send_all, self._do = calls, send_all, do

    def _from_client_grant(self, id: str, count: int) -> None:
        self._do(self._calls.stream(id, AgentToRunner.grant(id, count), []))

    def _from_client_close(self, id: str) -> None:
        self._do(self._calls.stream(id, AgentToRunner.close(id), []))

    def _from_client_items(self, id: str, argument: str, counts: list[int], buffers: list[Any]) -> None:
        self._do(self._calls.stream(id, AgentToRunner.items(id, argument, counts, len(buffers)), buffers))

    def _from_client_end(self, id: str, argument: str, error: dict[str, Any], buffers: list[Any]) -> None:
        self._do(self._calls.stream(id, AgentToRunner.end(id, argument, error, len(buffers)), buffers))

    def _from_client_forget(self, keys: list[str]) -> None:
        self._send_all(AgentToRunner.forget(keys))
