"""Messages between client, agent and runner.

    client ──ClientToAgent──► agent ──AgentToRunner──► runner
           ◄─AgentToClient──       ◄─RunnerToAgent──

A class is one direction of a link, and each class in it is one kind of message (`transport/codec.py`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired, TypedDict

from skyward.node.settings import LogSettings, RunnerSettings, SetupSettings
from skyward.node.status_page import ID_BYTES
from skyward.transport.codec import MOST, Buffers, Described, Direction, Length, Message, Raw, Wire, Within
from skyward.transport.frames import Malformed

# fmt: off
__all__ = [
    "NO_BLOBS", "AgentToClient", "AgentToRunner", "Blobs", "Body", "Cancelled", "ClientToAgent", "Close",
    "CodeFrames", "Crashed", "Exited", "Facts", "FileAnswer", "FileDrop", "FileEntries", "FileError",
    "FileOrder", "FilePath", "FileRead", "FileWrite", "Files", "Forget", "GangStopped",
    "Grant", "Header", "Info", "InputEnd", "InputItems", "Lost", "NoRoom", "Raised",
    "Recall", "Returned", "Run", "RunnerShare", "RunnerToAgent", "Share",
    "Stalled", "Stopped", "TimedOut", "Verdict", "output_cost",
]
# fmt: on

Seconds = Annotated[float, Within(0, MOST)]
Code = Annotated[int, Within(-(1 << 31), 1 << 31)]
Port = Annotated[int, Within(1, (1 << 16) - 1)]
OneBuffer = Annotated[Buffers, Length(1, 1)]
Blobs = dict[str, tuple[str, int]]
"""The buffers in files, by index: path or name, and size."""
NO_BLOBS: Blobs = {}
CodeFrames = list[tuple[str, int, str]]


class Files(TypedDict):
    """The blobs of a value, and why one could not be sent."""

    blobs: NotRequired[Blobs]
    incomplete: NotRequired[str]


class Facts(TypedDict):
    collectives: NotRequired[int | None]
    shards: NotRequired[dict[str, Annotated[list[int], Length(0, 3)]]]
    """Uneven ones, by broadcast: length of the whole, number of parts, length of the part."""
    threads: NotRequired[list[CodeFrames | None]]
    """Of all other threads, where a process runs one body at a time."""


class Body(TypedDict):
    """Where a body is, or that a runner has none."""

    place: int
    state: str
    cpu: Seconds
    runner: NotRequired[str]
    call: NotRequired[str]
    name: NotRequired[str]
    seconds: NotRequired[float]
    frames: NotRequired[CodeFrames | None]
    problem: NotRequired[str]
    facts: NotRequired[Facts]


Number = Annotated[float | None, Within(-MOST, MOST)]
Gpu = tuple[int, Annotated[str, Length(0, 1000)], Number, Number, Number, Number, Number]


class FilePath(TypedDict):
    """`scan`: what there is, in one or several answers. `look`: whether it is a folder."""

    do: Literal["scan", "look"]
    path: str


class FileEntries(TypedDict):
    """`compare`: make the folders, and say how much of each file is there. `finish`: all files are there."""

    do: Literal["compare", "finish"]
    root: str
    entries: list[list[Any]]


class FileWrite(TypedDict):
    """Segments: entry, where it belongs in the file, where it is in the blob, length."""

    do: Literal["write"]
    root: str
    blob: tuple[str, int] | None
    segments: list[tuple[list[Any], int, int, int]]


class FileRead(TypedDict):
    """Pieces: path, offset, length."""

    do: Literal["read"]
    root: str
    pieces: list[tuple[str, int, int]]


class FileDrop(TypedDict):
    do: Literal["drop"]
    blobs: list[str]


FileOrder = FilePath | FileEntries | FileWrite | FileRead | FileDrop


class FileError(TypedDict):
    errno: int
    text: str
    path: str


class FileAnswer(TypedDict):
    """Of a node; the fields depend on the question."""

    error: NotRequired[FileError]
    entries: NotRequired[list[Any]]
    root: NotRequired[str]
    left_out: NotRequired[list[str]]
    have: NotRequired[list[int | None]]
    pieces: NotRequired[list[Any]]
    folder: NotRequired[bool]
    missing: NotRequired[bool]


def output_cost(size: int) -> int:
    """Small pieces take memory beside their bytes."""
    return size + 256


def _check_blobs(blobs: Blobs, pieces: int) -> None:
    for index in blobs:
        if not (index.isdecimal() and len(index) < 9 and int(index) < max(pieces, 1)):
            raise Malformed("a blob for no buffer")


# How a call can end: the last message about it.


class Verdict(Message, kw_only=True):
    id: str
    seconds: Annotated[Seconds | None, Wire("s")] = None
    """None if it has not begun."""
    group: bool = False
    replaced: bool = False
    """Whether its process is replaced: a group may be broken."""
    place: int = 0


class Returned(Verdict, kw_only=True, kind="done"):
    """Buffers: the result, pickled; none after a stream."""

    blobs: Blobs = NO_BLOBS
    kept: str | None = None
    """The key of the result that stays on its node."""
    failed: tuple[int, str] | None = None
    """Of a map: how many items failed, and the first error."""
    incomplete: str | None = None
    """Why a blob could not be sent."""
    buffers: Buffers = ()

    def validate(self) -> None:
        if self.seconds is None:
            raise Malformed("'done' without s")
        if self.blobs:
            _check_blobs(self.blobs, len(self.buffers))


class Raised(Verdict, kw_only=True, kind="error"):
    """Buffers: the exception, pickled."""

    error: Described
    preempted: bool = False
    buffers: Annotated[Buffers, Length(1, 1 << 20)]


class Exited(Verdict, kw_only=True):
    """The body called `sys.exit`."""

    code: Code
    stderr: str = ""


class Crashed(Verdict, kw_only=True):
    """The process ended under the body."""

    code: Code
    stderr: str
    oom: bool
    shared: Code


class TimedOut(Verdict, kw_only=True, kind="timeout"):
    """Stopped at its time limit."""

    limit: Seconds
    killed: bool
    loading: bool = False
    """Whether its function was not called yet."""
    stack: str | None = None
    """Where it was, if the body ended by itself."""


class Cancelled(Verdict, kw_only=True):
    """Stopped by the user."""


class Stopped(Verdict, kw_only=True):
    """Stopped by the runner for no reason that the agent knows. Counts as cancelled."""

    stack: str | None = None


class GangStopped(Verdict, kw_only=True, kind="gang"):
    """Stopped because another rank failed."""


class Stalled(Verdict, kw_only=True):
    """Stopped because it waited in a collective for ranks that do not come."""


class Lost(Verdict, kw_only=True):
    """The process was killed for a reason that is not the call's."""

    reason: str


