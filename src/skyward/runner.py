"""The process in which user code runs: it enters the plugins' hooks once, then executes calls.

    agent --socket--> reader thread --> queue --> main thread (or `threads` of them): body
    agent <--socket------------------------------ result, exception, stream items
    agent <--pipes------------------------------- whatever is written to file descriptors 1 and 2

It shares its process with the user, so it uses nothing but the standard library and cloudpickle.
"""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import faulthandler
import functools
import inspect
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from contextlib import ExitStack
from typing import Any, NoReturn, cast

from skyward import blobs, failures, leftovers, routed, wire
from skyward.errors import NotSerializable, PluginError, ResultNotSerializable, ResultTooLarge
from skyward.payload import Packer, unpack
from skyward.preemption import announce, preempted
from skyward.runtime import VARIABLE, call_context, holds_group
from skyward.streams import Consumer, Producer

__all__ = ["Runner", "Stopped"]

_FUNCTIONS = 256
_FUNCTION_BYTES = 256 << 20


_Verdict = tuple[str, dict[str, Any], list[Any]]


class Stopped(BaseException):
    """Raised in a body that is to end: its time is up, or it was cancelled."""


class _Call:
    __slots__ = ("about", "buffers", "id", "inputs", "output", "stop", "thread")

    def __init__(self, call_id: str, about: dict[str, Any], buffers: list[Any]) -> None:
        self.id, self.about, self.buffers = call_id, about, buffers
        self.inputs: dict[str, Consumer] = {}
        self.output: Producer | None = None
        self.thread: int | None = None
        self.stop = False


