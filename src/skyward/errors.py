"""What can go wrong, named by what the caller can do next.

SkywardError
├── InvalidArgument (ValueError)        fix the argument; nothing was started
├── PoolClosed (RuntimeError)           open the pool first
├── ForkedPoolError (RuntimeError)      use the pool in the process that opened it
├── NestedPoolError (RuntimeError)      a pool inside a body needs allow_nested=True
├── NotSerializable (TypeError)         what cannot travel, and where it hides
│   └── ResultNotSerializable           the body ran; its result cannot come home
├── ResultTooLarge                      return less, or raise max_result_bytes
├── TaskError                           a call that ended without a result
│   ├── TaskCrashed                     the body's process died
│   │   └── TaskOutOfMemory             ... because the kernel ran out of memory
│   ├── TaskTimeout (TimeoutError)      the body was stopped at its time limit
│   ├── Stalled                         ranks waited for each other, and nothing could come of it
│   ├── NodeLost                        the machine or its agent is gone
│   ├── RefLost                         ... and with it a result that was kept there
│   └── NodeDiskFull                    a large argument found no room on the machine
├── SharedError                         something that a shared collection did not do
│   ├── SharedTimeout (TimeoutError)    nothing came in time; says who holds the lock, who is missing
│   ├── BarrierBroken (RuntimeError)    a rank of the barrier was lost, or has given up
│   ├── LockLost (RuntimeError)         another process may have held the lock since
│   ├── SharedLost                      node 0 was lost: the collections are empty again
│   └── SharedTooLarge (ValueError)     pass large data as arguments and results
├── Preempted                           raise it in a body whose machine is being taken away: it is run again
├── TransferError                       make room, or choose another path; then push or pull again
├── RemoteError                         an exception whose class cannot travel, as text
├── BootstrapError                      a node could not be set up
│   ├── PythonMismatch                  both sides need the same minor version of Python
│   ├── AcceleratorMismatch             a node has other GPUs than were asked for, too few, or none
│   ├── HostUnreachable                 a host has no known address, refuses, or does not answer
│   ├── HostKeyMismatch                 a host shows another key than the one that is known
│   └── AuthenticationFailed            a host accepts none of the keys that were offered
├── MissingPackage (ImportError)        install an optional package on this computer
├── PluginError                         a plugin's hook raised
└── CloudError                          something that a cloud did not do
    ├── NoOffer (InvalidArgument)       ask for something else; nothing was created
    ├── NoCapacity                      try later, elsewhere, or something else; nothing was left running
    │   ├── NoPlace                     ... on a cluster of yours, which gave too few places
    │   └── NoneAvailable               ... and so it went with every one of several specs
    ├── NotGivenBack                    machines may still cost money
    └── CloudRefused                    a call that was not carried out, or not answered
        ├── CredentialsMissing          log in; nothing was created
        ├── CredentialsExpired          log in again, then give back what is left
        ├── PermissionDenied            have the action allowed
        └── QuotaExceeded               have the quota raised

The user's own exceptions are never wrapped: they keep their type and carry the remote traceback in a note.
"""

from __future__ import annotations

import errno as _errno

from skyward.api.base_errors import InvalidArgument, MissingPackage, SkywardError
from skyward.api.cloud_errors import (
    CloudError,
    CloudRefused,
    CredentialsExpired,
    CredentialsMissing,
    NoCapacity,
    NoneAvailable,
    NoOffer,
    NoPlace,
    NotGivenBack,
    PermissionDenied,
    QuotaExceeded,
)
from skyward.api.shared_errors import (
    BarrierBroken,
    LockLost,
    SharedError,
    SharedLost,
    SharedTimeout,
    SharedTooLarge,
)
from skyward.api.stacks import Stacks

# fmt: off
__all__ = [
    "AcceleratorMismatch", "AuthenticationFailed", "BarrierBroken", "BootstrapError", "CloudError", "CloudRefused",
    "CredentialsExpired", "CredentialsMissing", "ForkedPoolError", "HostKeyMismatch", "HostUnreachable",
    "InvalidArgument", "LockLost", "MissingPackage", "NestedPoolError", "NoCapacity", "NoOffer", "NoPlace",
    "NodeDiskFull", "NodeLost", "NoneAvailable", "NotGivenBack", "NotSerializable", "PermissionDenied", "PluginError",
    "PoolClosed", "Preempted", "PythonMismatch", "QuotaExceeded", "RefLost", "RemoteError",
    "ResultNotSerializable", "ResultTooLarge", "SharedError", "SharedLost", "SharedTimeout", "SharedTooLarge",
    "SkywardError", "Stalled", "TaskCrashed", "TaskError", "TaskOutOfMemory", "TaskTimeout",
    "TransferError",
]
# fmt: on


class PoolClosed(SkywardError, RuntimeError):
    """The pool is not open (not entered yet, closing, or closed)."""


class ForkedPoolError(SkywardError, RuntimeError):
    """The pool was opened by another process, of which this one is a fork."""


