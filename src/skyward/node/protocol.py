"""Every message between client, agent and runner: who sends it to whom, its fields, and what it means.

    client ──ClientToAgent──► agent ──AgentToRunner──► runner        frames of messages (transport/frames.py)
           ◄─AgentToClient──        ◄─RunnerToAgent──

The messages by which processes are started and ended are in `node/orders.py`.

A class here is one direction of a link, and each of its functions makes one kind of message, ready to be sent:
`[kind, *fields, number of buffers]`. The kind is the function's name. Buffers are bytes beside the JSON; a kind has
them if its function has the parameter `buffers`. The receiver has one method for each kind (`node/receiver.py`).

Three more exchanges are not of this form:

- Whoever connects to an agent says one JSON object first (`ClientLink`, `Connection`, `BlobCache`).
- The nodes of a group meet before a framework joins them (`plugins/_ranks.py`).
- The watchdog runs without this package, and reads lines on its standard input (`machines/watchdog.py`).
"""

from __future__ import annotations

from typing import Any

from skyward.node.receiver import Direction, Message

# fmt: off
__all__ = [
    "VERDICTS", "AgentToClient", "AgentToRunner", "ClientToAgent", "RunnerToAgent", "output_cost",
]
# fmt: on

VERDICTS = {
    "done": "The body has returned.",
    "error": "The body has raised.",
    "exited": "The body has called `sys.exit`. Metadata: `code`, `stderr`.",
    "crashed": "The process has ended under the body. Metadata: `code`, `stderr`, `oom`, `shared`.",
    "timeout": "Stopped at its time limit. Metadata: `limit`, `killed`, `stack` if the body ended by itself, `loading` "
    "if its function was not called yet.",
    "cancelled": "Stopped by the user.",
    "stopped": "The runner has stopped the body, and the agent knows of no reason. Counts as cancelled.",
    "gang": "Stopped because another rank has failed.",
    "stalled": "Stopped because it waited in a collective for ranks that do not come.",
    "lost": "The process was killed for a reason that is not the call's. Metadata: `reason`.",
    "noroom": "A large argument cannot be kept here. Metadata: `size`, `reason`.",
}
"""How a call can end: the kinds of the last message about it."""


def output_cost(size: int) -> int:
    """How much a piece of output counts while it is under way: it takes memory beside its bytes."""
    return size + 256