class Runner:
    """Serves one agent over `sock` until told to exit."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._send_lock = threading.Lock()
        self._queue: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._waiting: dict[str, _Call] = {}
        self._running: dict[str, _Call] = {}
        self._functions: OrderedDict[str, tuple[Callable[..., Any], int]] = OrderedDict()
        self._function_bytes = 0
        self._decorators: list[Callable[[Callable[..., Any]], Callable[..., Any]]] = []
        self._threads = 1
        self._pid = os.getpid()
        self._main = threading.get_ident()
        self._hooks = ExitStack()
        self._settings: dict[str, Any] = {}
        self._packer = Packer()
        self._context = contextvars.copy_context()

    def serve(self) -> NoReturn:
        """Runs calls until the agent says exit, or is gone."""
        faulthandler.enable(file=2, all_threads=False)
        signal.signal(signal.SIGTERM, self._on_sigterm)
        _keep_handler_out_of_children()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        messages = self._messages()
        kind, body, buffers = next(messages)
        assert kind == "init", kind
        self._start(body[0], buffers)
        reader = threading.Thread(target=self._read, args=(messages,), name="skyward-reader", daemon=True)
        reader.start()
        if self._threads == 1:
            self._work()
        else:
            workers = [
                threading.Thread(target=self._work, name=f"skyward-slot-{i}", daemon=True) for i in range(self._threads)
            ]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
        self._leave(0)

    def _start(self, settings: dict[str, Any], buffers: list[Any]) -> None:
        self._settings = settings
        self._threads = settings["threads"]
        sys.path[:0] = settings["paths"]
        self._packer = Packer(settings["paths"])
        routed.install(threads=self._threads > 1, emit=self._emit if self._threads > 1 else None)
        try:
            self._enter_hooks(buffers)
        except BaseException as exc:  # reported to the agent, which reports to the client
            error = exc if isinstance(exc, PluginError) else PluginError("", "around_app", repr(exc))
            about, data = failures.capture(error, __file__)
            self._send([["failed", about, 1]], [data])
            self._leave(1)
        self._context = contextvars.copy_context()  # what the hooks have set holds in every call
        self._send([["ready", {}, 0]])

    def _enter_hooks(self, buffers: list[Any]) -> None:
        if not buffers:
            return
        from skyward.runtime import instance_info

        for name, around, decorate in unpack(buffers[0], buffers[1:]):
            try:
                if around is not None:
                    self._hooks.enter_context(around(instance_info()))
            except BaseException as exc:
                detail = "".join(failures.capture(exc, __file__)[0]["traceback"])
                raise PluginError(name, "around_app", detail, self._settings["node"]) from exc
            if decorate is not None:
                self._decorators.append(decorate)

    # reading

    def _messages(self) -> Iterator[tuple[str, list[Any], list[Any]]]:
        frames = wire.FrameReader()
        alive = True
        while alive:
            got, alive = frames.read(self._sock.recv_into)
            for batch, buffers in got:
                at = 0
                for message in batch:
                    count = message[-1]
                    yield message[0], message[1:-1], buffers[at : at + count]
                    at += count

    def _read(self, messages: Iterator[tuple[str, list[Any], list[Any]]]) -> None:
        try:
            for kind, body, buffers in messages:
                if kind == "call":
                    call_id, about = body
                    call = _Call(call_id, about, buffers)
                    for key in about.get("streams", ()):
                        call.inputs[key] = self._consumer(call_id, key)
                    self._waiting[call_id] = call
                    self._queue.put(call)
                elif kind == "exit":
                    for _ in range(self._threads):
                        self._queue.put(None)
                else:
                    self._control(kind, body, buffers)
        except OSError:
            pass  # the agent is gone; so are we
        os._exit(1) if not self._exiting else None

    _exiting = False

    def _control(self, kind: str, body: Any, buffers: list[Any]) -> None:
        if kind == "info":
            os.environ[VARIABLE] = body[0]  # another machine stands in for one of the pool
            return
        if kind == "notice":
            announce(body[0])
            if self._running:
                signal.pthread_kill(self._main, signal.SIGTERM)  # for bodies that have set a handler
            return
        if kind == "recall":
            if self._waiting.pop(body[0], None) is not None:
                self._send([["recalled", body[0], 0]])
            return
        call = self._running.get(body[0]) or self._waiting.get(body[0])
        if call is None:
            return
        if kind == "stop":
            self._stop(call)
        elif kind == "grant" and call.output is not None:
            call.output.grant(body[1])
        elif kind == "close" and call.output is not None:
            call.output.close()
        elif kind == "items":
            call.inputs[body[1]].feed([(item, sum(map(wire.nbytes, item))) for item in _split(buffers, body[2])])
        elif kind == "end":
            error = failures.rebuild(body[2], buffers[0]) if body[2] else None
            call.inputs[body[1]].end(error)

    def _stop(self, call: _Call) -> None:
        call.stop = True
        if call.output is not None:
            call.output.close()
        if call.thread is None:
            return
        if self._threads == 1:
            signal.pthread_kill(self._main, signal.SIGTERM)
        else:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(call.thread), ctypes.py_object(Stopped))

    def _on_sigterm(self, *_: object) -> None:
        for call in list(self._running.values()):
            if call.stop:
                raise Stopped
        if not self._running and not preempted():
            self._leave(0)

    # working

    def _work(self) -> None:
        threads = self._threads > 1
        while True:
            call = self._queue.get()
            if call is None:
                return
            waiting = self._waiting.pop(call.id, None)
            if waiting is not call:  # recalled; if it was sent again, its turn comes where the agent believes it is
                if waiting is not None:
                    self._waiting[call.id] = waiting
                continue
            self._running[call.id] = call
            call.thread = threading.get_ident()
            if call.about.get("ahead"):
                self._mark_output(call.id)
            started = time.perf_counter()
            try:
                kind, about, buffers = self._context.copy().run(self._execute_in_context, call, threads)
            except Stopped:
                kind, about, buffers = "stopped", {}, []
            self._end_if_forked()
            sys.stdout.flush()
            sys.stderr.flush()
            del self._running[call.id]
            about["s"] = time.perf_counter() - started
            if holds_group():
                about["group"] = True
            if not self._running:
                leftovers.end_children()
            self._send([[kind, call.id, about, len(buffers)]], buffers)
            del call, buffers  # nothing of it stays in memory while we wait for the next
            if kind == "stopped" and not threads:
                self._leave(0)

    def _mark_output(self, call_id: str) -> None:
        """Tells the agent where in the pipes a call begins that it sent before the last one had ended."""
        mark = b"\0" + self._settings["mark"].encode() + call_id.encode() + b"\0"
        os.write(1, mark)
        os.write(2, mark)

    def _end_if_forked(self) -> None:
        if os.getpid() != self._pid:
            os._exit(0)  # a child that the body forked has come back out of it

    def _execute_in_context(self, call: _Call, threads: bool) -> _Verdict:
        with call_context(call.id, call.about["attempt"], threads=threads):
            try:
                return self._execute(call)
            finally:
                routed.drain()  # lines that have no end yet still belong to this call

    def _execute(self, call: _Call) -> _Verdict:
        try:
            result = self._call(call)
            self._end_if_forked()
            if call.stop:
                raise Stopped
            if isinstance(result, Generator | AsyncGenerator):
                self._send([["streaming", call.id, 0]])
                self._stream(call, cast("Generator[Any, None, None]", result))
                if call.stop:
                    raise Stopped
                return "done", {}, []
            return self._packed_result(call, result)
        except Stopped:
            raise
        except SystemExit as exc:
            code = exc.code if isinstance(exc.code, int) else int(exc.code is not None)
            if isinstance(exc.code, str):
                print(exc.code, file=sys.stderr)  # as Python does
            return "exited", {"code": code}, []
        except BaseException as exc:  # the user's exception: sent home, raised there
            about, data = failures.capture(exc, __file__)
            return "error", {"error": about}, [data]

    def _call(self, call: _Call) -> Any:
        about = call.about
        buffers = _mapped(call.buffers, about)
        split = about["split"]
        fn = self._function(about["fn"], buffers[:split])
        args, kwargs = unpack(buffers[split], buffers[split + 1 :])
        for key, stream in call.inputs.items():
            if key.isdigit():
                args = (*args[: int(key)], stream, *args[int(key) + 1 :])
            else:
                kwargs[key] = stream
        result = fn(*args, **kwargs)
        return asyncio.run(result) if inspect.iscoroutine(result) else result

    def _function(self, digest: str, buffers: list[Any]) -> Callable[..., Any]:
        """The function, unpickled once: like any module, it keeps its globals between calls."""
        known = self._functions.get(digest) if digest else None
        if known is not None:
            self._functions.move_to_end(digest)
            return known[0]
        fn = unpack(buffers[0], buffers[1:])
        for decorate in reversed(self._decorators):
            fn = decorate(fn)
        if not digest:
            return fn
        size = sum(map(wire.nbytes, buffers))
        self._functions[digest] = (fn, size)
        self._function_bytes += size
        while len(self._functions) > _FUNCTIONS or (
            self._function_bytes > _FUNCTION_BYTES and len(self._functions) > 1
        ):
            self._function_bytes -= self._functions.popitem(last=False)[1][1]
        return fn

    def _packed_result(self, call: _Call, result: Any) -> _Verdict:
        name = call.about["name"]
        try:
            head, buffers = self._packer.pack(result, "result")
        except NotSerializable as exc:
            text = f"{name} ran, but its result cannot come home: {exc}"
            raise ResultNotSerializable(text) from exc.__cause__
        pieces: list[Any] = [head, *buffers]
        size = sum(map(wire.nbytes, pieces))
        if size > self._settings["max_result"]:
            raise ResultTooLarge(name, size, self._settings["max_result"])
        return "done", _spilled(pieces, self._settings["blobs"]), pieces

    # streams

    def _stream(self, call: _Call, items: Generator[Any, None, None] | AsyncGenerator[Any, None]) -> None:
        def send(batch: list[tuple[list[Any], dict[str, Any]]]) -> None:
            pieces = [p for item, _ in batch for p in item]
            abouts = [[len(item), about] if about else len(item) for item, about in batch]
            self._send([["items", call.id, abouts, len(pieces)]], pieces)

        call.output = out = Producer(send)
        try:
            if isinstance(items, AsyncGenerator):
                asyncio.run(self._drain_async(out, items))
            else:
                self._drain(out, items)
        finally:
            out.finish()

    def _drain(self, out: Producer, items: Generator[Any, None, None]) -> None:
        try:
            for item in items:
                if not out.put(*self._packed_item(item)):
                    return
        finally:
            items.close()

    async def _drain_async(self, out: Producer, items: AsyncGenerator[Any, None]) -> None:
        try:
            async for item in items:
                packed = self._packed_item(item)
                if not await asyncio.to_thread(out.put, *packed):
                    return
        finally:
            await items.aclose()

    def _packed_item(self, item: Any) -> tuple[tuple[list[Any], dict[str, Any]], int]:
        """The item as it is now, with its size: the body may change it as soon as it goes on."""
        try:
            head, buffers = self._packer.pack(item, "yielded value")
        except NotSerializable as exc:
            raise ResultNotSerializable(str(exc)) from exc.__cause__
        pieces: list[Any] = [head, *buffers]
        size = sum(map(wire.nbytes, pieces))
        about = _spilled(pieces, self._settings["blobs"])
        return ([bytes(piece) for piece in pieces], about), size

    def _consumer(self, call_id: str, key: str) -> Consumer:
        return Consumer(
            grant=lambda n: self._send([["want", call_id, key, n, 0]]),
            close=lambda: None,
            load=functools.partial(_load_item),
        )

    # sending

    def _send(self, batch: list[Any], buffers: list[Any] | None = None) -> None:
        pieces = wire.encode(batch, buffers or [])
        with self._send_lock:
            for piece in pieces:
                self._sock.sendall(piece)

    def _emit(self, stream: str, text: str, call_id: str | None) -> None:
        data = text.encode("utf-8", "surrogateescape")
        self._send([["out", stream, call_id, 1]], [data])

    def _leave(self, status: int) -> NoReturn:
        """Leaves the hooks in reverse and ends the process."""
        self._exiting = True
        try:
            if not self._running:
                self._hooks.close()
        except BaseException:
            import traceback

            traceback.print_exc()  # goes to the node's stderr, and so to the client
        finally:
            leftovers.end_children()
            try:
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(status)


def _keep_handler_out_of_children() -> None:
    """Gives processes that a body forks the usual SIGTERM; with ours they would not end when their parent asks."""
    os.register_at_fork(
        before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}),
        after_in_parent=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM}),
        after_in_child=_take_usual_handler,
    )


def _take_usual_handler() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _mapped(buffers: list[Any], about: dict[str, Any]) -> list[Any]:
    """The buffers, with those that travelled as blobs mapped into memory."""
    for index, blob in about.get("blobs", {}).items():
        buffers[int(index)] = blobs.read(blob)
    return buffers


def _spilled(pieces: list[Any], directory: str) -> dict[str, Any]:
    """Moves large pieces into blobs (in place) and says which."""
    moved: dict[str, blobs.Blob] = {}
    for index, piece in enumerate(pieces):
        if wire.nbytes(piece) >= blobs.LARGE:
            moved[str(index)] = blobs.write(directory, piece)
            pieces[index] = b""
    return {"blobs": moved} if moved else {}


def _split(buffers: list[Any], counts: list[int]) -> list[list[Any]]:
    items: list[list[Any]] = []
    at = 0
    for count in counts:
        items.append(buffers[at : at + count])
        at += count
    return items


def _load_item(pieces: list[Any]) -> Any:
    return unpack(pieces[0], pieces[1:])
