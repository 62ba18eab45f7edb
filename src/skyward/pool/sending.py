"""Sends the calls of an open pool; a broadcast is a gang, which succeeds, fails and is retried as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from skyward.api.compute import Chunk, PendingCompute
from skyward.api.context import PoolContext
from skyward.api.futures import AwaitableFuture
from skyward.client import gather
from skyward.client.futures import wait_for_all
from skyward.errors import NodeLost
from skyward.pool.mistakes import not_a_single_call
from skyward.transport.exceptions import original

if TYPE_CHECKING:
    from skyward.client.call import Call
    from skyward.client.engine import Engine
    from skyward.client.packing import Packing

__all__ = ["Sender"]

T = TypeVar("T")

_KEPT = Chunk(1, keep=True)
_JOINING = ("torch", "jax", "keras", "huggingface")  # plugins whose frameworks have collectives


@dataclass(frozen=True)
class Sender:
    context: PoolContext
    engine: Engine
    packing: Packing
    retries: int
    timeout: float | None
    _warned: set[str] = field(default_factory=set[str])

    def send(
        self, calls: Sequence[PendingCompute[Any]], owner: object, alone: bool = False, keep: bool = False
    ) -> list[AwaitableFuture[Any]]:
        """`alone` if a user sent this one with `>>` or `>`. With `keep`, failures are results (`return_exceptions`)."""
        if alone and self.context.forms_groups and len(self.engine.ranks) > 1:
            self._warn_of_groups(calls[0])
        packed = self.packing.calls([self.limited(call) for call in calls], self.retries)
        for call in packed:
            call.future.owner = owner
            if keep and call.chunk is None:
                call.chunk = _KEPT
        futures: list[AwaitableFuture[Any]] = [call.future for call in packed]
        try:
            self.engine.send(packed)
        except Exception:  # not an interrupt, which may come after they were queued
            self.packing.drop(packed)
            raise
        return futures

    def _warn_of_groups(self, call: PendingCompute[Any]) -> None:
        joined = [plugin.name for plugin in self.context.plugins if plugin.around_app and plugin.name in _JOINING]
        if joined and isinstance(call, PendingCompute) and call.name not in self._warned:
            self._warned.add(call.name)
            self.context.warn(
                f"{call.name} is sent to one node (>>), in a pool whose nodes form a group ({', '.join(joined)}). If "
                "it trains with the others or calls a collective, it will wait for them forever: send it to all, "
                f"with `{call.name}(...) @ pool`. If it needs no other node, all is well."
            )

    def broadcast(self, call: PendingCompute[T], owner: object) -> list[T]:
        call, attempt = self.limited(call), 0
        while True:
            ranks = self.packing.copies(call, len(self.engine.ranks), attempt, self.retries)
            for rank in ranks:
                rank.future.owner = owner
            try:
                results = self._run_together(ranks)
            except NodeLost as exc:
                if attempt >= (call.retries or 0) or not exc.attempts:
                    raise
                attempt += 1
                self.context.warn(
                    f"{call.name} has lost node {exc.node} ({exc.reason}); all {len(ranks)} start again when every "
                    f"node is there, retry {attempt} of {call.retries}."
                )
                continue
            if results is not None:
                return results

    def limited(self, call: PendingCompute[T]) -> PendingCompute[T]:
        if not isinstance(call, PendingCompute):
            raise not_a_single_call(call)
        return call.with_timeout(self.timeout) if call.timeout is None and self.timeout is not None else call

    def _run_together(self, ranks: Sequence[Call]) -> list[Any] | None:
        """None if a node joined before they were sent."""
        futures = [rank.future for rank in ranks]
        try:
            sent = self.engine.send_to(list(enumerate(ranks)), len(ranks))
        except Exception:
            self.packing.drop(ranks)
            raise
        if not sent:
            self.packing.drop(ranks)
            return None
        try:
            wait_for_all(futures)
        except BaseException:
            for future in futures:
                future.cancel()
            raise
        # not `rank.future`: once a generator has begun, that is the one of its end
        errors = [(rank, gather.error_of(future)) for rank, future in zip(ranks, futures, strict=True)]
        failed = [(rank, error) for rank, error in errors if error is not None]
        if failed:  # the rank that failed by itself, not those that were stopped because of it
            rank, error = min(failed, key=lambda pair: pair[0].stopping is not None)
            cause = rank.cause  # if it streams, its future has a result
            raise original(cause or error)
        return [future.result() for future in futures]
