"""What can go wrong, named by what the caller can do next.

SkywardError
├── InvalidArgument (ValueError)        fix the argument; nothing was started
├── PoolClosed (RuntimeError)           open the pool first
├── ForkedPoolError (RuntimeError)      use the pool in the process that opened it
├── NestedPoolError (RuntimeError)      a pool inside a body needs allow_nested=True
├── NotSerializable (TypeError)         what cannot travel, and where it hides; the call was not sent
├── TaskError                           a call that failed, other than by an exception of its function
│   ├── TaskCrashed                     the body's process died
│   │   └── TaskOutOfMemory             ... because the kernel ran out of memory
│   ├── TaskTimeout (TimeoutError)      the body was stopped at its time limit
│   ├── Stalled (TimeoutError)          ranks waited for each other, and nothing could come of it
│   ├── NodeLost                        the machine or its agent is gone
│   ├── RefLost                         ... and with it a result that was kept there
│   ├── NodeDiskFull                    a large argument or result found no room on the machine
│   ├── FilesLost                       somebody else has removed files that the pool uses
│   ├── ResultTooLarge                  return less, or raise max_result_bytes
│   ├── ResultNotSerializable (NotSerializable)  the body ran; its result cannot be sent back
│   ├── RemoteError                     an exception of the body whose class cannot travel, as text
│   └── Preempted                       raise it in a body whose machine is being taken away: it is run again
├── SharedError                         something that a shared collection did not do
│   ├── SharedTimeout (TimeoutError)    nothing came in time; says who holds the lock, who is missing
│   ├── BarrierBroken (RuntimeError)    a rank of the barrier was lost, or has given up
│   ├── LockLost (RuntimeError)         another process may have held the lock since
│   ├── SharedLost                      node 0 was lost: the collections are empty again
│   └── SharedTooLarge (ValueError)     pass large data as arguments and results
├── TransferError (OSError)             make room, or choose another path; then push or pull again
├── BootstrapError                      a node could not be set up
│   ├── PythonMismatch                  both sides need the same minor version of Python
│   ├── AcceleratorMismatch             a node has other GPUs than were asked for, too few, or none
│   ├── HostUnreachable                 a host has no known address, refuses, or does not answer
│   ├── ClockSkew                       set the clocks right, on a node or here
│   ├── HostKeyMismatch                 a host shows another key than the one that is known
│   └── AuthenticationFailed            a host accepts none of the keys that were offered
├── MissingPackage (ImportError)        install an optional package on this computer
├── PluginError                         a plugin's hook raised
└── CloudError                          something that a cloud did not do
    ├── NoOffer                         ask for something else; nothing was created
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
from collections.abc import Sequence
from textwrap import indent
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from skyward.api.stacks import Stacks

__all__ = [
    "AcceleratorMismatch",
    "AuthenticationFailed",
    "BarrierBroken",
    "BootstrapError",
    "ClockSkew",
    "CloudError",
    "CloudRefused",
    "CredentialsExpired",
    "CredentialsMissing",
    "FilesLost",
    "ForkedPoolError",
    "HostKeyMismatch",
    "HostUnreachable",
    "InvalidArgument",
    "LockLost",
    "MissingPackage",
    "NestedPoolError",
    "NoCapacity",
    "NoOffer",
    "NoPlace",
    "NodeDiskFull",
    "NodeLost",
    "NoneAvailable",
    "NotGivenBack",
    "NotSerializable",
    "PermissionDenied",
    "PluginError",
    "PoolClosed",
    "Preempted",
    "PythonMismatch",
    "QuotaExceeded",
    "RefLost",
    "RemoteError",
    "ResultNotSerializable",
    "ResultTooLarge",
    "SharedError",
    "SharedLost",
    "SharedTimeout",
    "SharedTooLarge",
    "SkywardError",
    "Stalled",
    "TaskCrashed",
    "TaskError",
    "TaskOutOfMemory",
    "TaskTimeout",
    "TransferError",
]


REMOTE = "remote traceback:"
"""Marks the note of an exception that came from a node."""

_LONGEST = 400


class SkywardError(Exception):
    """Base of every error of Skyward's own."""

    def __repr__(self) -> str:
        first = str(self).partition("\n")[0]
        return f"{type(self).__name__}({first if len(first) <= _LONGEST else first[:_LONGEST] + '...'!r})"