class NestedPoolError(SkywardError, RuntimeError):
    """A body tried to open a pool of its own."""


class NotSerializable(SkywardError, TypeError):
    """Something that cannot travel to a node, with the path that leads to it."""


class ResultNotSerializable(NotSerializable):
    """The body ran to its end, but its result cannot be sent home."""


class ResultTooLarge(SkywardError):
    """The result is larger than the pool's `max_result_bytes`; it was not sent."""

    def __init__(self, task: str, size: int, limit: int) -> None:
        super().__init__(task, size, limit)
        self.task, self.size, self.limit = task, size, limit

    def __str__(self) -> str:
        return (
            f"the result of {self.task} takes {self.size:,} bytes, more than max_result_bytes={self.limit:,}; "
            "it was not sent. Return less (write it to a file or a bucket), or raise max_result_bytes on the pool."
        )


class TaskError(SkywardError):
    """A call that ended without a result of its own making."""


class TaskCrashed(TaskError):
    """The process in which the body ran ended before the body did."""

    def __init__(
        self,
        task: str,
        node: int,
        attempt: int = 0,
        exit_code: int | None = None,
        signal: str | None = None,
        stderr: str = "",
        shared_with: int = 0,
        rank: int | None = None,
    ) -> None:
        super().__init__(task, node, attempt, exit_code, signal, stderr, shared_with, rank)
        self.task, self.node, self.rank, self.attempt = task, node, rank, attempt
        self.exit_code, self.signal, self.stderr, self.shared_with = exit_code, signal, stderr, shared_with

    def __str__(self) -> str:
        how = f"was killed by {self.signal}" if self.signal else f"exited with status {self.exit_code}"
        text = f"the process running {self.task} on {_where(self.node, self.rank)} {how}{_again(self.attempt)}. "
        if self.shared_with:
            text += (
                f"{self.shared_with} other calls ran in that process and fail with it, since nothing tells which one "
                'did it; executor="process" gives every slot a process of its own. '
            )
        text += "It was not started again: a body that ends its process would do so again."
        if self.signal is None and self.shared_with == 0:
            text += " If it calls sys.exit() or os._exit(), have it return or raise instead."
        return text + (f"\nLast lines of its stderr:\n{self.stderr}" if self.stderr else "")


class TaskOutOfMemory(TaskCrashed):
    """The kernel killed the body's process because memory ran out."""

    def __str__(self) -> str:
        return (
            f"the process running {self.task} on {_where(self.node, self.rank)} was killed because its memory limit "
            "was reached. "
            "Use smaller batches, a machine with more memory, or fewer slots a node."
        )


class TaskTimeout(TaskError, TimeoutError):
    """The body was stopped because it ran past its time limit."""

    def __init__(
        self,
        task: str,
        node: int,
        seconds: float,
        attempt: int = 0,
        killed: bool = False,
        rank: int | None = None,
    ) -> None:
        super().__init__(task, node, seconds, attempt, killed, rank)
        self.task, self.node, self.rank = task, node, rank
        self.seconds, self.attempt, self.killed = seconds, attempt, killed

    def __str__(self) -> str:
        how = "did not end on SIGTERM and was killed" if self.killed else "was stopped"
        return (
            f"{self.task} on {_where(self.node, self.rank)} ran past its limit of {self.seconds:g} s and {how}"
            f"{_again(self.attempt)}. Raise it with .with_timeout(seconds) or @sky.compute(timeout=...)."
        )


class Stalled(TaskError):
    """A broadcast was stopped since its ranks waited in collectives for ranks that do not come."""

    def __init__(self, task: str, explanation: str, seconds: float, stacks: Stacks) -> None:
        super().__init__(task, explanation, seconds, stacks)
        self.task, self.explanation, self.seconds, self.stacks = task, explanation, seconds, stacks

    def __str__(self) -> str:
        return (
            f"{self.explanation}\nIt was stopped after stall_timeout={self.seconds:g} s in which no rank did anything "
            f"(ComputePool(stall_timeout=...); None never stops one). Where the ranks stood:\n{self.stacks}"
        )


class NodeLost(TaskError):
    """The node that ran the call is gone, and `retries` are used up or did not apply."""

    def __init__(self, node: int, task: str = "", reason: str = "", attempts: int = 1, broadcast: bool = False) -> None:
        super().__init__(node, task, reason, attempts, broadcast)
        self.node, self.task, self.reason, self.attempts, self.broadcast = node, task, reason, attempts, broadcast

    def __str__(self) -> str:
        why = self.reason or "no answer"
        if not self.attempts:
            what = f"{self.task} was not started" if self.task else "the call was not started"
            if why.startswith("no node"):
                return f"{what}: {why}. Open another pool."
            return (
                f"{what}: node {self.node} is lost ({why}). A broadcast needs all nodes; calls with >> go to those "
                "that are left, and a node that comes back takes part again."
            )
        text = f"{self.task or 'the call'} was running on node {self.node}, which was lost ({why}). "
        if self.broadcast:
            return text + "Send it again when all nodes are there; retries=n has a broadcast started again as a whole."
        tried = "once" if self.attempts == 1 else f"{self.attempts} times"
        return text + f"It was started {tried}; retries=n has it started again on another node."


