"""Pending calls as bytes: functions, arguments, large buffers, Refs, calls among the arguments."""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import os
import typing
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import BuiltinFunctionType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any, NamedTuple, Protocol, TypeVar, cast

from skyward.api.brief import brief, described
from skyward.api.compute import PendingCompute
from skyward.api.ref import Ref, checked_keep
from skyward.client.call import Call, CallFuture
from skyward.client.futures import UserCode
from skyward.client.kept import KeptResult
from skyward.client.output import Watch
from skyward.errors import FilesLost, PoolClosed
from skyward.node.items import EachItem
from skyward.node.protocol import Header
from skyward.node.settings import LogSettings
from skyward.transport import blobs, definitions
from skyward.transport.frames import Buffer, nbytes
from skyward.transport.payload import Packed, Packer, unpack
from skyward.transport.refs import KEY_BYTES, FoundCalls, collected, reduce_call
from skyward.transport.threads import run_in_thread

__all__ = ["Keeper", "Packing", "Refs", "Sent", "streamed_parameters"]


definitions.add(PendingCompute, reduce_call)

_GENERATOR = inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR


PackedFunction = tuple[str, list[Any], dict[str, Ref[Any]]]
"""A digest if nodes may keep the function; its bytes; its objects."""


@dataclass(frozen=True)
class Sent:
    """What a call was sent as before; replaces the function when it is sent again."""

    header: Header
    pieces: Sequence[Buffer]

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("only nodes can call it")


class _Batch:
    def __init__(self, retries: int) -> None:
        self.retries = retries
        self.functions: dict[int, PackedFunction] = {}
        self.found = FoundCalls()
        self.results: dict[str, KeptResult] = {}  # those of calls among the arguments
        self.limits: dict[str, float | None] = {}  # their time limits, where they have none of their own
        self.pinned: list[str] = []  # the large buffers that they need, once for each call
        self.logging: LogSettings | None = None  # what nodes are told with each


