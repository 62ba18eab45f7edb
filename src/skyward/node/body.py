"""Runs a call's body: unpickles, calls, packs the result, streams items. Standard library and cloudpickle only."""

from __future__ import annotations

import inspect
import math
import os
import sys
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Generator, Iterable
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, cast

from skyward.errors import (
    FilesLost,
    NodeDiskFull,
    NotSerializable,
    PluginError,
    Preempted,
    ResultNotSerializable,
    ResultTooLarge,
)
from skyward.node import decorators, gpu_failures, logs
from skyward.node.protocol import (
    NO_BLOBS,
    Blobs,
    Exited,
    Files,
    Forget,
    Header,
    Raised,
    Returned,
    RunnerToAgent,
    Verdict,
)
from skyward.node.settings import RunnerSettings
from skyward.transport import blobs, exceptions, frames
from skyward.transport.blobs import Spill, fetched
from skyward.transport.codec import Message, handles
from skyward.transport.payload import Packer, unpack
from skyward.transport.streams import Consumer, Producer

__all__ = ["Bodies", "Ending", "RunnerCall", "Stopped", "end_if_forked", "load_item"]

_STREAMS = Generator, AsyncGenerator
_FUNCTIONS = 256
_FUNCTION_BYTES = 256 << 20
_NAMED = 80  # characters by which a file is told, beside those of its directory

Decorate = Callable[[Callable[..., Any]], Callable[..., Any]]
Hook = tuple[str, Callable[[Any], AbstractContextManager[Any]] | None, Decorate | None]
Ending = partial[Verdict]
Send = Callable[[Message], None]

on_failure: list[Callable[[BaseException], None]] = []
"""Get a failure first, while its frames are there: `sky replay` opens the debugger."""


class Stopped(BaseException):
    """In a body that must end: timed out or cancelled."""


class RunnerCall:
    __slots__ = ("buffers", "enter", "header", "id", "inputs", "interrupted", "output", "state", "thread")

    def __init__(self, call_id: str, header: Header, buffers: list[Any]) -> None:
        self.id, self.header, self.buffers = call_id, header, buffers
        self.state = "waiting"
        self.inputs: dict[str, Consumer] = {}
        self.output: Producer | None = None
        self.thread: int | None = None
        self.enter: Callable[[], None] | None = None  # says that the function is called, if there is a time limit
        self.interrupted = False


