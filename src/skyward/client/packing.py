"""Turns pending calls into bytes: functions, arguments, large buffers, objects that stay, calls among the arguments."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, cast

from skyward.api.brief import described
from skyward.api.compute import PendingCompute
from skyward.api.ref import Ref, checked_keep
from skyward.client.call import Call
from skyward.client.callbacks import UserCode
from skyward.client.functions import remembers_nothing, streamed_parameters, unbound
from skyward.client.kept import KeptResult
from skyward.client.logs import Watch
from skyward.client.refs import Keeper, Refs
from skyward.transport import blobs, definitions
from skyward.transport.frames import nbytes
from skyward.transport.payload import Packed, Packer
from skyward.transport.refs import KEY_BYTES, FoundCalls, collected, reduce_call

__all__ = ["Packing"]

definitions.add(PendingCompute, reduce_call)


class _Batch:
    """What calls that are sent together share."""

    def __init__(self, retries: int) -> None:
        self.retries = retries
        self.functions: dict[int, tuple[str, list[Any], dict[str, Ref[Any]]]] = {}
        self.found = FoundCalls()
        self.results: dict[str, KeptResult] = {}  # those of calls among the arguments
        self.limits: dict[str, float | None] = {}  # their time limits, where they have none of their own


class Packing:
    """Turns pending calls into bytes; a function that occurs many times at once is pickled once."""

    def __init__(self, packer: Packer, store: blobs.Store, shared: bool, user: UserCode | None = None) -> None:
        self._packer, self._store, self._user = packer, store, user
        self._shared = shared  # whether nodes read the store's files themselves
        self._logging = Watch()
        self._digests: weakref.WeakKeyDictionary[FunctionType, tuple[Packed, str]] = weakref.WeakKeyDictionary()
        self._refs: Refs

    def refs(self, keeper: Keeper) -> Refs:
        """What makes Refs to objects that these calls may use."""
        self._refs = Refs(self._packer, self._store, keeper)
        return self._refs

    def calls(
        self, pending: Sequence[PendingCompute[Any]], retries: int, inner_retries: int | None = None
    ) -> list[Call]:
        """The calls, ready to be sent; raises NotSerializable before any of them is.

        Calls among their arguments are the `inner` ones of the first; these have `inner_retries`.
        """
        batch = _Batch(retries)
        made = [self._made(item, batch) for item in pending]
        batch.retries = retries if inner_retries is None else inner_retries
        inner: list[Call] = []
        for item, key in batch.found.all:  # grows meanwhile: calls among the arguments of those
            limited = item if item.timeout is not None else item.with_timeout(batch.limits[key])
            inner.append(self._made(limited, batch, batch.results[key]))
        if inner:
            made[0].inner = inner
        return made

    def copies(self, pending: PendingCompute[Any], count: int, attempt: int, inner_retries: int) -> list[Call]:
        """The same call several times over the same bytes, for a broadcast."""
        first = self.calls([pending], 0, inner_retries)[0]
        if first.inputs and count > 1:
            self._store.release(first.uploads)
            name = next(iter(first.inputs))
            raise TypeError(
                f"argument {name} of {first.name} is an iterator: it can be read once, not by {count} ranks."
            )
        rest: list[Call] = []
        for _ in range(count - 1):
            self._store.retain(first.uploads)
            copy = Call(pending, dict(first.about), first.pieces, first.uploads, {}, 0, self._user)
            copy.needs, copy.holds = first.needs, first.holds
            if pending.kept:
                self._keep(copy, pending)
            rest.append(copy)
        for call in (first, *rest):
            call.attempt = attempt
        return [first, *rest]

    def drop(self, calls: Sequence[Call]) -> None:
        """Lets go of what calls need that were packed and never sent."""
        for call in calls:
            self._store.release(call.uploads)

    def _made(self, item: PendingCompute[Any], batch: _Batch, result: KeptResult | None = None) -> Call:
        """One call; `result` is what it makes, if it is an argument of another."""
        streams = streamed_parameters(item)
        fn, args, kwargs = unbound(item)
        if result is not None:
            checked_keep(fn, item.name)
        known = batch.functions.get(id(fn))
        if known is None:
            with collected(self._store) as refs:
                known = batch.functions[id(fn)] = (*self._function(fn, f"function {item.name}"), refs)
        if streams[0] and (shift := len(args) - len(item.args)):
            streams = {index + shift for index in streams[0]}, streams[1]
        call = self._call(item, *known, args, kwargs, *streams, batch)
        if result is not None:
            call.keeps, call.about["keep"] = result, result.key
        elif item.kept:
            self._keep(call, item)
        return call

    def _keep(self, call: Call, item: PendingCompute[Any]) -> None:
        """Has the result of a call stay on its node; the user gets a Ref to it."""
        call.keeps = KeptResult(os.urandom(KEY_BYTES).hex(), call.name)
        call.about["keep"] = call.keeps.key
        call.ref = self._refs.kept(call.keeps, described(item.name, item.args, item.kwargs))

    def _function(self, fn: Callable[..., Any], name: str) -> tuple[str, list[Any]]:
        packed = self._packer.pack_function(fn, name)
        head, buffers = packed
        known = self._digests.get(fn) if isinstance(fn, FunctionType) else None
        if known is not None and known[0] is packed:
            return known[1], [head, *buffers]
        digest = _digest(packed) if remembers_nothing(fn) else ""
        if isinstance(fn, FunctionType):
            self._digests[fn] = packed, digest
        return digest, [head, *buffers]

    def _call(
        self,
        item: PendingCompute[Any],
        digest: str,
        function: list[Any],
        refs: dict[str, Ref[Any]],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        positions: set[int],
        names: set[str],
        batch: _Batch,
    ) -> Call:
        inputs: dict[str, Any] = {}
        if positions or names:
            inputs = {str(i): args[i] for i in positions} | {k: kwargs[k] for k in names}
            args = tuple(None if i in positions else a for i, a in enumerate(args))
            kwargs = {k: None if k in names else v for k, v in kwargs.items()}
        packed, taken, name = self._packer.pack_simple((args, kwargs)), (), item.name
        if packed is None:
            with collected(self._store) as found, batch.found.among() as taken:
                packed = self._packer.pack((args, kwargs), f"arguments of {name}")
            refs = refs | found if found else refs
        pieces: list[Any] = [*function, packed[0], *packed[1]]
        about: dict[str, Any] = {"name": name, "fn": digest, "split": len(function), "attempt": 0}
        if item.timeout is not None:
            about["timeout"] = item.timeout
        if inputs:
            about["streams"] = list(inputs)
        if item.chunk is not None and item.chunk.keep:
            about["each"] = True
        if (logging_now := self._logging.news()) is not None:
            about["log"] = logging_now
        uploads: dict[str, blobs.Blob] = {}
        for index, piece in enumerate(pieces):
            if nbytes(piece) >= blobs.LARGE:
                key, blob = self._store.put(piece)
                if key in uploads:
                    self._store.release([key])  # the same content twice in one call counts once
                uploads[key] = blob
                about.setdefault("blobs", {})[str(index)] = blob if self._shared else (key, blob[1])
                pieces[index] = b""
            elif isinstance(piece, memoryview):
                pieces[index] = bytes(
                    cast("memoryview[int]", piece)
                )  # the caller may change its array as soon as we return
        for key, ref in refs.items():
            if ref.kept is not None:
                continue  # it is on a node, which is known when the call is sent
            about.setdefault("refs", {})[key] = len(pieces), len(ref.blobs)
            self._store.retain({name for name, _ in ref.blobs if name not in uploads})
            for name, blob in ref.blobs:
                uploads[name] = blob
                about.setdefault("blobs", {})[str(len(pieces))] = blob if self._shared else (name, blob[1])
                pieces.append(b"")
        chosen = batch.retries if item.retries is None else item.retries
        call = Call(item, about, pieces, uploads, inputs, chosen, self._user)
        if refs:
            call.holds = list(refs.values())
            call.needs = [ref.kept for ref in call.holds if ref.kept is not None]
        for key in taken:
            batch.limits.setdefault(key, item.timeout)
            result = batch.results.get(key)
            if result is None:
                inner = next(call for call, known in reversed(batch.found.all) if known == key)
                result = batch.results[key] = KeptResult(key, inner.name)
            call.needs = [*call.needs, result]
        return call


def _digest(packed: Packed) -> str:
    import xxhash

    made = xxhash.xxh3_128(packed[0])
    for buffer in packed[1]:
        made.update(buffer)
    return made.hexdigest()