class NoRoom(Verdict, kw_only=True, kind="noroom"):
    """A large argument cannot be kept here."""

    size: int
    reason: str


class Share(Message):
    """About shared collections (`node/shared/channel.py`), of or for a process: the client, or a runner."""

    asker: str
    message: Raw
    buffers: Buffers

    def validate(self) -> None:
        _check_inner(self.message)


class RunnerShare(Message, kind="share"):
    """About shared collections, of or for this runner."""

    message: Raw
    buffers: Buffers

    def validate(self) -> None:
        _check_inner(self.message)


def _check_inner(message: Raw) -> None:
    if len(message) < 2 or type(message[0]) is not str or type(message[-1]) is not int:
        raise Malformed("a message about shared collections that is none")


class AgentToClient(Direction):
    Returned = Returned
    Raised = Raised
    Exited = Exited
    Crashed = Crashed
    TimedOut = TimedOut
    Cancelled = Cancelled
    Stopped = Stopped
    GangStopped = GangStopped
    Stalled = Stalled
    Lost = Lost
    NoRoom = NoRoom
    Share = Share

    class Ready(Message):
        """All runners of this generation are ready."""

        generation: int

    class Failed(Message):
        """No runner can be made. Buffers: the error, pickled."""

        error: Described
        generation: int
        buffers: Annotated[Buffers, Length(1, 1 << 20)]

    class Replaced(Message):
        """The runner with this local rank has ended, and another one is made."""

        generation: int
        place: int

    class Ports(Message):
        """Free ports for the groups of this generation."""

        ports: list[Port]
        generation: int

    class Notice(Message):
        """This machine will be taken away in so many seconds."""

        seconds: Seconds

    class Started(Message):
        """The body runs, in the process with this local rank. Short calls end before this is sent."""

        id: str
        place: int

    class Recalled(Message):
        """The call has not begun here, and never will."""

        id: str

    class States(Message):
        """The answer to `ask`. `unknown`: the call is not here; `ended`: its large result is on its way."""

        states: dict[str, str]

    class Streaming(Message):
        """The body has returned a generator."""

        id: str

    class Items(Message):
        """Items of the call's generator, and how many buffers each has. Buffers: the items, pickled."""

        id: str
        items: list[int | tuple[int, Files]]
        buffers: Buffers

        def validate(self) -> None:
            total = 0
            for item in self.items:
                count = item if isinstance(item, int) else item[0]
                if not isinstance(item, int):
                    _check_blobs(item[1].get("blobs", NO_BLOBS), count)
                total += count
            if total != len(self.buffers):
                raise Malformed(f"items with {len(self.buffers)} buffers instead of {total}")

    class Want(Message):
        """The body has taken so many items of an iterator argument."""

        id: str
        argument: str
        count: int

    class Out(Message):
        """Of the runner with this local rank, and the call that wrote it, if one did. Buffers: the text."""

        stream: Literal["stdout", "stderr"]
        id: str | None
        place: int
        buffers: OneBuffer

    class Part(Message):
        """A piece of a large result of this size, sent before the message that names it. Buffers: the piece."""

        name: str
        offset: int
        size: int
        buffers: OneBuffer

    class Brought(Message):
        """The answer to `bring`, after the pieces: the result's blobs; none if it is not here."""

        request: int
        files: Files

        def validate(self) -> None:
            blobs = self.files.get("blobs", NO_BLOBS)
            _check_blobs(blobs, len(blobs))

    class Need(Message):
        """This blob is not here, and does not come from another node."""

        blob: str

    class Sample(Message):
        """Once per second; also shows that the agent is alive."""

        cpu: float
        memory: int
        running: int
        gpus: Annotated[list[Gpu], Length(0, 256)]

    class Gpus(Message):
        """Something is wrong with a GPU (`trouble`), or they cannot be asked (`missing`)."""

        topic: str
        text: str

    class Standing(Message):
        """The answer to `where`, for each runner thread or idle runner."""

        request: int
        bodies: list[Body]

    class Repaired(Message):
        """The agent repaired its own state (see "The net")."""

        text: str

    class Warning(Message):
        """Something on the machine is wrong: shown to the user."""

        text: str

    class Files(Message):
        """The answer to `files`, with `error` if it failed. Buffers: what was read."""

        request: int
        answer: FileAnswer
        buffers: Annotated[Buffers, Length(0, 1)]

    class Bye(Message):
        """All runners are gone, and the agent ends."""


