"""The last message about a call, as its node sends it: how the body ended, and what the client must know with it."""

from __future__ import annotations

from typing import Any

from skyward.node.agent_tables import NodeCall, Slot
from skyward.node.protocol import AgentToClient
from skyward.node.receiver import Message

__all__ = ["Verdict", "end_of", "seconds_of", "stopped"]

Verdict = tuple[str, dict[str, Any], Any]
"""What a runner says at the end of a body: its kind, what goes with it, the buffers of its result."""


def seconds_of(call: NodeCall, metadata: dict[str, Any], now: float) -> float | None:
    """How long the body ran, if it has begun; noted in `metadata`."""
    return None if call.began is None else metadata.setdefault("s", max(0.0, now - call.began))


def stopped(call: NodeCall, verdict: Verdict | None) -> dict[str, Any]:
    """What is told of a call that was stopped, whether or not its body has ended with something else."""
    metadata: dict[str, Any] = {}
    if verdict is not None and "s" in verdict[1]:
        metadata["s"] = verdict[1]["s"]
    if call.why == "timeout":
        metadata |= {"limit": call.about["timeout"], "killed": call.killed}
        if verdict is not None and isinstance(verdict[1].get("stack"), str):
            metadata["stack"] = verdict[1]["stack"]
    return metadata


def end_of(call: NodeCall, slot: Slot | None, kind: str, metadata: dict[str, Any], buffers: Any) -> Message:
    """The message. If the runner is being replaced, it says so: a group may be broken."""
    if kind == "crashed" or (slot is not None and slot.state != "ready" and call.began is not None):
        metadata["replaced"] = True
    if slot is not None and slot.place and call.began is not None:
        metadata["place"] = slot.place
    return AgentToClient.verdict(kind, call.id, metadata, len(buffers or ()))