class Bodies:
    def __init__(self, settings: RunnerSettings, send: Send) -> None:
        self.decorators: list[Decorate] = []
        self._settings, self._send = settings, send
        self._packer = Packer(settings["paths"])
        self._functions: OrderedDict[str, tuple[Callable[..., Any], int]] = OrderedDict()
        self._function_bytes = 0
        self._pid = os.getpid()

    def run(self, call: RunnerCall) -> Ending:
        """Raises Stopped if the body was stopped."""
        try:
            if call.state == "stopping":
                raise Stopped
            result = self._call(call)
            end_if_forked(self._pid)
            if call.state == "stopping":
                raise Stopped
            if result is not None and isinstance(result, _STREAMS):
                if "keep" in call.header:
                    from skyward.api.ref import not_kept  # most pools need none

                    raise TypeError(not_kept(call.header["name"]))
                self._send(RunnerToAgent.Streaming(call.id))
                self._stream(call, cast("Generator[Any, None, None]", result))
                if call.state == "stopping":
                    raise Stopped
                return partial(Returned)
            if type(result).__module__ == "skyward.api.compute":
                _tell_of_call(call.header["name"], result)
            return self.packed_result(call, result)
        except Stopped as exc:
            _tell_of_failure(exc)
            raise
        except SystemExit as exc:
            _tell_of_failure(exc)
            code = int(exc.code) & 0xFF if isinstance(exc.code, int) else int(exc.code is not None)  # as the OS does
            if isinstance(exc.code, str):
                print(exc.code, file=sys.stderr)  # as Python does
            return partial(Exited, code=code)
        except BaseException as exc:  # the user's exception: sent home, raised there
            _tell_of_failure(exc)
            gpu_failures.mark(exc)
            error, data = exceptions.capture(exc)
            return partial(Raised, error=error, preempted=isinstance(exc, Preempted), buffers=[data])

    def enter(self, hooks: Iterable[Hook], stack: ExitStack) -> None:
        """Enters the plugins' hooks; leaving `stack` leaves them."""
        from skyward.api.info import instance_info

        for name, around, decorate in hooks:
            info = instance_info()  # a hook may have changed it
            try:
                if around is not None:
                    stack.enter_context(around(info))
                    self.decorators += decorators.requested()
            except BaseException as exc:
                _tell_of_failure(exc)
                detail = "".join(exceptions.capture(exc)[0]["traceback"])
                rank = info.rank if info.world_size > info.total_nodes else None
                raise PluginError(name, "around_app", detail, info.node, rank) from exc
            if decorate is not None:
                self.decorators.append(decorate)

    def _call(self, call: RunnerCall) -> Any:
        header = call.header
        if "log" in header:
            logs.apply(header["log"])
        try:
            buffers = _mapped(call.buffers, header["blobs"]) if "blobs" in header else call.buffers
        except FileNotFoundError as exc:
            raise FilesLost(f"an argument of {header['name']}", str(exc.filename)) from None
        split, end = header["split"], len(buffers)
        if "refs" in header:
            from skyward.transport import refs  # most pools need none

            refs.install(header["refs"], buffers)
            end = min(start for start, _ in header["refs"].values())
        fn = self._function(header["fn"], buffers[:split])
        args, kwargs = unpack(buffers[split], buffers[split + 1 : end])
        for key, stream in call.inputs.items():
            if key.isdigit():
                args = (*args[: int(key)], stream, *args[int(key) + 1 :])
            else:
                kwargs[key] = stream
        if call.enter is not None:
            call.enter()
        result = fn(*args, **kwargs)
        if not inspect.iscoroutine(result):
            return result
        import asyncio  # takes longer than all the rest of a runner

        return asyncio.run(result)

    def _function(self, digest: str, buffers: list[Any]) -> Callable[..., Any]:
        """Unpickled once: like a module, it keeps its globals between calls."""
        known = self._functions.get(digest) if digest else None
        if known is not None:
            self._functions.move_to_end(digest)
            return known[0]
        fn = unpack(buffers[0], buffers[1:])
        for decorate in reversed(self.decorators):
            fn = decorate(fn)
        if not digest:
            return fn
        size = sum(map(frames.nbytes, buffers))
        self._functions[digest] = (fn, size)
        self._function_bytes += size
        while len(self._functions) > _FUNCTIONS or (
            self._function_bytes > _FUNCTION_BYTES and len(self._functions) > 1
        ):
            self._function_bytes -= self._functions.popitem(last=False)[1][1]
        return fn

    def packed_result(self, call: RunnerCall, result: Any) -> Ending:
        if (key := call.header.get("keep")) is not None:
            return self._kept_result(call, key, result)
        try:
            pieces, moved, _ = self._packed(call, result, "result", self._settings["max_result"])
        except NotSerializable as exc:
            text = f"{call.header['name']} ran, but its result cannot be sent back: {exc}"
            raise ResultNotSerializable(text) from exc.__cause__
        failed = result[1] if "each" in call.header and result[1] else None
        return partial(Returned, blobs=moved or NO_BLOBS, failed=failed, buffers=pieces)

    def _kept_result(self, call: RunnerCall, key: str, result: Any) -> Ending:
        from skyward.transport import refs

        header, directory, made = call.header, self._settings["blobs"], list[blobs.Blob]()
        try:
            worded = partial(self._room_for, call, "the result")
            with Spill(directory, header.get("blobs", {}).values(), worded) as spill:
                head, buffers = self._packer.pack(result, "result")
                pieces: list[Any] = [head, *buffers]
                _check_count(pieces, directory)
                with worded(sum(map(frames.nbytes, pieces))):
                    moved = spill.store(pieces)
                    names = blobs.kept_names(key, header["attempt"], len(pieces))
                    made += blobs.keep(directory, names, pieces, moved)
            refs.keep(key, result)
            named = {str(index): blob for index, blob in enumerate(made)}
            return partial(Returned, kept=key, blobs=named, buffers=[b""] * len(made))
        except NotSerializable as exc:
            text = f"{header['name']} ran, but its result cannot be kept: {exc}"
            raise ResultNotSerializable(text) from exc.__cause__
        except BaseException:  # it was stopped in the last moment: nobody will hear of these files
            blobs.remove(path for path, _ in made)
            raise

    def _packed(self, call: RunnerCall, value: Any, what: str, limit: float) -> tuple[list[Any], Blobs, int]:
        """Pieces, those in files, and total size."""
        plain = self._packer.pack_simple(value)
        if plain is not None and not plain[1] and len(plain[0]) <= min(limit, blobs.LARGE - 1):
            return [plain[0]], NO_BLOBS, len(plain[0])
        worded = partial(self._room_for, call, f"the {what}")
        with Spill(self._settings["blobs"], call.header.get("blobs", {}).values(), worded) as spill:
            head, buffers = plain or self._packer.pack(value, what)
            pieces: list[Any] = [head, *buffers]
            size = sum(map(frames.nbytes, pieces))
            _check_count(pieces, self._settings["blobs"])
            if size > limit:
                raise ResultTooLarge(call.header["name"], size, int(limit))
            with worded(size):
                moved = spill.store(pieces)
        return pieces, moved, size

    @contextmanager
    def _room_for(self, call: RunnerCall, what: str, size: int) -> Generator[None]:
        try:
            yield
        except OSError as exc:
            name, node = call.header["name"], self._settings["node"]
            if exc.errno in blobs.FULL:
                raise NodeDiskFull(name, node, size, str(exc.strerror), what) from None
            if isinstance(exc, FileNotFoundError):
                raise FilesLost(f"the place for {what} of {name} on node {node}", self._settings["blobs"]) from None
            raise

    def _stream(self, call: RunnerCall, items: Generator[Any, None, None] | AsyncGenerator[Any, None]) -> None:
        def send(batch: list[tuple[list[Any], Blobs]]) -> None:
            items: list[int | tuple[int, Files]] = [
                (len(item), {"blobs": moved}) if moved else len(item) for item, moved in batch
            ]
            self._send(RunnerToAgent.Items(call.id, items, [piece for item, _ in batch for piece in item]))

        call.output = out = Producer(send)
        try:
            if isinstance(items, AsyncGenerator):
                import asyncio

                asyncio.run(self._drain_async(call, out, items))
            else:
                self._drain(call, out, items)
        finally:
            out.finish()

    def _drain(self, call: RunnerCall, out: Producer, items: Generator[Any, None, None]) -> None:
        try:
            for item in items:
                if not out.put(*self._packed_item(call, item)):
                    return
        finally:
            items.close()

    async def _drain_async(self, call: RunnerCall, out: Producer, items: AsyncGenerator[Any, None]) -> None:
        import asyncio

        try:
            async for item in items:
                packed = self._packed_item(call, item)
                if not await asyncio.to_thread(out.put, *packed):
                    return
        finally:
            await items.aclose()

    def _packed_item(self, call: RunnerCall, item: Any) -> tuple[tuple[list[Any], Blobs], int]:
        """Packs the item now: the body may change it later."""
        try:
            pieces, moved, size = self._packed(call, item, "yielded value", math.inf)
        except NotSerializable as exc:
            raise ResultNotSerializable(str(exc)) from exc.__cause__
        return ([bytes(piece) for piece in pieces], moved), size