class ClientToAgent(Direction):
    sender = "client"

    @staticmethod
    def setup(settings: dict[str, Any], buffers: int) -> Message:
        """Make all runners (again). Settings: `generation`, `processes`, `threads`, `places`, `grace`, `ready_within`,
        `shared`, `info`, `env`, `cwd`, `gpus`, `runner`, `output`. Buffers: the plugins' hooks, pickled."""
        return ["setup", settings, buffers]

    @staticmethod
    def info(info: str) -> Message:
        """A node is on another machine now. Runners are told, and not made again."""
        return ["info", info, 0]

    @staticmethod
    def ports(count: int, generation: int) -> Message:
        """Name so many free ports, for the groups of this generation of runners. Only node 0 is asked."""
        return ["ports", count, generation, 0]

    @staticmethod
    def call(id: str, metadata: dict[str, Any], buffers: int) -> Message:
        """Run this. Metadata: `name`, `fn`, `split`, `attempt`; where needed `timeout`, `streams`, `blobs`, `refs`,
        `keep`, `each`, `log`, `gang`, `place`. Buffers: function and arguments, pickled."""
        return ["call", id, metadata, buffers]

    @staticmethod
    def recall(id: str) -> Message:
        """Give the call back if it has not begun."""
        return ["recall", id, 0]

    @staticmethod
    def cancel(id: str, reason: str, grace: float) -> Message:
        """End the call. Kill its process if it does not end within the grace."""
        return ["cancel", id, reason, grace, 0]

    @staticmethod
    def ask(ids: list[str]) -> Message:
        """Say the states of these calls."""
        return ["ask", ids, 0]

    @staticmethod
    def where(request: int, ids: list[str] | None) -> Message:
        """Say where bodies stand: those of these calls, or all. Sent only when a person asks, or a call seems stuck."""
        return ["where", request, ids, 0]

    @staticmethod
    def forget(keys: list[str]) -> Message:
        """Nobody has a Ref to these objects any more: nodes and processes let go of them."""
        return ["forget", keys, 0]

    @staticmethod
    def bring(request: int, key: str) -> Message:
        """Send the result that is kept here under this key to the client."""
        return ["bring", request, key, 0]

    @staticmethod
    def grant(id: str, count: int) -> Message:
        """The user has taken so many items of the call's generator."""
        return ["grant", id, count, 0]

    @staticmethod
    def close(id: str) -> Message:
        """The user wants no more items of the call's generator."""
        return ["close", id, 0]

    @staticmethod
    def items(id: str, argument: str, counts: list[int], buffers: int) -> Message:
        """Items of an iterator argument, and how many buffers each has. Buffers: the items, pickled."""
        return ["items", id, argument, counts, buffers]

    @staticmethod
    def end(id: str, argument: str, error: dict[str, Any], buffers: int) -> Message:
        """An iterator argument has ended; `error` is empty if it did not fail. Buffers: the error, pickled."""
        return ["end", id, argument, error, buffers]

    @staticmethod
    def taken(size: int) -> Message:
        """The user's listeners have taken so much output, as `output_cost` counts it. Said after each eighth of what
        may be under way."""
        return ["taken", size, 0]

    @staticmethod
    def expect(blob: str) -> Message:
        """The client is about to send this blob."""
        return ["expect", blob, 0]

    @staticmethod
    def unexpect(blob: str) -> Message:
        """The client does not send this blob after all."""
        return ["unexpect", blob, 0]

    @staticmethod
    def blob(name: str, offset: int, size: int, buffers: int) -> Message:
        """A piece of a blob; `size` is that of the whole blob. Buffers: the piece."""
        return ["blob", name, offset, size, buffers]

    @staticmethod
    def fetch(blob: str, size: int, addresses: list[Any]) -> Message:
        """Get this blob from another node. Each address is the number of a node, a host and a port."""
        return ["fetch", blob, size, addresses, 0]

    @staticmethod
    def share(asker: str, message: Message, buffers: int) -> Message:
        """A message about shared collections (`node/shared/channel.py`), of or for a process: the client, or a runner
        of a node that cannot reach node 0."""
        return ["share", asker, message, buffers]

    @staticmethod
    def lost(node: int, rank: int | None, why: str) -> Message:
        """For shared collections: a rank of a node is lost, or the whole node. Sent to node 0; that node 0 itself is
        lost is sent to the others."""
        return ["lost", node, rank, why, 0]

    @staticmethod
    def head(place: list[Any] | None) -> Message:
        """For shared collections: where the agent of node 0 is now; nothing if it cannot be reached from here."""
        return ["head", place, 0]

    @staticmethod
    def files(request: int, order: dict[str, Any]) -> Message:
        """Do something with files of the node (`node/files.py`). Order: `do`, which is `scan`, `look`, `compare`,
        `write`, `finish`, `read` or `drop`, and what that needs. Each has an answer; `scan` may have several."""
        return ["files", request, order, 0]

    @staticmethod
    def terms(serial: int, left: float, drain: float) -> Message:
        """Everything ends in so many seconds, whatever else happens; bodies are told `drain` seconds before that."""
        return ["terms", serial, left, drain, 0]

    @staticmethod
    def bye(grace: float) -> Message:
        """The pool is closing."""
        return ["bye", grace, 0]


