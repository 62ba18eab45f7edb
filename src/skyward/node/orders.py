"""Every message by which processes are started, found and ended: to and from fork server, keeper and joiner.

JSON without buffers, in a packet (fork server) or a line for each message. Each is a record (`transport/codec.py`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any

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
    "written",
]

SCARCE = 71
"""The status of a runner that could not be started: too many processes, or too little memory."""

UNANSWERED = 4
"""The status of an agent that ends because the fork server does not answer."""

Signed = Annotated[int, Within(-(1 << 63), (1 << 63) - 1)]


@dataclass(frozen=True)
class RunOrder:
    """What the steward of a detached run is told."""

    folder: str
    """The run folder, which the steward makes."""
    program: str
    """An archive with the program's working files, which are its working directory then; empty if `cwd` is."""
    socket: str
    """Where it listens for the driver and for viewers."""
    argv: list[str]
    payload: str
    """What the driver reads on its standard input, in base64; empty if it has none."""
    cwd: str
    env: dict[str, str]
    """What the driver has in its environment beside that of the steward."""
    umask: int
    agents: list[dict[str, Any]]
    """Of each node `node` and `place`: the path of a socket, or host and port."""
    here: list[int]
    """The nodes of the steward's own keeper."""
    identity: dict[str, Any] | None
    """The client's, for TLS; None on this computer."""
    lease: float
    left: float
    """Seconds until the deadline."""
    drain: float
    """How many seconds before that bodies are told."""
    grace: float
    restarts: int
    go_within: float
    """Seconds to wait for the word to begin: whoever submits the run may be gone."""
    hold: float
    """Seconds that node 0 stays after the end of the program."""
    wanted: dict[str, Any]
    """What the pool must ask for that adopts the machines."""
    placed: dict[str, Any]
    """The machines, as the pool that adopts them takes them over."""
    head: dict[str, Any]
    """The first line of the journal, for viewers."""


def written(message: Message) -> bytes:
    """A message as JSON."""
    return json.dumps(message.encoded()[0]).encode()


class AgentToForkServer(Direction):
    class Spawn(Message):
        """Fork a runner, with five file descriptors: its socket, stdout, stderr, environment, and status page."""

        name: str
        cwd: str

    class Kill(Message):
        """Send a signal to a runner's process group; the answer is `killed`."""

        name: str
        signal: Signed


class ForkServerToAgent(Direction):
    class Forked(Message):
        """The runner was forked; if it could not be, the pid is 0, and `ended` follows."""

        name: str
        pid: int

    class Killed(Message):
        """The signal was sent, if the runner was still there."""

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

        nodes: list[dict[str, Any]]
        own_scratch: bool

    class Run(Message):
        """Start the steward of a detached run with this order (`RunOrder`); the answer is `run_held`."""

        order: dict[str, Any]

    class Go(Message):
        """Whoever submitted the run has let go of it: start its program. The answer is `run_started`."""

    class DaskScheduler(Message):
        """Start a dask scheduler, in place of any other."""

        scheduler: dict[str, Any]

    class DaskWorker(Message):
        """Start a node's dask worker, for the scheduler that is named. There is no answer."""

        worker: dict[str, Any]


class KeeperToClient(Direction):
    class Addresses(Message):
        """The answer to `look`."""

        addresses: list[Any]

    class Listening(Message):
        """The answer to `listen`: the port, or nothing if it cannot listen there."""

        port: int | None

    class Probed(Message):
        """The answer to `probe`: which machines cannot be reached, and why."""

        unreachable: dict[str, str]

    class Agent(Message):
        """An answer to `start`, for each node: its agent listens at a path, or at an address and port."""

        node: int
        place: list[Any]
        scratch: str

    class AgentDied(Message):
        """An agent has ended and is started again. Only logged."""

        node: int
        code: Signed

    class Over(Message):
        """The pool's time to live is over: the keeper ends everything."""

    class RunHeld(Message):
        """The answer to `run`, written by the steward: all agents have heard of it."""

    class RunRefused(Message):
        """The answer to `run`, written by the steward: why it cannot hold the run."""

        reason: str

    class RunStarted(Message):
        """The answer to `go`, written by the steward: the program runs."""

    class Scheduler(Message):
        """The answer to `dask_scheduler`, written by its process: it runs."""

        address: str

    class SchedulerFailed(Message):
        """The answer to `dask_scheduler`, written by its process: it cannot run."""

        reason: str

    class SchedulerDied(Message):
        """The dask scheduler has ended."""

        code: Signed


class ClientToJoiner(Direction):
    class Run(Message):
        """Run a program, and connect it with the client over TLS, with this id; it may outlive that connection."""

        id: str
        argv: list[str]
        env: dict[str, str]
        keep: bool

    class Connect(Message):
        """Connect an address with the client, with this id and without TLS of its own."""

        id: str
        host: str
        port: int

    class AtEnd(Message):
        """Run this when the place is over, however that comes."""

        argv: list[str]

    class Notice(Message):
        """The place will be taken away: tell its node."""

        seconds: float

    class End(Message):
        """End everything."""

    class Ping(Message):
        """Answer with `pong`."""


class JoinerToClient(Direction):
    class Failed(Message):
        """What was ordered with this id could not be done."""

        id: str
        reason: str

    class Leaving(Message):
        """The machine ends everything, and will not come back."""

        reason: str

    class Pong(Message):
        """The machine is there."""