class Packing:
    def __init__(self, packer: Packer, store: blobs.Store, shared: bool, user: UserCode | None = None) -> None:
        self._packer, self._store, self._user = packer, store, user
        self._shared = shared  # whether nodes read the store's files themselves
        self._logging = Watch()
        self._digests: weakref.WeakKeyDictionary[FunctionType, tuple[Packed, str]] = weakref.WeakKeyDictionary()
        self._maps: weakref.WeakKeyDictionary[EachItem, PackedFunction] = weakref.WeakKeyDictionary()
        self._refs: Refs

    def refs(self, keeper: Keeper) -> Refs:
        self._refs = Refs(self._packer, self._store, keeper)
        return self._refs

    def calls(
        self, pending: Sequence[PendingCompute[Any]], retries: int, inner_retries: int | None = None
    ) -> list[Call]:
        """Raises NotSerializable before any is sent. Calls among their arguments are the `inner` ones of the first."""
        batch = _Batch(retries)
        batch.logging = self._logging.news()
        try:
            return self._packed(pending, batch, inner_retries)
        except BaseException:  # nobody will release them
            self._store.release(batch.pinned)
            raise

    def _packed(self, pending: Sequence[PendingCompute[Any]], batch: _Batch, inner_retries: int | None) -> list[Call]:
        retries, made = batch.retries, [self._made(item, batch) for item in pending]
        batch.retries = retries if inner_retries is None else inner_retries
        inner: list[Call] = []
        for item, key in batch.found.all:  # grows meanwhile: calls among the arguments of those
            limited = item if item.timeout is not None else item.with_timeout(batch.limits[key])
            inner.append(self._made(limited, batch, batch.results[key]))
        if inner:
            made[0].inner = inner
        return made

    def copies(self, pending: PendingCompute[Any], count: int, attempt: int, inner_retries: int) -> list[Call]:
        first = self.calls([pending], 0, inner_retries)[0]
        if first.inputs and count > 1:
            self.drop([first])
            name = next(iter(first.inputs))
            raise TypeError(
                f"argument {name} of {first.name} is an iterator: it can be read once, not by {count} ranks."
            )
        rest: list[Call] = []
        for _ in range(count - 1):
            self._store.retain(first.uploads)
            copy = Call(pending, first.header.copy(), first.pieces, first.uploads, {}, 0, self._user)
            copy.needs, copy.holds, copy.yields = first.needs, first.holds, first.yields
            if pending.kept:
                self._keep(copy, pending)
            rest.append(copy)
        for call in (first, *rest):
            call.attempt = attempt
        return [first, *rest]

    def drop(self, calls: Sequence[Call]) -> None:
        for call in calls:
            self._store.release(call.uploads)
            self.drop(call.inner)

    def _made(self, item: PendingCompute[Any], batch: _Batch, result: KeptResult | None = None) -> Call:
        if isinstance(item.fn, Sent):
            again, pieces = cast("Header", {**item.fn.header}), list(item.fn.pieces)
            return Call(item, again, pieces, self._uploads(again, pieces, batch), {}, batch.retries, self._user)
        streams = streamed_parameters(item)
        fn, args, kwargs = unbound(item)
        if result is not None:
            checked_keep(fn, item.name)
        known = self._maps.get(fn) if isinstance(fn, EachItem) else batch.functions.get(id(fn))
        if known is None:
            with collected(self._store) as refs:
                known = (*self._function(fn, f"function {item.name}"), refs)
            if isinstance(fn, EachItem):
                self._maps[fn] = known
            else:
                batch.functions[id(fn)] = known
        if streams[0] and (shift := len(args) - len(item.args)):
            streams = {index + shift for index in streams[0]}, streams[1]
        call = self._call(item, *known, args, kwargs, *streams, batch)
        call.yields = isinstance(fn, FunctionType) and bool(fn.__code__.co_flags & _GENERATOR)
        if result is not None:
            call.keeps, call.header["keep"] = result, result.key
        elif item.kept:
            self._keep(call, item)
        return call

    def _keep(self, call: Call, item: PendingCompute[Any]) -> None:
        call.keeps = KeptResult(os.urandom(KEY_BYTES).hex(), call.name)
        call.header["keep"] = call.keeps.key
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
        header: Header = {"name": name, "fn": digest, "split": len(function), "attempt": 0}
        if item.timeout is not None and item.timeout < math.inf:
            header["timeout"] = item.timeout
        if inputs:
            header["streams"] = list(inputs)
        if item.chunk is not None and item.chunk.keep:
            header["each"] = True
        if batch.logging is not None:
            header["log"] = batch.logging
        uploads = self._uploads(header, pieces, batch)
        for key, ref in refs.items():
            if ref.kept is not None:
                continue  # it is on a node, which is known when the call is sent
            header.setdefault("refs", {})[key] = len(pieces), len(ref.blobs)
            if (gone := next((path for _, (path, _) in ref.blobs if not os.path.exists(path)), None)) is not None:
                raise FilesLost(f"an object that was put, an argument of {item.name},", gone)
            more = {name for name, _ in ref.blobs if name not in uploads}
            self._store.retain(more)
            batch.pinned += more
            for name, blob in ref.blobs:
                uploads[name] = blob
                header.setdefault("blobs", {})[str(len(pieces))] = blob if self._shared else (name, blob[1])
                pieces.append(b"")
        chosen = batch.retries if item.retries is None else item.retries
        call = Call(item, header, pieces, uploads, inputs, chosen, self._user)
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

    def _uploads(self, header: Header, pieces: list[Any], batch: _Batch) -> dict[str, blobs.Blob]:
        """Puts large pieces into the store, and their names into `header`."""
        uploads: dict[str, blobs.Blob] = {}
        for index, piece in enumerate(pieces):
            if (len(piece) if type(piece) is bytes else nbytes(piece)) >= blobs.LARGE:
                key, blob = self._store.put(piece)
                if key in uploads:
                    self._store.release([key])  # the same content twice in one call counts once
                else:
                    batch.pinned.append(key)
                uploads[key] = blob
                header.setdefault("blobs", {})[str(index)] = blob if self._shared else (key, blob[1])
                pieces[index] = b""
            elif isinstance(piece, memoryview):
                pieces[index] = bytes(
                    cast("memoryview[int]", piece)
                )  # the caller may change its array as soon as we return
        return uploads