class RunnerToAgent(Direction):
    Returned = Returned
    Raised = Raised
    Exited = Exited
    Stopped = Stopped

    # as the agent sends them to the client
    Recalled = AgentToClient.Recalled
    Streaming = AgentToClient.Streaming
    Items = AgentToClient.Items
    Want = AgentToClient.Want
    Share = RunnerShare

    class Ready(Message):
        """The hooks are entered."""

    class Failed(Message):
        """A hook has failed. Buffers: the error, pickled."""

        error: Described
        buffers: Buffers

    class Leaving(Message):
        """A body is interrupted here, or has broken a GPU: no other call begins here. These have not begun."""

        ids: list[str]

    class Facts(Message):
        """The answer to `facts`."""

        facts: Facts

    class Out(Message):
        """What a call wrote, where threads share the process. Buffers: the text."""

        stream: Literal["stdout", "stderr"]
        id: str | None
        buffers: Buffers


# what the client sends, and what of it goes on to runners


class Header(TypedDict):
    name: str
    fn: str
    """A digest, if the function may be kept."""
    split: int
    """How many buffers the function has."""
    attempt: int
    timeout: NotRequired[float | None]
    streams: NotRequired[list[str]]
    """Arguments that are streams: a number, or a name."""
    blobs: NotRequired[Blobs]
    refs: NotRequired[dict[str, tuple[int, int]]]
    """By key: the first buffer, and how many."""
    keep: NotRequired[str]
    """The key under which the result stays on its node."""
    each: NotRequired[bool]
    """Whether it is part of a map that keeps exceptions."""
    log: NotRequired[LogSettings]
    gang: NotRequired[str]
    place: NotRequired[int]
    ahead: NotRequired[bool]
    """Set by the agent: another call runs in the process."""