class KeptObjects:
    @handles(Forget)
    def _forget(self, message: Forget) -> None:
        from skyward.transport import refs

        refs.forget(message.keys)


def _check_count(pieces: list[Any], directory: str) -> None:
    large = sum(frames.nbytes(piece) >= blobs.LARGE for piece in pieces)
    if large * (len(directory) + _NAMED) > frames.FROM_NODE // 2:
        text = f"it has {large:,} large arrays or buffers, more than one message can name. Join them into fewer."
        raise NotSerializable(text)


def end_if_forked(pid: int) -> None:
    if os.getpid() != pid:
        os._exit(0)


def load_item(pieces: list[Any]) -> Any:
    pieces = fetched(pieces)
    return unpack(pieces[0], pieces[1:])


def _tell_of_failure(exc: BaseException) -> None:
    for hear in on_failure:
        hear(exc)


def _mapped(buffers: list[Any], named: Blobs) -> list[Any]:
    for index, blob in named.items():
        buffers[int(index)] = blobs.read(blob)
    return buffers


_told: set[str] = set()


def _tell_of_call(name: str, result: Any) -> None:
    if name not in _told:
        _told.add(name)
        called = getattr(result, "name", "fn")
        print(
            f"skyward: {name} has returned {result!r}, a call that was never run. A body runs a compute function with "
            f"`{called}.local(...)`.",
            file=sys.stderr,
        )