class RefLost(TaskError):
    """A result that was kept on a node is gone with it, and its call may not be started again."""

    def __init__(self, task: str, node: int, reason: str = "") -> None:
        super().__init__(task, node, reason)
        self.task, self.node, self.reason = task, node, reason

    def __str__(self) -> str:
        return (
            f"the result of {self.task}, which was kept on node {self.node}, is gone ({self.reason or 'no answer'}). "
            "Call it again; a call with retries=n makes such a result again by itself, if it was not sent with `@`."
        )


class Preempted(SkywardError):
    """Raised by a body that gives up since its machine is being taken away; within `retries` it is run again."""

    def __init__(self, message: str = "gave up, since the machine is being taken away") -> None:
        super().__init__(message)


class NodeDiskFull(TaskError):
    """A node had no room for a large argument."""

    def __init__(self, task: str, node: int, size: int, reason: str = "") -> None:
        super().__init__(task, node, size, reason)
        self.task, self.node, self.size, self.reason = task, node, size, reason

    def __str__(self) -> str:
        return (
            f"node {self.node} has no room for an argument of {self.task} that takes {self.size:,} bytes "
            f"({self.reason}: its disk or its memory file system is full). Free some space there, or send less at a "
            "time; data that every call needs is better read on the node, from a file or a bucket."
        )


class TransferError(SkywardError):
    """A file could not be copied by `pool.push` or `pool.pull`; `node` is None if the reason is on this computer."""

    def __init__(self, node: int | None, path: str, reason: str, errno: int = 0) -> None:
        super().__init__(node, path, reason, errno)
        self.node, self.path, self.reason, self.errno = node, path, reason, errno

    def __str__(self) -> str:
        where = "on this computer" if self.node is None else f"on node {self.node}"
        text = f"{self.path!r} {where}: {self.reason[:1].lower()}{self.reason[1:]}."
        if self.errno in (_errno.ENOSPC, _errno.EDQUOT):
            return f"{text} Make room there and call it again: what was copied stays."
        if self.errno in (_errno.EACCES, _errno.EPERM, _errno.EROFS):
            return f"{text} Choose another path, or have this user allowed to use it."
        return text


class RemoteError(SkywardError):
    """An exception of the body whose class cannot be rebuilt here, as text."""

    def __init__(self, type_name: str, message: str, traceback: str = "") -> None:
        super().__init__(type_name, message, traceback)
        self.type_name, self.message, self.traceback = type_name, message, traceback

    def __str__(self) -> str:
        return f"{self.type_name}: {self.message}"


class BootstrapError(SkywardError):
    """A node could not be set up; says which step failed and how."""

    def __init__(self, step: str, detail: str, node: int | None = None, exit_code: int | None = None) -> None:
        super().__init__(step, detail, node, exit_code)
        self.step, self.detail, self.node, self.exit_code = step, detail, node, exit_code

    def __str__(self) -> str:
        where = "" if self.node is None else f" on node {self.node}"
        code = "" if self.exit_code is None else f" (exit status {self.exit_code})"
        return f"setting up failed{where} at '{self.step}'{code}: {self.detail}"


class PythonMismatch(BootstrapError):
    """Client and node run different minor versions of Python."""


class AcceleratorMismatch(BootstrapError):
    """A node has other accelerators than were asked for, too few of them, or none; nothing was run on it."""


class HostUnreachable(BootstrapError):
    """The host has no known address, refuses connections, or does not answer in time."""


class HostKeyMismatch(BootstrapError):
    """The host's key is not the one that is known, or none is known; nothing was sent to it."""


class AuthenticationFailed(BootstrapError):
    """The host accepts none of the keys that were offered."""


class PluginError(SkywardError):
    """A plugin's hook raised; says which plugin, which hook and where."""

    def __init__(self, plugin: str, hook: str, detail: str, node: int | None = None, rank: int | None = None) -> None:
        super().__init__(plugin, hook, detail, node, rank)
        self.plugin, self.hook, self.detail, self.node, self.rank = plugin, hook, detail, node, rank

    def __str__(self) -> str:
        where = "on this computer" if self.node is None else f"on {_where(self.node, self.rank)}"
        return f"plugin '{self.plugin}' failed in its {self.hook} hook {where}: {self.detail}"


for _name in __all__:
    globals()[_name].__module__ = __name__  # by which users know them, and pickles name them


def _where(node: int, rank: int | None) -> str:
    """The node, and the rank where nodes have several: it is None where the node's number says it."""
    return f"node {node}" if rank is None else f"rank {rank} (node {node})"


def _again(attempt: int) -> str:
    """Which attempt it was, where there were others; the first has the number 0."""
    return f" (attempt {attempt + 1})" if attempt else ""
