"""What the client's pure logic wants done. `Engine._do` does what `Action` names.

Nodes, StallWatch --> Core --> Engine          Lose and Stall end in Core
Kept --> ClientCalls --> Core                  Unblock, MakeAgain, Unwanted and CallBack end in ClientCalls
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from skyward.transport.records import Record

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from skyward import events
    from skyward.client.call import Call, CallFuture
    from skyward.client.kept import KeptResult
    from skyward.client.output import Chunk
    from skyward.errors import Stalled
    from skyward.node.protocol import Blobs, Returned
    from skyward.transport.blobs import Blob
    from skyward.transport.codec import Message

__all__ = [
    "Action",
    "CallBack",
    "Discard",
    "Emit",
    "Fail",
    "Feed",
    "Fetch",
    "ForgetBlobs",
    "Free",
    "GetFailed",
    "Got",
    "Inquire",
    "KeepFailed",
    "KeptAction",
    "Load",
    "Lose",
    "MakeAgain",
    "NodeAction",
    "Post",
    "Reconnect",
    "RecordEnd",
    "Release",
    "Renounce",
    "Settle",
    "SharedLost",
    "Stall",
    "StallAction",
    "Unblock",
    "Unwanted",
    "Upload",
]


class Post(Record):
    node: int
    messages: list[Message]


class Emit(Record):
    event: events.Event | Chunk


# calls


class Load(Record):
    node: int
    files: Mapping[str, Blob]


class Feed(Record):
    call: Call
    node: int


class Settle(Record):
    call: Call
    result: Returned


class Fail(Record):
    call: Call
    error: BaseException


class KeepFailed(Record):
    """Before the arguments of a failed call are released."""

    call: Call
    end: events.EndOfCall
    error: BaseException | None


class RecordEnd(Record):
    keep: events.KeepEnd
    end: events.EndOfCall


class Discard(Record):
    blobs: Blobs


# results that stay on nodes


class Fetch(Record):
    node: int
    blobs: Sequence[Blob]
    sources: Sequence[int]


class Upload(Record):
    node: int
    files: Mapping[str, Blob]


class Got(Record):
    """A result in files here; `remove` if they are only for this."""

    future: CallFuture[Any]
    blobs: Sequence[Blob]
    remove: bool


class GetFailed(Record):
    future: CallFuture[Any]
    error: BaseException


class Release(Record):
    uploads: list[str]


class Free(Record):
    key: str
    nodes: Sequence[int]
    paths: Sequence[str]
    names: Sequence[str]


class Unblock(Record):
    call: Call


class MakeAgain(Record):
    call: Call


class Unwanted(Record):
    call: Call


class CallBack(Record):
    """Take back calls that wait on a node for a result that does not come."""

    node: int
    result: KeptResult


# nodes


class Reconnect(Record):
    node: int


class Renounce(Record):
    """Forget what was said to a node."""

    node: int


class Inquire(Record):
    """Ask the provider whether the machines of silent nodes are still there."""


class ForgetBlobs(Record):
    node: int


class SharedLost(Record):
    """A process, or a node if `rank` is None, is gone: its shared objects are released."""

    node: int
    rank: int | None
    reason: str


class Lose(Record):
    node: int
    reason: str


class Stall(Record):
    call: Call
    error: Stalled


_OfKept = Post | Emit | Discard | Fetch | Upload | Got | GetFailed | Release | Free
_OfNodes = Post | Emit | Reconnect | Renounce | Inquire | ForgetBlobs

Action = _OfKept | _OfNodes | Load | Feed | Settle | Fail | KeepFailed | RecordEnd | SharedLost
KeptAction = _OfKept | Unblock | MakeAgain | Unwanted | CallBack
NodeAction = _OfNodes | Lose
StallAction = Post | Emit | Stall
