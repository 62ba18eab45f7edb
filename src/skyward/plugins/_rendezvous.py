"""The ranks of a pool find each other before a framework forms its group.

    rank 0 .. n-1  --- here I am, over the pool's own links --->  the agent of node 0, which waits until all are there
    rank 0 .. n-1  <-- what rank 0 has brought ----------------   the agent of node 0

It is a shared collection (`node/shared/waits.py: Meeting`), so nothing listens for it, and only ranks of the pool can
come. Each broadcast has a meeting of its own, so groups never mix. A framework that waits for a missing node cannot be
stopped, or ends its process; so all waiting is done here.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

from skyward.api.info import InstanceInfo, current_broadcast, current_call, require_peers
from skyward.errors import InvalidArgument, SharedLost, SharedTimeout, SkywardError
from skyward.node.shared.names import current_channel
from skyward.plugins._ranks import called, everyone, this_rank

__all__ = ["Rendezvous"]

log = logging.getLogger("skyward")

_NOTICE = 10.0
_NOTICE_ALONE = 0.5
_AGAIN = 0.1
_ADVICE = (
    "A group needs the call on every node: send it with `call() @ pool`; `>>` sends it to one. "
    "If it was, look what keeps the others from starting it, or a firewall from reaching node 0."
)


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks of a group meet, and how long they wait for each other.

    `group` is what messages call it. `port` is the one that was chosen for the framework when the runners were made:
    those of an earlier time have another one, and meet elsewhere. `option` is the user's name for the time limit, if
    there is one.
    """

    group: str
    info: InstanceInfo
    port: int
    seconds: float
    option: str = ""

    def meet(self, value: Any = None) -> Any:
        """Waits for all ranks; returns, on each of them, the `value` of rank 0. It can be written as JSON."""
        require_peers(self.info)
        if self.info.world_size < 2:
            return value
        began, notice = time.monotonic(), self._notice()
        while True:
            left = began + min(notice, self.seconds) - time.monotonic()
            try:
                return self._join(value, max(0.0, left))
            except SharedTimeout as exc:
                missing: list[int] = exc.args[0]
            except SharedLost:  # node 0 cannot be reached, or was restarted
                missing = [0]
                time.sleep(_AGAIN)
            except InvalidArgument as exc:
                raise self._taken(str(exc)) from exc
            waited = time.monotonic() - began
            if waited >= self.seconds and missing:
                raise self._failure(missing)
            if waited >= notice and missing:
                notice = float("inf")
                # as a record: handlers of the client get it, also if its console is silent
                log.warning("%s, at most %g s. %s", self._waiting(missing), self.seconds, _ADVICE)

    def port_taken(self, reason: str) -> SkywardError:
        """The error of a port that was free when the pool opened."""
        return self._taken(
            f"port {self.port} of node 0, chosen for {self.group} when the pool opened, is not free any more "
            f"({reason}): another program has taken it, or another runner of the node."
        )

    def _join(self, value: Any, timeout: float) -> Any:
        name = f"skyward/{self.group}/{self.port}/{current_broadcast() or ''}"
        return current_channel().ask("meeting", name, "join", [value], timeout=timeout)[0]

    def _notice(self) -> float:
        """After how many seconds the user is told; in a call to one node the others may well never come."""
        return _NOTICE_ALONE if current_call() is not None and current_broadcast() is None else _NOTICE

    def _waiting(self, missing: list[int]) -> str:
        return f"{this_rank(self.info)} waits for {called(self.info, missing)} to form {self.group}"

    def _failure(self, missing: list[int]) -> SkywardError:
        limit = f"{self.option}={self.seconds:g} s" if self.option else f"{self.seconds:g} s"
        return SkywardError(
            f"{self._waiting(missing)}. It needs {everyone(self.info)}, but {called(self.info, missing)} did not come "
            f"within {limit}. {_ADVICE}"
        )

    def _taken(self, reason: str) -> SkywardError:
        return SkywardError(
            f'{reason} A group has one process for each rank: if the pool has executor="process", open it without.'
        )