class AgentToClient(Direction):
    sender = "agent"
    verdicts = tuple(VERDICTS)

    @staticmethod
    def ready(generation: int) -> Message:
        """All runners of this generation are ready."""
        return ["ready", generation, 0]

    @staticmethod
    def failed(error: dict[str, Any], generation: int, buffers: int) -> Message:
        """No runner can be made. Buffers: the error, pickled."""
        return ["failed", error, generation, buffers]

    @staticmethod
    def replaced(generation: int, place: int) -> Message:
        """The runner with this local rank has ended, and another one is made."""
        return ["replaced", generation, place, 0]

    @staticmethod
    def ports(ports: list[int], generation: int) -> Message:
        """Free ports of this machine, for the groups of this generation."""
        return ["ports", ports, generation, 0]

    @staticmethod
    def notice(seconds: float) -> Message:
        """This machine will be taken away in so many seconds."""
        return ["notice", seconds, 0]

    @staticmethod
    def started(id: str, place: int) -> Message:
        """The body was seen to run, in the process with this local rank. Short calls end before this is sent."""
        return ["started", id, place, 0]

    @staticmethod
    def recalled(id: str) -> Message:
        """The call has not begun here, and never will."""
        return ["recalled", id, 0]

    @staticmethod
    def states(states: dict[str, str]) -> Message:
        """The answer to `ask`. `unknown`: the call is not here; `ended`: its large result is on its way."""
        return ["states", states, 0]

    @staticmethod
    def verdict(kind: str, id: str, metadata: dict[str, Any], buffers: int) -> Message:
        """How a call has ended; `kind` is one of VERDICTS. Metadata: `s`, the seconds that the body ran; where needed
        `blobs`, `kept`, `failed`, `group`, `replaced`, `place`. Buffers: the result or the exception, pickled."""
        return [kind, id, metadata, buffers]

    @staticmethod
    def streaming(id: str) -> Message:
        """The body has returned a generator."""
        return ["streaming", id, 0]

    @staticmethod
    def items(id: str, metadata: list[Any], buffers: int) -> Message:
        """Items of the call's generator, and for each how many buffers it has. Buffers: the items, pickled."""
        return ["items", id, metadata, buffers]

    @staticmethod
    def want(id: str, argument: str, count: int) -> Message:
        """The body has taken so many items of an iterator argument."""
        return ["want", id, argument, count, 0]

    @staticmethod
    def out(stream: str, id: str | None, place: int, buffers: int) -> Message:
        """Output of the runner with this local rank, and the call that wrote it, if one did. Buffers: the text."""
        return ["out", stream, id, place, buffers]

    @staticmethod
    def part(name: str, offset: int, size: int, buffers: int) -> Message:
        """A piece of a large result of this size, sent before the message that names it. Buffers: the piece."""
        return ["part", name, offset, size, buffers]

    @staticmethod
    def brought(request: int, metadata: dict[str, Any]) -> Message:
        """The answer to `bring`, after the pieces of the result. Metadata: its `blobs`; none if it is not here."""
        return ["brought", request, metadata, 0]

    @staticmethod
    def need(blob: str) -> Message:
        """This blob is not here, and does not come from another node."""
        return ["need", blob, 0]

    @staticmethod
    def sample(cpu: float, memory: int, running: int, gpus: list[Any]) -> Message:
        """Sent once a second. It also shows that the agent is alive. `gpus`: the fields of each `GpuSample`."""
        return ["sample", cpu, memory, running, gpus, 0]

    @staticmethod
    def gpus(topic: str, text: str) -> Message:
        """Something is wrong with a GPU of this node (`trouble`), or they cannot be asked (`missing`)."""
        return ["gpus", topic, text, 0]

    @staticmethod
    def standing(request: int, bodies: list[dict[str, Any]]) -> Message:
        """The answer to `where`, for each runner thread or idle runner: `place`, `state`, `cpu`; where known `call`,
        `name`, `seconds`, `frames`, `problem`, `facts`."""
        return ["standing", request, bodies, 0]

    @staticmethod
    def repaired(text: str) -> Message:
        """The agent has repaired its own state (see "The net")."""
        return ["repaired", text, 0]

    @staticmethod
    def warning(text: str) -> Message:
        """Something on the machine is not as it should be: shown to the user."""
        return ["warning", text, 0]

    # as the client sends it
    share = staticmethod(ClientToAgent.share)

    @staticmethod
    def files(request: int, answer: dict[str, Any], buffers: int) -> Message:
        """The answer to `files`, with `error` if it could not be done. Buffers: what was read."""
        return ["files", request, answer, buffers]

    @staticmethod
    def bye() -> Message:
        """All runners are gone, and the agent ends."""
        return ["bye", 0]