class InvalidArgument(SkywardError, ValueError):
    """A value that cannot work, found before anything was started."""


class MissingPackage(SkywardError, ImportError):
    """An optional package that this computer lacks; the message says how to install it."""


class PoolClosed(SkywardError, RuntimeError):
    """The pool is not open (not entered yet, closing, or closed)."""


class ForkedPoolError(SkywardError, RuntimeError):
    """The pool was opened by another process, of which this one is a fork."""


class NestedPoolError(SkywardError, RuntimeError):
    """A body tried to open a pool of its own."""


class NotSerializable(SkywardError, TypeError):
    """Something that cannot travel to a node, and the path that leads to it."""


class TaskError(SkywardError):
    """A call that failed, other than by an exception of its function."""


class ResultNotSerializable(NotSerializable, TaskError):
    """The body ran to its end, but its result cannot be sent back."""


class ResultTooLarge(TaskError):
    """The result is larger than the pool's `max_result_bytes`; it was not sent."""

    def __init__(self, task: str, size: int, limit: int) -> None:
        super().__init__(task, size, limit)
        self.task, self.size, self.limit = task, size, limit

    def __str__(self) -> str:
        return (
            f"the result of {self.task} takes {self.size:,} bytes, more than max_result_bytes={self.limit:,}; "
            "it was not sent. Return less (write it to a file or a bucket), or raise max_result_bytes on the pool."
        )


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
                f"{self.shared_with} other calls ran in that process and fail with it, since there is no way to tell "
                'which one caused it; executor="process" gives every slot a process of its own. '
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
            "Use smaller batches, a machine with more memory, or fewer slots per node."
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
        loading: bool = False,
    ) -> None:
        super().__init__(task, node, seconds, attempt, killed, rank, loading)
        self.task, self.node, self.rank = task, node, rank
        self.seconds, self.attempt, self.killed, self.loading = seconds, attempt, killed, loading

    def __str__(self) -> str:
        how = "did not end on SIGTERM and was killed" if self.killed else "was stopped"
        if self.loading:
            return (
                f"{self.task} on {_where(self.node, self.rank)} {how}{_again(self.attempt)}: its function and "
                "arguments, and the modules that they import, were still being loaded after the pool's "
                "provision_timeout. Raise provision_timeout=, or find out what the imports do; loading does not count "
                "towards a call's own limit."
            )
        return (
            f"{self.task} on {_where(self.node, self.rank)} ran past its limit of {self.seconds:g} s and {how}"
            f"{_again(self.attempt)}. Raise it with .with_timeout(seconds) or @sky.compute(timeout=...)."
        )


class Stalled(TaskError, TimeoutError):
    """A broadcast was stopped because its ranks waited in a collective for ranks that never arrived."""

    def __init__(self, task: str, explanation: str, seconds: float, stacks: Stacks) -> None:
        Exception.__init__(self, task, explanation, seconds, stacks)  # OSError's own would drop some of them
        self.task, self.explanation, self.seconds, self.stacks = task, explanation, seconds, stacks

    def __str__(self) -> str:
        return (
            f"{self.explanation}\nIt was stopped after stall_timeout={self.seconds:g} s in which no rank did anything "
            f"(ComputePool(stall_timeout=...); None never stops one). Where the ranks stood:\n{self.stacks}"
        )


_TTL = "the pool's ttl"  # in the reason of a NodeLost


