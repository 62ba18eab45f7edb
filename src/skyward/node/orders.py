"""Messages by which processes are started, found and ended: to and from fork server, keeper and joiner.

JSON without buffers: a packet (fork server) or a line for each. All are records (`transport/codec.py`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, TypedDict

from skyward.node.settings import AgentOrder
from skyward.transport.codec import Direction, Message, Within

__all__ = [
    "SCARCE",
    "UNANSWERED",
    "AgentToForkServer",
    "ClientToJoiner",
    "ClientToKeeper",
    "ForkServerToAgent",
    "JoinerToClient",
    "KeeperToClient",
    "RunOrder",
    "SchedulerOrder",
    "WorkerOrder",
    "written",
]

SCARCE = 71
"""Status of a runner that could not be started: too many processes, or too little memory."""

UNANSWERED = 4
"""Status of an agent whose fork server does not answer."""

Signed = Annotated[int, Within(-(1 << 63), (1 << 63) - 1)]


class SchedulerOrder(TypedDict):
    """Of a dask cluster."""

    host: str
    directory: str
    identity: dict[str, str]
    """`transport/certificates.py: Identity`."""


class WorkerOrder(SchedulerOrder):
    node: int
    scheduler: str
    """Its address."""
    env: dict[str, str]
    cwd: str
    paths: list[str]


@dataclass(frozen=True)
class RunOrder:
    folder: str
    """The run folder, which the steward makes."""
    program: str
    """An archive of the program's working directory; empty if `cwd` is."""
    socket: str
    """Where it listens for the driver and viewers."""
    argv: list[str]
    payload: str
    """The driver's standard input, in base64."""
    cwd: str
    env: dict[str, str]
    """Of the driver, beside the steward's own."""
    umask: int
    agents: list[dict[str, Any]]
    """For each node `node` and `place`: a socket's path, or host and port."""
    here: list[int]
    """Those of the steward's own keeper."""
    identity: dict[str, Any] | None
    lease: float
    left: float
    """Seconds until the deadline."""
    drain: float
    """Seconds before that at which bodies are told."""
    grace: float
    restarts: int
    go_within: float
    """Seconds to wait for `go`: the submitter may be gone."""
    hold: float
    """Seconds that node 0 stays after the program, unless its files were copied."""
    wanted: dict[str, Any]
    """What a pool must ask for to adopt the machines."""
    placed: dict[str, Any]
    """The machines, as that pool takes them over."""
    head: dict[str, Any]
    results: str = ""
    """The directory to which the run's files are copied at its end, if any."""
    hold_copied: float = 0.0
    """Seconds that node 0 stays when they were."""
    notices: str = ""
    """The function that waits for a notice that this machine is taken away, as `module:name`, if any."""


def written(message: Message) -> bytes:
    return json.dumps(message.encoded()[0]).encode()


class AgentToForkServer(Direction):
    class Spawn(Message):
        """Fork a runner, with five descriptors: its socket, stdout, stderr, environment, status page."""

        name: str
        cwd: str

    class Kill(Message):
        """Send a signal to a runner's group; the answer is `killed`."""

        name: str
        signal: Signed


class ForkServerToAgent(Direction):
    class Forked(Message):
        """The pid is 0 if the runner could not be forked; then `ended` follows."""

        name: str
        pid: int

    class Killed(Message):
        """The signal was sent, if the runner was there."""

        name: str

    class Ended(Message):
        """The runner has ended."""

        name: str
        status: Signed


class ClientToKeeper(Direction):
    class Look(Message):
        """Name the machine's addresses."""

    class Listen(Message):
        """Listen at this address, for probes and for an agent."""

        host: str

    class Probe(Message):
        """Try to reach the other machines."""

        peers: dict[str, tuple[str, int]]
        timeout: float

    class Start(Message):
        """Start the agents of these nodes."""

        nodes: list[AgentOrder]
        own_scratch: bool

    class Run(Message):
        """Start a detached run's steward (`RunOrder`); the answer is `run_held`."""

        order: dict[str, Any]

    class Go(Message):
        """The submitter has let go: start the program. The answer is `run_started`."""

    class DaskScheduler(Message):
        """Start a dask scheduler, in place of any other."""

        scheduler: SchedulerOrder

    class DaskWorker(Message):
        """Start a node's dask worker for this scheduler. No answer."""

        worker: WorkerOrder


class KeeperToClient(Direction):
    class Addresses(Message):
        """The answer to `look`."""

        addresses: list[Any]

    class Listening(Message):
        """The answer to `listen`: the port, or nothing if it cannot."""

        port: int | None

    class Probed(Message):
        """The answer to `probe`: unreachable machines, and why."""

        unreachable: dict[str, str]

    class Agent(Message):
        """An answer to `start` for each node: its agent listens at a path, or an address and port."""

        node: int
        place: list[Any]
        scratch: str

    class AgentDied(Message):
        """An agent has ended and is started again. Only logged."""

        node: int
        code: Signed

    class Over(Message):
        """The time to live is over: the keeper ends everything."""

    class RunHeld(Message):
        """The steward's answer to `run`: all agents know it."""

    class RunRefused(Message):
        """The steward's answer to `run`: why it cannot hold the run."""

        reason: str

    class RunStarted(Message):
        """The steward's answer to `go`: the program runs."""

    class Scheduler(Message):
        """The answer to `dask_scheduler`, from its process."""

        address: str

    class SchedulerFailed(Message):
        """The answer to `dask_scheduler`, from its process: it cannot run."""

        reason: str

    class SchedulerDied(Message):
        """The dask scheduler has ended."""

        code: Signed


class ClientToJoiner(Direction):
    class Run(Message):
        """Run a program, connected with the client over TLS by this id; it may outlive that connection."""

        id: str
        argv: list[str]
        env: dict[str, str]
        keep: bool

    class Connect(Message):
        """Connect an address with the client, by this id, without TLS of its own."""

        id: str
        host: str
        port: int

    class AtEnd(Message):
        """Run this when the place is over, in any way."""

        argv: list[str]

    class Detach(Message):
        """End with what runs here, or after so many seconds, and no more when we are gone. The answer is `detached`.

        With `dials`, whoever looks at the run listens where we did.
        """

        left: float
        dials: bool

    class Notice(Message):
        """The place will be taken away: tell its node."""

        seconds: float

    class End(Message):
        """End everything."""

    class Ping(Message):
        """Answer with `pong`."""


class JoinerToClient(Direction):
    class Failed(Message):
        """What was ordered with this id failed."""

        id: str
        reason: str

    class Leaving(Message):
        """The machine ends everything, for good."""

        reason: str

    class Detached(Message):
        """The answer to `detach`."""

    class Pong(Message):
        """The machine is there."""
