"""What an agent says of its node in its greeting, and what it needs before it starts runners."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Annotated, Any, NotRequired, TypedDict, cast

from skyward.transport.codec import Within, fits
from skyward.transport.frames import Malformed

__all__ = [
    "MARK",
    "AgentOrder",
    "FoundGpu",
    "Greeting",
    "LogSettings",
    "NodeSettings",
    "Refused",
    "RunnerSettings",
    "SetupSettings",
    "Welcome",
    "checked_greeting",
    "in_words",
    "system",
]

Limit = Annotated[float, Within(0, math.inf)]


class Refused(ConnectionError):
    """Asking again does not help."""


class FoundGpu(TypedDict):
    uuid: str
    name: str
    index: NotRequired[int]
    memory: NotRequired[int]
    vendor: NotRequired[str]
    card: NotRequired[str]


class AgentOrder(TypedDict):
    """What a node's agent is started with."""

    node: int
    local: bool
    host: str
    session: str
    identity: dict[str, str] | None
    """Of `transport/certificates.py: Identity`; None on the client's computer."""
    notices: str | None
    """The function that waits for a notice that this machine is taken away, as `module:name`."""


class Greeting(TypedDict, total=False):
    """What an agent says of its node."""

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


class Welcome(Greeting):
    """An agent's answer to a client's greeting; to that of another agent, without what is of its node."""

    incarnation: str
    session: str
    received: int
    unread: NotRequired[int]
    """How often in a row the next frame could not be read."""


MARK = "\x1eskyward-"
"""Begins a line of stderr that is a record, a warning or a report (`node/logs.py`)."""


class LogSettings(TypedDict, total=False):
    levels: dict[str, Annotated[int, Within(-(1 << 31), 1 << 31)]]
    """Of loggers, by name, as on the client."""
    records: bool
    """Whether the client's loggers have handlers."""
    warnings: list[Any]
    """Filters (`node/logs.py: Filter`)."""


class RunnerSettings(TypedDict):
    node: int
    threads: int
    paths: list[str]
    blobs: str
    max_result: Limit
    stall_timeout: NotRequired[Limit | None]
    shared: NotRequired[str | None]
    """The server's socket, if it can be reached without the agent."""
    log: NotRequired[LogSettings]
    mark: NotRequired[str]
    """The agent's, in lines that say to which call output belongs."""


class NodeSettings(TypedDict):
    shared: bool
    """Whether client and nodes have one file system, as on this computer."""
    info: str
    env: dict[str, str]
    cwd: str
    grace: Limit
    ready_within: Limit
    threads: int
    processes: int
    gpus: list[str]
    places: list[dict[str, str]]
    """For each local rank, the variables that choose its GPUs."""
    runner: RunnerSettings
    head: NotRequired[tuple[str, int] | None]
    """Where node 0's agent is, for shared collections; None if unreachable."""


class SetupSettings(NodeSettings):
    generation: int
    output: int
    """How many bytes of output may be under way."""


def checked_greeting(welcome: Any, session: str) -> Welcome:
    """The answer to this session's greeting, if it is one."""
    known: dict[str, Any] = cast("dict[str, Any]", welcome) if isinstance(welcome, dict) else {}
    if "refused" in known:
        raise Refused(f"the agent there refuses the connection: {str(known['refused'])[:300]}")
    numbers = known.get("received"), known.get("unread", 0)
    if not isinstance(known.get("incarnation"), str) or any(type(number) is not int for number in numbers):
        raise Malformed("what answers there is not one of our agents")
    if known.get("session") != session:
        raise Refused("the agent there answered for another session than the one in the greeting")
    fits(Greeting, known)
    if any(gpu.keys() - FoundGpu.__annotations__ for gpu in known.get("gpus", ())):
        raise Malformed("a greeting with a GPU that has more than a GPU has")
    return cast("Welcome", known)


def system() -> str:
    about = os.uname()
    return f"{about.sysname} {about.release} on {about.machine}"


def in_words(greeting: Mapping[str, Any]) -> dict[str, str]:
    return {
        "host": greeting.get("hostname", ""),
        "Python": ".".join(map(str, greeting.get("python", ()))),
        "system": greeting.get("system", ""),
        "CPUs": str(greeting.get("cpus", "")),
        "GPUs": ", ".join(gpu["name"] for gpu in greeting.get("gpus", ())) or "none",
    }