class NodeLost(TaskError):
    """The node that ran the call is gone, and `retries` are used up or did not apply."""

    def __init__(self, node: int, task: str = "", reason: str = "", attempts: int = 1, broadcast: bool = False) -> None:
        super().__init__(node, task, reason, attempts, broadcast)
        self.node, self.task, self.reason, self.attempts, self.broadcast = node, task, reason, attempts, broadcast

    def __str__(self) -> str:
        why = self.reason or "no answer"
        if not self.attempts:
            what = f"{self.task} was not started" if self.task else "the call was not started"
            if _TTL in why:
                return f"{what}: {why}. Open the pool again, with a longer ttl=."
            lost = why if why.startswith("no node") else f"node {self.node} is lost ({why})"
            if not self.broadcast:
                return f"{what}: {lost}. Open another pool."
            return (
                f"{what}: {lost}. A broadcast needs all nodes; calls with >> go to those that are left, and a node "
                "that comes back takes part again."
            )
        text = f"{self.task or 'the call'} was running on node {self.node}, which was lost ({why}). "
        if _TTL in why:
            return text + "Open the pool again, with a longer ttl=."
        if self.broadcast:
            return text + "Send it again when all nodes are there; retries=n restarts a broadcast as a whole."
        tried = "once" if self.attempts == 1 else f"{self.attempts} times"
        return text + f"It was started {tried}; retries=n restarts it on another node."


class RefLost(TaskError):
    """A result that was kept on a node is lost with it, and its call may not be restarted."""

    def __init__(self, task: str, node: int, reason: str = "") -> None:
        super().__init__(task, node, reason)
        self.task, self.node, self.reason = task, node, reason

    def __str__(self) -> str:
        return (
            f"the result of {self.task}, which was kept on node {self.node}, is gone ({self.reason or 'no answer'}). "
            "Call it again; a call with retries=n makes such a result again by itself, if it was not sent with `@`."
        )


class Preempted(TaskError):
    """Raise it in a body whose machine is being taken away; within `retries` the body is run again."""

    def __init__(self, message: str = "gave up, since the machine is being taken away") -> None:
        super().__init__(message)


class NodeDiskFull(TaskError):
    """A node had no room for a large argument or result."""

    def __init__(self, task: str, node: int, size: int, reason: str = "", what: str = "an argument") -> None:
        super().__init__(task, node, size, reason, what)
        self.task, self.node, self.size, self.reason, self.what = task, node, size, reason, what

    def __str__(self) -> str:
        if self.what == "an argument":
            advice = (
                "send less at a time; data that every call needs is better read on the node, from a file or a bucket"
            )
        else:
            advice = "return or keep less at a time, or write it to a bucket or a disk that has room"
        return (
            f"node {self.node} has no room for {self.what} of {self.task} that takes {self.size:,} bytes "
            f"({self.reason}: its memory file system and its disks for temporary files are full). Free some space "
            f"there, or {advice}."
        )


class FilesLost(TaskError):
    """Somebody else removed a file with a large argument or an object of the pool."""

    def __init__(self, what: str, path: str) -> None:
        super().__init__(what, path)
        self.what, self.path = what, path

    def __str__(self) -> str:
        return (
            f"{self.what} was in {self.path}, and that file is gone: another program has removed it while the pool was "
            "open. systemd does so when a user logs out (RemoveIPC=yes in logind.conf), and so do programs that clean "
            "/dev/shm or /tmp. Stop that, put the object again if it was put (`pool.put`), and send the call again."
        )


class TransferError(SkywardError, OSError):
    """`pool.push` or `pool.pull` could not copy a file; `node` is None if the reason is on this computer."""

    def __init__(self, node: int | None, path: str, reason: str, errno: int = 0) -> None:
        Exception.__init__(self, node, path, reason, errno)  # OSError's own takes others
        self.node, self.path, self.reason, self.errno = node, path, reason, errno
        self.filename, self.strerror = path, reason

    def __str__(self) -> str:
        where = "on this computer" if self.node is None else f"on node {self.node}"
        text = f"{self.path!r} {where}: {self.reason[:1].lower()}{self.reason[1:]}."
        if self.errno in (_errno.ENOSPC, _errno.EDQUOT):
            return f"{text} Make room there and call it again: what was copied stays."
        if self.errno in (_errno.EACCES, _errno.EPERM, _errno.EROFS):
            return f"{text} Choose another path, or have this user allowed to use it."
        return text


