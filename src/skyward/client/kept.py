"""Results that stay on nodes: who has them, which calls wait for them, when they are recomputed or released.

call with .keep() --result--> "there", on a node <--taken by-- other calls
every node that has it is lost --> "making", if its call has attempts left; else "lost"
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from skyward import events
from skyward.client.actions import (
    CallBack,
    Discard,
    Emit,
    Fetch,
    Free,
    GetFailed,
    Got,
    KeptAction,
    MakeAgain,
    Post,
    Release,
    Unblock,
    Unwanted,
    Upload,
)
from skyward.errors import RefLost
from skyward.node.protocol import NO_BLOBS, Blobs, ClientToAgent, Header, Returned
from skyward.transport.blobs import KEY, Blob, kept_names
from skyward.transport.frames import Malformed

if TYPE_CHECKING:
    from skyward.client.call import Call, CallFuture

__all__ = ["Kept", "KeptResult"]

_RATE = 100e6  # bytes a second: how fast a result is thought to come to another node
_LONGEST = 10.0


@dataclass(eq=False)
class KeptResult:
    key: str
    name: str
    state: str = "making"  # or there, lost, failed
    uses: int = 0  # Refs of users, open calls that take it, results that would be made again from it
    call: Call | None = None  # the one that makes it, or would make it again
    node: int = -1  # where it was made
    size: int = 0
    blobs: list[Blob] = field(default_factory=list[Blob])  # by name; on this computer by path
    where: set[int] = field(default_factory=set[int])  # nodes that are known to have it
    told: set[int] = field(default_factory=set[int])  # nodes that may have something of it
    error: BaseException | None = None
    noted: bool = False  # whether the error says which call has failed because of it
    home: list[Blob] = field(default_factory=list[Blob])  # a copy here, for nodes that cannot reach each other
    awaited: set[int] = field(default_factory=set[int])  # nodes that get it from here, as soon as it has come
    gets: list[CallFuture[Any]] = field(default_factory=list["CallFuture[Any]"])  # who waits until it is made again
    waiters: dict[str, Call] = field(default_factory=dict[str, "Call"])  # calls that wait until it is made


class Kept:
    def __init__(self, pool: str, local: bool) -> None:
        self._pool, self._local = pool, local
        self.results: dict[str, KeptResult] = {}
        self.closing = False
        self._requests: dict[int, tuple[KeptResult, int, CallFuture[Any] | None]] = {}
        self._count = itertools.count(1)
        self.out: list[KeptAction] = []  # what `take` gives next

    def take(self) -> list[KeptAction]:
        out, self.out = self.out, []
        return out

    # calls

    def submitted(self, call: Call) -> None:
        for result in call.needs:
            result.uses += 1
        if call.keeps is not None:
            call.keeps.call = call
            self.results[call.keeps.key] = call.keeps

    def trouble(self, call: Call) -> KeptResult | None:
        return next((result for result in call.needs if result.error is not None), None)

    def block(self, call: Call) -> bool:
        call.lacks = {result.key for result in call.needs if result.state == "making"}
        for result in call.needs:
            if result.key in call.lacks:
                result.waiters[call.id] = call
        return bool(call.lacks)

    def preference(self, call: Call) -> tuple[int | None, float]:
        there: dict[int, int] = {}
        for result in call.needs:
            for node in result.where:
                there[node] = there.get(node, 0) + result.size + 1
        if not there:
            return None, 0.0
        best = max(sorted(there), key=there.__getitem__)
        return best, min(_LONGEST, there[best] / _RATE)

    def filled(self, call: Call) -> tuple[Header, list[Any], list[Fetch]]:
        header, pieces, number = call.header.copy(), list(call.pieces), call.node
        refs: dict[str, tuple[int, int]] = {}
        blobs = header["blobs"] = dict(header.get("blobs", NO_BLOBS))
        call.given = [result.blobs for result in call.needs]
        fetches: list[Fetch] = []
        for result in call.needs:
            refs[result.key] = len(pieces), len(result.blobs)
            for blob in result.blobs:
                blobs[str(len(pieces))] = blob
                pieces.append(b"")
            result.told.add(number or 0)
            sources = sorted(result.where - {number})
            if not self._local and number is not None and number not in result.where and sources:
                fetches.append(Fetch(number, result.blobs, sources))
        header["refs"] = refs | header.get("refs", {})  # in this order: objects that were put may hold kept results
        return header, pieces, fetches

    def seen(self, call: Call, number: int) -> None:
        for result, given in zip(call.needs, call.given, strict=False):
            if result.state == "there" and given is result.blobs:
                result.where.add(number)

    def left(self, call: Call) -> None:
        for result in call.needs if call.lacks else ():
            result.waiters.pop(call.id, None)
        if call.keeps is None:
            self._release_all(call.needs)

    # the calls that make results

    def check(self, call: Call, result: Returned) -> None:
        key = call.keeps.key if call.keeps is not None else None
        if result.kept != key:
            raise Malformed("a result that was to stay, or was not")
        names = [name for name, _ in _in_order(result.blobs)]
        if key and not self._local and names != kept_names(key, call.attempt, len(names)):
            raise Malformed("a kept result under the name of another")

    def leftover(self, result: Returned) -> Blobs:
        return NO_BLOBS if result.kept is not None and not self._local else result.blobs

    def made(self, call: Call, number: int, named: Blobs, *, again: bool) -> None:
        """`again` if it may be recomputed should the node be lost."""
        result, blobs = call.keeps, _in_order(named)
        assert result is not None
        result.state, result.error, result.node, result.where = "there", None, number, {number}
        result.blobs, result.size = blobs, sum(size for _, size in blobs)
        if not again:
            self._drop_call(result)
        if not result.uses:
            self._free(result)
            return
        self._unblock(result)
        gets, result.gets = result.gets, []
        for future in gets:
            self.get(result, future)

    def failed(self, call: Call, error: BaseException) -> None:
        result = call.keeps
        if result is None:
            return
        self._drop_call(result)
        self._end(result, "failed", error)
        if not result.uses:
            self._free(result)

    def hold(self, result: KeptResult) -> None:
        result.uses += 1

    def release(self, result: KeptResult) -> None:
        result.uses -= 1
        if result.uses > 0:
            return
        if result.state == "making" and result.call is not None:
            self.out.append(Unwanted(result.call))  # its end frees the rest
        else:
            self._free(result)

    # nodes

    def lose_node(self, number: int, reason: str) -> None:
        for result in list(self.results.values()):
            result.where.discard(number)
            result.told.discard(number)
            result.awaited.discard(number)
            if result.state == "there" and not result.where and not result.home and not self._local:
                self._gone(result, number, reason)
        for request, (result, source, future) in list(self._requests.items()):
            if source == number:
                del self._requests[request]
                self._ask_again(result, future)

    def vanished(self, result: KeptResult) -> None:
        result.where.clear()
        self._gone(result, result.node, "its files were removed by another program")

    def need(self, number: int, name: str) -> None:
        result = self.results.get(name[:KEY])
        if result is None:
            return  # whoever needed it has ended
        if result.state == "there" and any(name == known for known, _ in result.blobs):
            result.where.discard(number)
            if not result.where and not result.home:
                self._gone(result, number, "it is no longer there")
        if result.state == "there" and any(name == known for known, _ in result.blobs):
            self._through_client(result, number)
        else:
            self.out.append(CallBack(number, result))

    def get(self, result: KeptResult, future: CallFuture[Any]) -> None:
        if result.key not in self.results:
            dropped = ValueError(f"the Ref to the result of {result.name} was dropped while it was being fetched.")
            self.out.append(GetFailed(future, result.error or dropped))
        elif result.error is not None:
            self.out.append(GetFailed(future, result.error))
        elif result.state == "making":
            result.gets.append(future)
        elif self._local or result.home:
            self.out.append(Got(future, result.home or result.blobs, False))
        else:
            self._ask(result, future)

    def brought(self, number: int, request: int, named: Blobs, incomplete: str | None) -> None:
        result, source, future = self._requests.pop(request, (None, -1, None))
        if result is None or source != number:
            self.out.append(Discard(named))
            return
        blobs = _in_order(named)
        if incomplete is not None or [size for _, size in blobs] != [size for _, size in result.blobs]:
            self.out.append(Discard(named))
            result.where.discard(number)
            gone = result.key in self.results and result.state == "there" and not result.where and not result.home
            if gone:
                self._gone(result, number, incomplete or "it is no longer there")
            self._ask_again(result, future)
        elif future is not None:
            self.out.append(Got(future, blobs, True))
        elif result.key not in self.results:
            self.out.append(Discard(named))
        else:
            result.home = blobs
            awaited, result.awaited = result.awaited, set()
            for node in sorted(awaited):
                self._through_client(result, node)

    def abandon(self, error: Callable[[Any], BaseException]) -> None:
        self.closing = True
        waiting = [(result, future) for result, _, future in self._requests.values() if future is not None]
        waiting += [(result, future) for result in self.results.values() for future in result.gets]
        self._requests.clear()
        self.out += [GetFailed(future, error(result)) for result, future in waiting]

    # the machinery

    def _gone(self, result: KeptResult, number: int, reason: str) -> None:
        call, text = result.call, f"the result of {result.name}, which node {number} kept, is gone ({reason})"
        result.awaited, awaited = set[int](), result.awaited
        if call is not None and not self.closing:
            again = call.again()
            result.state, result.call = "making", again
            note = f"{text}; it is recomputed, retry {again.attempt} of {call.retries}."
            self.out.append(Emit(events.Notice(self._pool, note, "warning")))
            self.out.append(MakeAgain(again))
        else:
            self._end(result, "lost", RefLost(result.name, number, reason))
        self.out += [CallBack(node, result) for node in sorted(awaited)]

    def _end(self, result: KeptResult, state: str, error: BaseException) -> None:
        result.state, result.error, result.where = state, error, set()
        self._unblock(result)
        gets, result.gets = result.gets, []
        self.out += [GetFailed(future, error) for future in gets]

    def _unblock(self, result: KeptResult) -> None:
        waiters, result.waiters = result.waiters, {}
        for call in waiters.values():
            call.lacks = call.lacks - {result.key}
            if result.error is not None or not call.lacks:
                self.out.append(Unblock(call))

    def _drop_call(self, result: KeptResult) -> None:
        call, result.call = result.call, None
        if call is not None:
            self.out.append(Release(list(call.uploads)))
            self._release_all(call.needs)

    def _release_all(self, results: Iterable[KeptResult]) -> None:
        for result in results:
            self.release(result)

    def _free(self, result: KeptResult) -> None:
        if self.results.pop(result.key, None) is None:
            return
        self._drop_call(result)
        paths = [path for path, _ in (result.home, result.blobs)[self._local]]
        names = [] if self._local else [name for name, _ in result.blobs]
        self.out.append(Free(result.key, sorted(result.told), paths, names))
        gets, result.gets = result.gets, []
        for future in gets:
            self.get(result, future)  # says that it is gone

    def _through_client(self, result: KeptResult, number: int) -> None:
        if result.home:
            names = [name for name, _ in result.blobs]
            self.out.append(Upload(number, dict(zip(names, result.home, strict=True))))
            return
        result.awaited.add(number)
        if not any(of is result and future is None for of, _, future in self._requests.values()):
            self._ask(result, None)

    def _ask(self, result: KeptResult, future: CallFuture[Any] | None) -> None:
        request, source = next(self._count), min(result.where)
        self._requests[request] = result, source, future
        self.out.append(Post(source, [ClientToAgent.Bring(request, result.key)]))

    def _ask_again(self, result: KeptResult, future: CallFuture[Any] | None) -> None:
        if future is not None:
            self.get(result, future)
        elif result.awaited and result.state == "there" and result.where and result.key in self.results:
            self._ask(result, None)


def _in_order(named: Blobs) -> list[Blob]:
    return [(name, size) for _, (name, size) in sorted(named.items(), key=lambda entry: int(entry[0]))]