class Run(Message, kind="call"):
    """Buffers: function and arguments, pickled."""

    id: str
    header: Header
    buffers: Buffers

    def validate(self) -> None:
        if len(self.id.encode("utf-8", "surrogatepass")) != ID_BYTES:
            raise Malformed("a call without its id")
        if self.header["split"] > len(self.buffers):
            raise Malformed("a call without its split")


class Info(Message):
    """A node is on another machine now. Runners are told, and not restarted."""

    info: str


class Recall(Message):
    """Give the call back if it has not begun."""

    id: str


class Forget(Message):
    """These objects have no Ref any more."""

    keys: list[str]


class Grant(Message):
    """The user has taken so many items of the call's generator."""

    id: str
    count: int


class Close(Message):
    """The user wants no more items of the call's generator."""

    id: str


class InputItems(Message, kind="items"):
    """Items of an iterator argument, and how many buffers each has. Buffers: the items, pickled."""

    id: str
    argument: str
    counts: list[int]
    buffers: Buffers


class InputEnd(Message, kind="end"):
    """An iterator argument has ended; `error` is empty if it did not fail. Buffers: the error, pickled."""

    id: str
    argument: str
    error: Annotated[dict[str, Any], Length(0, 0)] | Described
    buffers: Buffers


class ClientToAgent(Direction):
    Run = Run
    Info = Info
    Recall = Recall
    Forget = Forget
    Grant = Grant
    Close = Close
    InputItems = InputItems
    InputEnd = InputEnd
    Share = Share

    class Setup(Message):
        """Make all runners (again). Buffers: the plugins' hooks, pickled."""

        settings: SetupSettings
        buffers: Buffers

    class Ports(Message):
        """Name so many free ports. Only node 0 is asked."""

        count: int
        generation: int

    class Cancel(Message):
        """End the call; kill its process after the grace."""

        id: str
        reason: str
        grace: float

    class Ask(Message):
        """Say the states of these calls."""

        ids: list[str]

    class Where(Message):
        """Say where bodies are: of these calls, or all."""

        request: int
        ids: list[str] | None

    class Bring(Message):
        """Send the result that is kept under this key."""

        request: int
        key: str

    class Taken(Message):
        """The user's listeners have taken so much output, as `output_cost` counts it."""

        size: int

    class Expect(Message):
        """The client is about to send this blob."""

        blob: str

    class Unexpect(Message):
        """The client does not send this blob after all."""

        blob: str

    class Blob(Message):
        """A piece of a blob; `size` is that of the whole. Buffers: the piece."""

        name: str
        offset: int
        size: int
        buffers: OneBuffer

    class Fetch(Message):
        """Get this blob from another node: number, host, port."""

        blob: str
        size: int
        addresses: list[tuple[int, str, int]]

    class Lost(Message):
        """For shared collections: a rank, or a whole node, is lost. Sent to node 0; if that is lost, to the others."""

        node: int
        rank: int | None
        why: str

    class Head(Message):
        """For shared collections: where node 0's agent is, if it can be reached."""

        place: tuple[str, int] | None

    class Files(Message):
        """Do something with the node's files (`node/files.py`). Each has an answer."""

        request: int
        order: FileOrder

    class Terms(Message):
        """Everything ends in so many seconds; bodies are told `drain` seconds before."""

        serial: int
        left: float
        drain: float

    class Bye(Message):
        """The pool is closing."""

        grace: float


class AgentToRunner(Direction):
    Run = Run
    Info = Info
    Recall = Recall
    Forget = Forget
    Grant = Grant
    Close = Close
    InputItems = InputItems
    InputEnd = InputEnd
    Share = RunnerShare

    class Init(Message):
        """The first message: enter the hooks. Buffers: the plugins' hooks, pickled."""

        settings: RunnerSettings
        buffers: Buffers

    class Exit(Message):
        """Leave the hooks and end, after the calls that are here."""

    class Notice(Message):
        """The machine will be taken away: `sky.preempted()` is true, and bodies with a handler get SIGTERM."""

        seconds: float

    class Cancel(Message):
        """Give the call back if it has not begun, else interrupt it."""

        id: str

    class Facts(Message):
        """Say what bodies have done in their group."""