class AgentToRunner(Direction):
    sender = "agent"

    @staticmethod
    def init(settings: dict[str, Any], buffers: int) -> Message:
        """The first message: enter the hooks. Settings: `node`, `threads`, `paths`, `blobs`, `max_result`, `mark` and
        `log` (levels of loggers). Buffers: the plugins' hooks, pickled."""
        return ["init", settings, buffers]

    @staticmethod
    def exit() -> Message:
        """Leave the hooks and end, after the calls that are here."""
        return ["exit", 0]

    @staticmethod
    def notice(seconds: float) -> Message:
        """The machine will be taken away: `sky.preempted()` is true, and bodies that have a handler get SIGTERM."""
        return ["notice", seconds, 0]

    @staticmethod
    def cancel(id: str) -> Message:
        """Give the call back if it has not begun, else interrupt it."""
        return ["cancel", id, 0]

    @staticmethod
    def facts() -> Message:
        """Say what bodies have done in their group so far."""
        return ["facts", 0]

    @staticmethod
    def share(message: Message, buffers: int) -> Message:
        """A message about shared collections (`node/shared/channel.py`), of or for this runner."""
        return ["share", message, buffers]

    # as the client sends them; `ahead` in the metadata of a call says that another call runs in this process
    info = staticmethod(ClientToAgent.info)
    call = staticmethod(ClientToAgent.call)
    recall = staticmethod(ClientToAgent.recall)
    forget = staticmethod(ClientToAgent.forget)
    grant = staticmethod(ClientToAgent.grant)
    close = staticmethod(ClientToAgent.close)
    items = staticmethod(ClientToAgent.items)
    end = staticmethod(ClientToAgent.end)


class RunnerToAgent(Direction):
    sender = "runner"
    verdicts = ("done", "error", "exited", "stopped")

    @staticmethod
    def ready() -> Message:
        """The hooks are entered."""
        return ["ready", 0]

    @staticmethod
    def failed(error: dict[str, Any], buffers: int) -> Message:
        """A hook has failed. Buffers: the error, pickled."""
        return ["failed", error, buffers]

    @staticmethod
    def leaving(ids: list[str]) -> Message:
        """A body is interrupted here, or has left a GPU that does not work: no other call begins here. These calls have
        not begun, and never will."""
        return ["leaving", ids, 0]

    @staticmethod
    def facts(facts: dict[str, Any]) -> Message:
        """The answer to `facts`: `collectives`, how many were entered; `shards`, uneven ones by broadcast; `threads`,
        the frames of every thread beside the body's, where a process runs one body at a time."""
        return ["facts", facts, 0]

    # as the agent sends it
    share = staticmethod(AgentToRunner.share)

    # as the agent sends them to the client
    recalled = staticmethod(AgentToClient.recalled)
    verdict = staticmethod(AgentToClient.verdict)
    streaming = staticmethod(AgentToClient.streaming)
    items = staticmethod(AgentToClient.items)
    want = staticmethod(AgentToClient.want)

    @staticmethod
    def out(stream: str, id: str | None, buffers: int) -> Message:
        """What a call has written, where threads share the process. Buffers: the text."""
        return ["out", stream, id, buffers]
