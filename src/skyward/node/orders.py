"""Every message by which processes are started, found and ended: to and from the fork server and the keeper.

    agent  ──AgentToForkServer─► fork server                         a packet of JSON for each message
           ◄─ForkServerToAgent─
    client ──ClientToKeeper─► keeper                                 a line of JSON for each message
           ◄─KeeperToClient─
    client ──ClientToJoiner─► joiner                                 the same; the joiner has a copy of no file of ours
           ◄─JoinerToClient─

They have the form of those in `node/protocol.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from skyward.node.receiver import Direction, Message

__all__ = [
    "SCARCE",
    "UNANSWERED",
    "AgentToForkServer",
    "ClientToJoiner",
    "ClientToKeeper",
    "ForkServerToAgent",
    "JoinerToClient",
    "KeeperToClient",
]

SCARCE = 71
"""The status of a runner that could not be started since the machine has too many processes, or too little memory."""

UNANSWERED = 4
"""The status of an agent that ends since the fork server does not answer."""


class AgentToForkServer(Direction):
    sender = "agent"

    @staticmethod
    def spawn(name: str, cwd: str) -> Message:
        """Fork a runner, with five file descriptors: its socket, stdout, stderr, environment, and status page."""
        return ["spawn", name, cwd, 0]

    @staticmethod
    def kill(name: str, signal: int) -> Message:
        """Send a signal to a runner's process group; the answer is `killed`."""
        return ["kill", name, signal, 0]


class ForkServerToAgent(Direction):
    sender = "fork_server"

    @staticmethod
    def forked(name: str, pid: int) -> Message:
        """The runner was forked; if it could not be, the pid is 0, and `ended` follows."""
        return ["forked", name, pid, 0]

    @staticmethod
    def killed(name: str) -> Message:
        """The signal was sent, if the runner was still there."""
        return ["killed", name, 0]

    @staticmethod
    def ended(name: str, status: int) -> Message:
        """The runner has ended."""
        return ["ended", name, status, 0]


class ClientToKeeper(Direction):
    sender = "client"

    @staticmethod
    def look() -> Message:
        """Name the machine's addresses."""
        return ["look", 0]

    @staticmethod
    def listen(host: str) -> Message:
        """Listen at this address, for probes and for an agent."""
        return ["listen", host, 0]

    @staticmethod
    def probe(peers: dict[str, tuple[str, int]], timeout: float) -> Message:
        """Try to reach the other machines."""
        return ["probe", peers, timeout, 0]

    @staticmethod
    def start(nodes: Sequence[Mapping[str, Any]], own_scratch: bool) -> Message:
        """Start the agents of these nodes."""
        return ["start", nodes, own_scratch, 0]

    @staticmethod
    def dask_scheduler(scheduler: Mapping[str, Any]) -> Message:
        """Start a dask scheduler, in place of any other."""
        return ["dask_scheduler", scheduler, 0]

    @staticmethod
    def dask_worker(worker: Mapping[str, Any]) -> Message:
        """Start a node's dask worker, for the scheduler that is named. There is no answer."""
        return ["dask_worker", worker, 0]


class KeeperToClient(Direction):
    sender = "keeper"

    @staticmethod
    def addresses(addresses: list[Any]) -> Message:
        """The answer to `look`."""
        return ["addresses", addresses, 0]

    @staticmethod
    def listening(port: int | None) -> Message:
        """The answer to `listen`: the port, or nothing if it cannot listen there."""
        return ["listening", port, 0]

    @staticmethod
    def probed(unreachable: dict[str, str]) -> Message:
        """The answer to `probe`: which machines cannot be reached, and why."""
        return ["probed", unreachable, 0]

    @staticmethod
    def agent(node: int, place: list[Any], scratch: str) -> Message:
        """An answer to `start`, for each node: its agent listens at a path, or at an address and port."""
        return ["agent", node, place, scratch, 0]

    @staticmethod
    def agent_died(node: int, code: int) -> Message:
        """An agent has ended and is started again. Only logged."""
        return ["agent_died", node, code, 0]

    @staticmethod
    def over() -> Message:
        """The pool's time to live is over: the keeper ends everything."""
        return ["over", 0]

    @staticmethod
    def scheduler(address: str) -> Message:
        """The answer to `dask_scheduler`, written by its process: it runs."""
        return ["scheduler", address, 0]

    @staticmethod
    def scheduler_failed(reason: str) -> Message:
        """The answer to `dask_scheduler`, written by its process: it cannot run."""
        return ["scheduler_failed", reason, 0]

    @staticmethod
    def scheduler_died(code: int) -> Message:
        """The dask scheduler has ended."""
        return ["scheduler_died", code, 0]


class ClientToJoiner(Direction):
    sender = "client"

    @staticmethod
    def run(id: str, argv: list[str], env: dict[str, str], keep: bool) -> Message:
        """Run a program, and connect it with the client over TLS, with this id; it may outlive that connection."""
        return ["run", id, argv, env, keep, 0]

    @staticmethod
    def connect(id: str, host: str, port: int) -> Message:
        """Connect an address with the client, with this id and without TLS of its own."""
        return ["connect", id, host, port, 0]

    @staticmethod
    def at_end(argv: list[str]) -> Message:
        """Run this when the place is over, however that comes."""
        return ["at_end", argv, 0]

    @staticmethod
    def notice(seconds: float) -> Message:
        """The place will be taken away: tell its node."""
        return ["notice", seconds, 0]

    @staticmethod
    def end() -> Message:
        """End everything."""
        return ["end", 0]

    @staticmethod
    def ping() -> Message:
        """Answer with `pong`."""
        return ["ping", 0]


class JoinerToClient(Direction):
    sender = "joiner"

    @staticmethod
    def failed(id: str, reason: str) -> Message:
        """What was ordered with this id could not be done."""
        return ["failed", id, reason, 0]

    @staticmethod
    def leaving(reason: str) -> Message:
        """The machine ends everything, and will not come back."""
        return ["leaving", reason, 0]

    @staticmethod
    def pong() -> Message:
        """The machine is there."""
        return ["pong", 0]