def _digest(packed: Packed) -> str:
    import xxhash

    made = xxhash.xxh3_128(packed[0])
    for buffer in packed[1]:
        made.update(buffer)
    return made.hexdigest()


def streamed_parameters(call: PendingCompute[Any]) -> tuple[set[int], set[str]]:
    """Arguments annotated `Iterator[T]`, and `Iterable[T]` unless the value is a collection."""
    known = None if isinstance(call.fn, EachItem) else _iterator_annotations(call.fn)
    if known is None:
        return set(), set()
    kinds = itertools.chain(known.positional, itertools.repeat(known.rest))
    at = enumerate(zip(kinds, call.args, strict=False))
    positions = {index for index, (kind, value) in at if _travels_as_stream(kind, value)}
    given = call.kwargs.items()
    return positions, {name for name, value in given if _travels_as_stream(known.named.get(name, known.others), value)}


def _travels_as_stream(kind: type | None, value: object) -> bool:
    if kind is None or not isinstance(value, Iterable):
        return False
    if isinstance(value, GeneratorType) and value.gi_frame is None:
        raise TypeError(
            f"the generator {value.__qualname__} has already been read to its end, by an earlier call or a loop, so it "
            "would yield nothing. Make a new one for each call."
        )
    return kind is Iterator or not isinstance(value, Collection)


class _Annotated(NamedTuple):
    """Iterator, Iterable or None for each parameter: by position, `*rest`, by name, `**others`."""

    positional: Sequence[type | None]
    rest: type | None
    named: Mapping[str, type | None]
    others: type | None


def _iterator_annotations(fn: Callable[..., Any]) -> _Annotated | None:
    if not isinstance(fn, FunctionType):
        return _read_annotations(fn)
    known = _annotations.get(fn, _NOTHING)
    if known is _NOTHING:
        known = _annotations[fn] = _read_annotations(fn)
    return known


_NOTHING = _Annotated((), None, {}, None)


_annotations: weakref.WeakKeyDictionary[FunctionType, _Annotated | None] = weakref.WeakKeyDictionary()


def _read_annotations(fn: Callable[..., Any]) -> _Annotated | None:
    plain: Any = fn
    while isinstance(plain, functools.partial):
        plain = plain.func
    if not isinstance(plain, FunctionType | MethodType | type):
        plain = getattr(cast(Any, type(plain)), "__call__", plain)  # noqa: B004 - its annotations are wanted
    try:
        hints = typing.get_type_hints(plain)
    except Exception:  # unresolvable annotations are the user's business; such a parameter is not streamed
        hints = getattr(plain, "__annotations__", {})
    kinds = {name: _iterator_kind(hint) for name, hint in hints.items() if name != "return"}
    if not any(kinds.values()):
        return None
    by_kind: dict[Any, dict[str, type | None]] = {}
    for name, parameter in inspect.signature(fn).parameters.items():
        by_kind.setdefault(parameter.kind, {})[name] = kinds.get(name)
    only, either, rest, named, others = (by_kind.get(kind, {}) for kind in _KINDS)
    return _Annotated(
        [*only.values(), *either.values()],
        next(iter(rest.values()), None),
        {**either, **named},
        next(iter(others.values()), None),
    )


_KINDS = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.VAR_POSITIONAL,
    inspect.Parameter.KEYWORD_ONLY,
    inspect.Parameter.VAR_KEYWORD,
)


