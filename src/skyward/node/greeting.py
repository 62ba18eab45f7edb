"""What an agent says when a client, or the agent of another node, connects to it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any, NotRequired, TypedDict, cast

from skyward.transport.codec import Within, fits
from skyward.transport.frames import Malformed

__all__ = ["FoundGpu", "Greeting", "Refused", "checked_greeting", "in_words", "system"]


class Refused(ConnectionError):
    """An agent does not take this connection, and says why; asking again does not help."""


class FoundGpu(TypedDict):
    """The fields of `api/hardware.py: Gpu`."""

    uuid: str
    name: str
    index: NotRequired[int]
    memory: NotRequired[int]
    vendor: NotRequired[str]
    card: NotRequired[str]


class Greeting(TypedDict, total=False):
    """To another agent, nothing but the first four."""

    incarnation: str
    """Which agent it is: one that was started again has another."""
    session: str
    received: int
    """The number of the last frame that has come."""
    unread: int
    """How often in a row the next frame was one that cannot be read."""
    node: int
    python: list[int]
    path: list[str]
    hostname: str
    system: str
    pid: int
    accelerators: int
    gpus: list[FoundGpu]
    cards: int
    others: dict[str, Any]
    problem: str
    gpu_names: list[str]
    gpu_variable: str
    cpus: Annotated[int, Within(1, 1 << 31)]


def checked_greeting(welcome: Any, session: str) -> dict[str, Any]:
    """An agent's answer to the greeting of this session, if it is one."""
    known: dict[str, Any] = cast("dict[str, Any]", welcome) if isinstance(welcome, dict) else {}
    if "refused" in known:
        raise Refused(f"the agent there refuses the connection: {str(known['refused'])[:300]}")
    if not isinstance(known.get("incarnation"), str) or type(known.get("received")) is not int:
        raise Malformed("what answers there is no agent of ours")
    if known.get("session") != session:
        raise Refused("the agent there answers to another session than the one that it was greeted with")
    fits(Greeting, known)
    if any(gpu.keys() - FoundGpu.__annotations__ for gpu in known.get("gpus", ())):
        raise Malformed("a greeting with a GPU that has more than a GPU has")
    return known


def system() -> str:
    """Operating system and processor of this computer."""
    about = os.uname()
    return f"{about.sysname} {about.release} on {about.machine}"


def in_words(greeting: Mapping[str, Any]) -> dict[str, str]:
    """What a machine is like, to be compared with another one."""
    return {
        "host": greeting.get("hostname", ""),
        "Python": ".".join(map(str, greeting.get("python", ()))),
        "system": greeting.get("system", ""),
        "CPUs": str(greeting.get("cpus", "")),
        "GPUs": ", ".join(gpu["name"] for gpu in greeting.get("gpus", ())) or "none",
    }
