"""sys.stdout and sys.stderr of a process that runs calls.

    print ──► CallStream ──► the call's route: a callback, or silence
                       └─► no route: fd 1, or (calls in threads) the runner's emit

With one call at a time, silence covers the file descriptor too. Where calls share a process, routes belong to contexts.
"""

from __future__ import annotations

import builtins
import contextvars
import functools
import io
import os
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from contextvars import ContextVar
from threading import get_ident
from typing import Any, Literal, Never, ParamSpec, TextIO, TypeVar, overload

from skyward.api.info import InstanceInfo, current_call, pool_info
from skyward.api.usage_errors import corrects_call
from skyward.errors import InvalidArgument
from skyward.node.decorators import Enter, inside

__all__ = [
    "CallStream",
    "CallbackWriter",
    "Route",
    "Stream",
    "drain",
    "install",
    "redirect_output",
    "silent",
    "stderr",
    "stdout",
]


Stream = Literal["stdout", "stderr"]
Emit = Callable[[Stream, str, str | None], None]

STREAMS: tuple[Stream, ...] = ("stdout", "stderr")


def install(*, threads: bool, emit: Emit | None = None) -> None:
    """The runner does it once. With `threads` routes belong to contexts, which new threads inherit, and text goes to
    `emit(stream, text, call id)`.
    """
    if not _installed:
        os.register_at_fork(before=_before_fork, after_in_child=_after_fork)
    for fd, name in enumerate(STREAMS, 1):
        if (current := getattr(sys, name)) is not None:
            current.flush()
        real = open(fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace", newline="", closefd=False)  # noqa: SIM115 - for as long as the process lives
        _installed[name] = CallStream(name, real, threads=threads, emit=emit, fd=fd)
        setattr(sys, name, _installed[name])
    if c := _c_stdout():
        c[0].setvbuf(c[1], None, 1, 0)  # line by line (_IOLBF), so that what C code prints into the pipe is live
    if threads:
        _let_threads_inherit()
    _refuse_questions()


keyboard = builtins.input
"""Python's own."""


def _refuse_questions() -> None:
    builtins.input = _no_input
    if "PYTHONBREAKPOINT" not in os.environ and sys.breakpointhook is sys.__breakpointhook__:
        sys.breakpointhook = _no_breakpoint


def _no_input(prompt: object = "", /) -> str:
    raise EOFError(f"input({prompt!r}): a body has no keyboard. Ask before you send the call, and pass the answer.")


def _no_breakpoint(*_: object, **__: object) -> None:
    raise RuntimeError(
        "breakpoint(): a body has no terminal. Run the function here, with `.local(...)` instead of `>> pool`."
    )


def drain() -> None:
    _flush_c()
    for routed in _installed.values():
        routed.end_call()


class CallbackWriter(io.TextIOBase):
    """A text stream that hands what is written to a function.

    Args:
        callback: called with each text.
        lines: whether it gets whole lines, and what there is when flushed. Default: False, every write.
    """

    def __init__(self, callback: Callable[[str], object], *, lines: bool = False) -> None:
        self._callback, self._lines = callback, lines
        self._pending: list[str] = []
        self._lock = threading.Lock()

    def writable(self) -> bool:
        return True

    def write(self, text: str, /) -> int:
        if not self._lines:
            if text:
                self._callback(text)
            return len(text)
        done, newline, rest = text.rpartition("\n")
        with self._lock:
            if not newline:
                self._pending.append(text)
                return len(text)
            whole = "".join((*self._pending, done))
            self._pending = [rest] if rest else []
        for line in whole.split("\n"):
            self._callback(line + "\n")
        return len(text)

    def flush(self) -> None:
        with self._lock:
            rest, self._pending = "".join(self._pending), []
        if rest:
            self._callback(rest)


class Route(AbstractContextManager[None]):
    """Where the text of some streams goes, while entered: to a sink, or (None) nowhere."""

    def __init__(self, streams: tuple[Stream, ...], sink: CallbackWriter | None) -> None:
        self.streams, self.sink, self.call = streams, sink, current_call()
        self.busy: set[int] = set()  # threads inside the sink: what a callback itself prints must not come back to it
        self._undo = ExitStack()

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for name in self.streams:
                installed, current = _installed.get(name), getattr(sys, name)
                if installed is not None:
                    stack.callback(installed.drop_route, self)
                    installed.add_route(self)
                if current is None or current is installed:
                    continue
                if not isinstance(current, CallStream):  # nothing is installed, or user code put its own stream here
                    stack.callback(setattr, sys, name, current)
                    current = CallStream(name, current, threads=installed is not None and installed.threads)
                    setattr(sys, name, current)
                stack.callback(current.drop_route, self)
                current.add_route(self)
            self._undo = stack.pop_all()

    def __exit__(self, *error: object) -> None:
        self._undo.close()
        if self.sink is not None:
            self.sink.flush()

    def pass_on(self, act: Callable[..., object], *args: object) -> None:
        me = get_ident()
        self.busy.add(me)
        try:
            act(*args)
        finally:
            self.busy.discard(me)


class CallStream(io.TextIOBase):
    encoding = "utf-8"
    errors = "backslashreplace"
    line_buffering = True

    def __init__(
        self, name: Stream, real: TextIO, *, threads: bool, emit: Emit | None = None, fd: int | None = None
    ) -> None:
        self.name: Stream = name
        self.threads, self._real, self._emit, self._fd = threads, real, emit, fd
        self._routes: tuple[Route, ...] = ()
        self._context_routes = _context_routes[name] if threads else None
        self._partial: dict[tuple[int, tuple[str, int] | None], list[str]] = {}
        self._covered: int | None = None  # what the descriptor was before silence covered it
        self._lock = threading.RLock()

    def write(self, text: str, /) -> int:
        if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance] - user code is not checked
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        route = self._route()
        if route is not None:
            if route.sink is not None:
                route.pass_on(route.sink.write, text)
        elif self._emit is None:
            self._real.write(text)
        else:
            self._collect(text)
        return len(text)

    def is_redirected(self) -> bool:
        return self._route() is not None

    def write_bytes(self, data: bytes) -> None:
        binary = getattr(self._real, "buffer", None)
        if binary is None or self._emit is not None or self._route() is not None:
            self.write(data.decode("utf-8", "backslashreplace"))
            return
        self._real.flush()
        binary.write(data)
        binary.flush()

    def flush(self) -> None:
        route = self._route()
        if route is not None:
            if route.sink is not None:
                route.pass_on(route.sink.flush)
        elif self._emit is None:
            self._real.flush()
        else:
            self._send((get_ident(), current_call()))

    def end_call(self) -> None:
        """Sends the current call's unfinished lines, and ends the routes of its threads."""
        call = current_call()
        if self._routes and call is not None:
            with self._lock:
                self._set_routes(tuple(route for route in self._routes if route.call != call))
        if self._emit is None:
            self._real.flush()
        for key in list(self._partial):
            if key[1] == call:
                self._send(key)

    def add_route(self, route: Route) -> None:
        with self._lock:
            self._set_routes((*self._get_routes(), route))

    def drop_route(self, route: Route) -> None:
        with self._lock:
            self._set_routes(tuple(other for other in self._get_routes() if other is not route))

    def before_fork(self) -> None:
        """A forked child would write buffered text a second time."""
        self._real.flush()

    def after_fork(self) -> None:
        """A forked child has no runner: it writes to the descriptor."""
        self._emit, self._lock = None, threading.RLock()
        self._partial.clear()

    def fileno(self) -> int:
        route = self._route()
        if self.threads and route is not None and route.sink is None:
            return _null()  # a subprocess that is given this stream is silent, and no other
        return self._real.fileno() if self._fd is None else self._fd

    @property
    def buffer(self) -> _Bytes:
        return _Bytes(self)

    def isatty(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    def reconfigure(self, **options: object) -> None:
        """Ignored: this stream is UTF-8 and goes line by line."""

    def close(self) -> None:
        self.flush()  # the process goes on, and so does its output

    def _get_routes(self) -> tuple[Route, ...]:
        return self._routes if self._context_routes is None else self._context_routes.get()

    def _route(self) -> Route | None:
        routes = self._routes if self._context_routes is None else self._context_routes.get()
        if not routes:
            return None
        me = get_ident()
        return next((route for route in reversed(routes) if me not in route.busy), None)

    def _set_routes(self, routes: tuple[Route, ...]) -> None:
        if self._context_routes is not None:
            self._context_routes.set(routes)
            return
        self._routes = routes
        if self._fd is None:
            return
        silent = any(route.sink is None for route in routes)
        if silent == (self._covered is not None):
            return
        self._real.flush()
        _flush_c()
        if self._covered is None:
            self._covered = os.dup(self._fd)
            os.dup2(_null(), self._fd)
        else:
            os.dup2(self._covered, self._fd)
            os.close(self._covered)
            self._covered = None

    def _collect(self, text: str) -> None:
        key = (get_ident(), current_call())
        done, newline, rest = text.rpartition("\n")
        if newline:
            self._send(key, done + newline)
        if rest:
            with self._lock:
                parts = self._partial.setdefault(key, [])
                parts.append(rest)
                endless = len(parts) > 500 or len(rest) > 100_000
            if endless:
                self._send(key)

    def _send(self, key: tuple[int, tuple[str, int] | None], end: str = "") -> None:
        with self._lock:
            text = "".join((*self._partial.pop(key, ()), end))
        if text and self._emit is not None:
            if not text.isascii():
                text = text.encode("utf-8", "backslashreplace").decode()  # lone surrogates cannot travel
            self._emit(self.name, text, key[1][0] if key[1] else None)


class _Bytes(io.BufferedIOBase):
    def __init__(self, routed: CallStream) -> None:
        self._routed = routed

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        data = bytes(data)
        self._routed.write_bytes(data)
        return len(data)

    def flush(self) -> None:
        self._routed.flush()

    def fileno(self) -> int:
        return self._routed.fileno()


_installed: dict[str, CallStream] = {}
_context_routes: dict[str, ContextVar[tuple[Route, ...]]] = {
    name: ContextVar(f"skyward_{name}", default=()) for name in STREAMS
}


@functools.cache
def _null() -> int:
    return os.open(os.devnull, os.O_RDWR)


@functools.cache
def _c_stdout() -> tuple[Any, Any] | None:
    try:
        import ctypes

        libc = ctypes.CDLL(None)
        return libc, ctypes.c_void_p.in_dll(libc, "stdout")
    except (ImportError, OSError, ValueError):
        return None


def _flush_c() -> None:
    if c := _c_stdout():
        c[0].fflush(c[1])


def _before_fork() -> None:
    for routed in _installed.values():
        routed.before_fork()


def _after_fork() -> None:
    for routed in _installed.values():
        routed.after_fork()


def _let_threads_inherit() -> None:
    """Starts every thread in a copy of its starter's context."""
    start = threading.Thread.start
    if start.__module__ == __name__:
        return

    def start_in_context(self: threading.Thread) -> None:
        run, context = self.run, contextvars.copy_context()

        def run_in_context() -> None:
            del self.run  # a cycle otherwise
            context.run(run)

        self.run = run_in_context
        try:
            start(self)
        except BaseException:
            self.__dict__.pop("run", None)
            raise

    threading.Thread.start = start_in_context


# Output decorators: which nodes show what a body prints, and where else it goes.
#
# What happens is decided on the node when the body starts. It holds while the body's own code runs, not while a
# generator waits for the next request. Outside a pool these decorators do nothing.


P = ParamSpec("P")
R = TypeVar("R")
Only = Literal["head"] | Callable[[InstanceInfo], object]


def stdout(*bare: Never, only: Only | None = None) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Shows what the body prints on some ranks alone: `@sky.stdout(only="head")`.

    Args:
        only: "head" for rank 0, or a function of `sky.InstanceInfo` that says whether this rank is heard. Required.
    """
    return functools.partial(_decorated, choose=_unless(only, "stdout", bare))


def stderr(*bare: Never, only: Only | None = None) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """As `sky.stdout`, with the same `only`, for what the body writes to standard error: `@sky.stderr(only="head")`."""
    return functools.partial(_decorated, choose=_unless(only, "stderr", bare))


@overload
def silent(fn: Callable[P, R], /) -> Callable[P, R]: ...
@overload
def silent() -> Callable[[Callable[P, R]], Callable[P, R]]: ...
@corrects_call("sky.silent", {"only": "`@sky.stdout(only=...)`, which shows some ranks alone"})
def silent(fn: Callable[..., Any] | None = None, /) -> Callable[..., Any]:
    """Drops everything that the body `fn` prints, on every node: `@sky.silent`."""
    choose = functools.partial(_in_pool, _silence, STREAMS)
    return functools.partial(_decorated, choose=choose) if fn is None else _decorated(fn, choose)


def redirect_output(
    callback: Callable[[str], object], *, stream: Literal["stdout", "stderr", "both"] = "stdout"
) -> Redirect:
    """Hands what is printed to a function on the node, line by line; a decorator and a context manager.

    Args:
        callback: called with each line and its line end, as a file's `write` would be; the text lacks the line end if
            the line was not finished when it was flushed, or when the body ended.
        stream: "stdout", "stderr" or "both". Default: "stdout".
    """
    if not callable(callback):
        raise InvalidArgument(f"redirect_output() got {callback!r}, not a function. Give one that takes a text.")
    if stream not in (*STREAMS, "both"):
        raise _unknown("stream", stream, (*STREAMS, "both"))
    return Redirect(callback, STREAMS if stream == "both" else (stream,))


def _unless(only: Only | None, stream: Stream, bare: tuple[object, ...]) -> Enter:
    if only is None or bare:
        raise InvalidArgument(
            f"@sky.{stream} does not say which nodes may print. Write @sky.{stream}(only='head'), or "
            f"@sky.{stream}(only=lambda info: info.node < 2); @sky.silent is the one for none."
        )
    if not callable(only) and only != "head":
        raise _unknown("only", only, ("head",), " or a predicate such as lambda info: info.node < 2")
    return functools.partial(_in_pool, _silence, (stream,), only)


def _in_pool(
    make: Callable[[tuple[Stream, ...]], Route], streams: tuple[Stream, ...], only: Only | None = None
) -> AbstractContextManager[None]:
    info = pool_info()
    if info is None:
        return nullcontext()
    spared = only is not None and (info.is_head if only == "head" else only(info))
    return nullcontext() if spared else make(streams)


def _silence(streams: tuple[Stream, ...]) -> Route:
    return Route(streams, None)


def _unknown(name: str, value: object, known: tuple[str, ...], other: str = "") -> InvalidArgument:
    import difflib  # for weight: only a mistake needs it

    near = difflib.get_close_matches(str(value), known, 1)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    return InvalidArgument(f"{name}={value!r} is not known. {hint}It takes {', '.join(map(repr, known))}{other}.")


def _decorated(fn: Callable[P, R], choose: Enter) -> Callable[P, R]:
    return inside(fn, choose, "an output decorator", each_step=True)


def _to_callback(callback: Callable[[str], object], streams: tuple[Stream, ...]) -> Route:
    return Route(streams, CallbackWriter(callback, lines=True))


class Redirect:
    def __init__(self, callback: Callable[[str], object], streams: tuple[Stream, ...]) -> None:
        # Nothing of self goes into a decorated function, which must be able to travel.
        self._choose: Enter = functools.partial(_in_pool, functools.partial(_to_callback, callback), streams)
        self._open: dict[int, list[AbstractContextManager[object]]] = {}

    def __call__(self, fn: Callable[P, R], /) -> Callable[P, R]:
        return _decorated(fn, self._choose)

    def __enter__(self) -> None:
        route = self._choose()
        route.__enter__()
        self._open.setdefault(get_ident(), []).append(route)

    def __exit__(self, *error: object) -> None:
        self._open[get_ident()].pop().__exit__(None, None, None)