def unbound(call: PendingCompute[Any]) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    fn, args, kwargs = call.fn, call.args, dict(call.kwargs)
    while True:
        if isinstance(fn, functools.partial):
            fn, args, kwargs = fn.func, (*fn.args, *args), {**fn.keywords, **kwargs}
        elif isinstance(fn, MethodType):
            fn, args = fn.__func__, (fn.__self__, *args)
        else:
            return fn, args, kwargs


def remembers_nothing(fn: object) -> bool:
    """Whether no call can change what the function carries, so that a node may keep it."""
    if isinstance(fn, EachItem):
        return remembers_nothing(fn.fn)
    if not isinstance(fn, FunctionType):
        return isinstance(fn, type | BuiltinFunctionType)
    carried = [*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()]
    for cell in fn.__closure__ or ():
        try:
            carried.append(cell.cell_contents)
        except ValueError:
            return False  # not filled yet
    return all(value is fn or _is_constant(value) for value in carried)


def _is_constant(value: object) -> bool:
    if isinstance(value, tuple):
        return all(_is_constant(v) for v in cast("tuple[object, ...]", value))
    if isinstance(value, FunctionType):
        return remembers_nothing(value)
    return value is None or isinstance(value, int | float | str | bytes | type | ModuleType | BuiltinFunctionType)


def _iterator_kind(hint: Any) -> type | None:
    origin = typing.get_origin(hint) or hint
    if isinstance(origin, type) and origin in (Iterator, Iterable):
        return origin
    return None


T = TypeVar("T")


class Keeper(Protocol):
    def forget(self, keys: Sequence[str], unused: Callable[[], Sequence[str]]) -> None: ...

    def get_kept(self, result: KeptResult, future: CallFuture[Any]) -> None: ...

    def release_kept(self, result: KeptResult) -> None: ...


class Refs:
    def __init__(self, packer: Packer, store: blobs.Store, keeper: Keeper) -> None:
        self._packer, self._store, self._keeper = packer, store, keeper

    def put(self, value: T) -> Ref[T]:
        with collected(self._store) as inner:
            head, buffers = self._packer.pack(value, "the object")
        pieces = [head, *buffers]
        kept = [self._store.put(piece) for piece in pieces]
        key, size = os.urandom(12).hex(), sum(map(nbytes, pieces))
        drop = partial(_drop, self._store, self._keeper, key, [name for name, _ in kept])
        words = f"a {type(value).__name__}: {brief(value, 40)}"
        get, later = partial(_read, self._store, kept), partial(_drop_later, os.getpid(), drop)
        return Ref(key, words, self._store, get, later, size, kept, list(inner.values()))

    def kept(self, result: KeptResult, words: str) -> Ref[Any]:
        result.uses += 1
        drop = partial(_drop_later, os.getpid(), partial(self._keeper.release_kept, result))
        get = partial(_brought, self._store, self._keeper, result)
        return Ref(result.key, words, self._store, get, drop, kept=result)


def _read(store: blobs.Store, kept: Sequence[tuple[str, blobs.Blob]]) -> Any:
    _check_open(store)
    try:
        head, *buffers = (blobs.read(blob) for _, blob in kept)
    except FileNotFoundError as exc:
        raise FilesLost("the object that was put", str(exc.filename)) from None
    return unpack(head, buffers, keep_classes=True)


def _brought(store: blobs.Store, keeper: Keeper, result: KeptResult) -> Any:
    _check_open(store)
    future: CallFuture[Any] = CallFuture(result.name)
    keeper.get_kept(result, future)
    return future.result()


def _check_open(store: blobs.Store) -> None:
    if store.closed:
        raise PoolClosed("the pool is closed, and what it kept is gone with it. Call get() while the pool is open.")


def _drop(store: blobs.Store, keeper: Keeper, key: str, names: Sequence[str]) -> None:
    store.discard(names)
    keeper.forget([key], lambda: [name for name in names if not store.has(name)])


def _drop_later(owner: int, drop: Callable[[], None]) -> None:
    """In a thread: the dropping one may hold any lock. Copies in forked children do not count."""
    if os.getpid() == owner:
        run_in_thread(drop)