class RemoteError(TaskError):
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
    """A node has other accelerators than requested, too few, or none; nothing was run on it."""


class HostUnreachable(BootstrapError):
    """The host has no known address, refuses connections, or does not answer in time."""


class ClockSkew(BootstrapError):
    """The clocks of this computer and a node differ by more than a day, so certificates are not valid there."""


class HostKeyMismatch(BootstrapError):
    """The host's key is not the known one, or none is known; nothing was sent to it."""


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


def _where(node: int, rank: int | None) -> str:
    return f"node {node}" if rank is None else f"rank {rank} (node {node})"


def _again(attempt: int) -> str:
    return f" (attempt {attempt + 1})" if attempt else ""


class SharedError(SkywardError):
    """Something that a shared collection did not do."""


class SharedTimeout(SharedError, TimeoutError):
    """Nothing came before the timeout; says who holds the lock, or who is missing at the barrier."""


class BarrierBroken(SharedError, RuntimeError):
    """The barrier cannot be passed: a rank was lost, or has given up waiting. `rank` is its number, if it has one."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message, rank)
        self.message, self.rank = message, rank

    def __str__(self) -> str:
        return self.message


class LockLost(SharedError, RuntimeError):
    """This process no longer holds the lock: another one may have held it since."""


class SharedLost(SharedError):
    """The collections of this pool are empty: node 0, which kept them, was lost or restarted."""


class SharedTooLarge(SharedError, ValueError):
    """A value is larger than collections take, or they are full."""


class CloudError(SkywardError):
    """Something that a cloud did not do."""


class NoOffer(CloudError):
    """No offer fits; says what came near and why it does not."""

    def __init__(self, wish: str, where: str, reasons: Sequence[str] = ()) -> None:
        super().__init__(wish, where, tuple(reasons))
        self.wish, self.where, self.reasons = wish, where, tuple(reasons)

    def __str__(self) -> str:
        near = "".join(f"\n  {reason}" for reason in self.reasons[:10])
        more = f"\n  ... and {len(self.reasons) - 10} more" if len(self.reasons) > 10 else ""
        return (
            f"{self.where} has nothing for {self.wish}. Nothing was created."
            + (f" Ruled out:{near}{more}\n" if near else " ")
            + "Ask for something else, or look in another region or partition"
            + (", or raise max_hourly_cost." if "max_hourly_cost" in near else ".")
        )


class NoCapacity(CloudError):
    """Everything that fits was tried, and none is available; nothing was left running."""

    def __init__(self, wish: str, attempts: Sequence[str]) -> None:
        super().__init__(wish, tuple(attempts))
        self.wish, self.attempts = wish, tuple(attempts)

    def __str__(self) -> str:
        tried = "".join(f"\n  {attempt}" for attempt in self.attempts)
        return (
            f"there is no capacity for {self.wish} right now; nothing was left running. Tried, in this order:{tried}\n"
            "Try again later, in another region, with another accelerator, or with "
            'allocation="spot-if-available" if only one price class was allowed.'
        )


class NoneAvailable(NoCapacity):
    """None of several specs is available; says of each why."""

    def __str__(self) -> str:
        reasons = [indent(attempt, " " * 5).lstrip() for attempt in self.attempts]
        tried = "".join(f"\n  {number}. {attempt}" for number, attempt in enumerate(reasons, 1))
        return (
            f"none of {self.wish} is available; nothing was left running. Tried, in this order:{tried}\n"
            "Do what the lines above say, give another sky.Spec(...) to fall back on, or try again later."
        )


class NoPlace(NoCapacity):
    """A cluster of yours gave fewer places than requested; nothing was left running there."""

    def __str__(self) -> str:
        return f"{self.wish}: {'; '.join(self.attempts)}. Nothing was left running."


class NotGivenBack(CloudError):
    """Things of a pool that may still exist; says what they cost and how to end them."""

    def __init__(self, pool: str, region: str, ids: Sequence[str], hourly_cost: float, cause: str) -> None:
        super().__init__(pool, region, tuple(ids), hourly_cost, cause)
        self.pool, self.region, self.ids = pool, region, tuple(ids)
        self.hourly_cost, self.cause = hourly_cost, cause

    def __str__(self) -> str:
        what = ", ".join(self.ids) if self.ids else "what a lost call may have made"
        cost = f" (${self.hourly_cost:,.2f} an hour)" if self.hourly_cost else ""
        return (
            f"pool {self.pool} is not given back yet: {what} in {self.region} may still exist{cost}. {self.cause} "
            f"Run `sky down {self.pool} --yes` to finish it; what runs there ends by itself when its lease is over."
        )


class CloudRefused(CloudError):
    """A call that a cloud refused, or did not answer; `kind` sorts its codes. Providers raise subclasses."""

    def __init__(self, action: str, code: str, message: str, region: str, kind: str = "other") -> None:
        super().__init__(action, code, message, region, kind)
        self.action, self.code, self.message, self.region, self.kind = action, code, message, region, kind

    @property
    def unanswered(self) -> bool:
        """Whether the call may have been carried out nevertheless."""
        return self.kind == "server"

    def __str__(self) -> str:
        text = f"the provider refused {self.action} in {self.region}: {self.message} ({self.code})."
        return f"{text} {self._advice}".rstrip()

    @property
    def _advice(self) -> str:
        match self.kind:
            case "server" | "throttled":
                return "It was tried again for a while. Check the network, and the provider's status page."
            case "capacity":
                return "Try another zone, type or price class, or try later."
            case _:
                return "Check the provider's settings, and what exists in this account."


class CredentialsMissing(CloudRefused):
    """Nobody is logged in, or the cloud does not know who it is; nothing was created."""

    def __init__(
        self,
        action: str,
        code: str,
        message: str,
        region: str,
        kind: str = "credentials",
        looked_at: Sequence[str] = (),
    ) -> None:
        super().__init__(action, code, message, region, kind)
        self.looked_at = tuple(looked_at)
        self.args = (*self.args, self.looked_at)

    @property
    def _advice(self) -> str:
        looked = f"Looked at: {', '.join(self.looked_at)}. " if self.looked_at else ""
        return f"{looked}Nothing was created. Log in, or give the provider credentials that work."


class CredentialsExpired(CloudRefused):
    """The login has expired."""

    @property
    def _advice(self) -> str:
        return (
            "The login has expired. Machines end themselves when their lease runs out. Log in again, then "
            "`sky down --all --yes` gives back what is left; `sky ps` shows it."
        )


class PermissionDenied(CloudRefused):
    """The account, or the user in it, is not allowed to do this."""

    @property
    def _advice(self) -> str:
        return f"Have {self.action} allowed for this user."


class QuotaExceeded(CloudRefused):
    """A quota of the account is used up; other places in the same region would refuse, too."""

    def __init__(self, action: str, code: str, message: str, region: str, kind: str = "quota", quota: str = "") -> None:
        super().__init__(action, code, message, region, kind)
        self.quota = quota
        self.args = (*self.args, quota)

    @property
    def _advice(self) -> str:
        which = f"the quota {self.quota}" if self.quota else "the quota"
        return f"Nothing was left running. Have {which} raised, or use another region, smaller machines or fewer nodes."


for _name in __all__:
    globals()[_name].__module__ = __name__  # by which users know them, and pickles name them
