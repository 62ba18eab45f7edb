"""Serves the page on loopback: the shell for everybody, data only with the key.

http://127.0.0.1:PORT/?token=...    works once: the page gets a key, which it keeps as long as its tab is open
/data/...?key=...                   JSON; /data/live is a stream of server-sent events
"""

from __future__ import annotations

import hmac
import itertools
import json
import logging
import math
import secrets
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Any, cast
from urllib.parse import parse_qs, urlsplit

from skyward.events import Event
from skyward.history.store import Entry, Tail
from skyward.view.page.model import PageModel

__all__ = ["PageServer", "Streams"]


log = logging.getLogger("skyward.page")

_SCRIPTS = ("common", "nodes", "lanes", "lists", "metrics", "app")
_FILES = {
    **{f"/{name}.js": "text/javascript" for name in _SCRIPTS},
    "/style.css": "text/css",
    "/icon.svg": "image/svg+xml",
}
_HOSTS = frozenset(("127.0.0.1", "localhost", "[::1]", "::1"))
_TICK = 1.0
_BEAT = 10.0  # seconds without news after which a page hears that all is well
_LATEST = 0.2  # seconds for which an answer may be old
_AT_ONCE = 0.25  # seconds of reading for one answer: a long history comes bit by bit
_TOKENS = 64
_LONGEST_WINDOW = 1e9
_KEYS = 64
_CONNECTIONS = 128
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)


class PageServer:
    def __init__(
        self, entry: Entry, flush: Callable[[], None] = lambda: None, clock: Callable[[], float] = time.time
    ) -> None:
        self._entry, self._flush, self._clock = entry, flush, clock
        self._tail, self.model = Tail(entry.path), PageModel(entry.pool)
        self._reading = threading.Lock()
        self._read = 0.0
        self._found: Iterator[Event] | None = None
        self._tokens: dict[str, float | None] = {}  # with the time until which it still works
        self._keys: list[str] = []
        self.closed = False
        self.streams = Streams()
        handler = cast("type[_Handler]", type("_Bound", (_Handler,), {"page": self}))
        self._server = _Server(("127.0.0.1", 0), handler)
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve, name=f"skyward-page-{self.port}", daemon=True).start()

    def address(self) -> str:
        token = secrets.token_urlsafe(24)
        self._tokens = {**dict(list(self._tokens.items())[1 - _TOKENS :]), token: None}
        return f"http://127.0.0.1:{self.port}/?token={token}"

    def close(self) -> None:
        self.closed = True
        self.streams.wake()
        self.streams.wait_ended()
        self._server.stop()

    def show_end(self) -> None:
        """Sends the last state to open pages: this program may end right after that."""
        with self._reading:
            self._read = 0.0  # what was read is not the newest
        self.streams.wake()
        self.streams.wait_shown()

    def pause(self, woken: int) -> None:
        self.streams.pause(woken, _TICK if self._found is None else 0.02)

    def key_for(self, token: str) -> str | None:
        """Browsers may ask twice within a few seconds."""
        for known, until in list(self._tokens.items()):
            if hmac.compare_digest(known.encode(), token.encode()) and (until is None or self._clock() < until):
                self._tokens[known] = self._clock() + 5 if until is None else until
                key = secrets.token_urlsafe(24)
                self._keys = [*self._keys[-_KEYS:], key]
                return key
        return None

    def admits(self, key: str) -> bool:
        return any(hmac.compare_digest(known.encode(), key.encode()) for known in self._keys)

    def current(self) -> PageModel:
        now = time.monotonic()
        if now - self._read > _LATEST or self._found is not None:
            if self._found is None:
                self._flush()
                self._found = self._tail.read()
            if self._take(now + _AT_ONCE):
                self._found = None
                if self.model.state != "closed" and not self._entry.running:
                    self.model.killed = True
            self._read = time.monotonic()
        return self.model

    def _take(self, until: float) -> bool:
        assert self._found is not None
        try:
            while batch := list(itertools.islice(self._found, 500)):
                self.model.apply(batch)
                if time.monotonic() > until:
                    return False
        except OSError:
            pass  # removed meanwhile: what is known stays
        return True

    def answer(self, path: str, query: dict[str, str]) -> Any:
        """KeyError for an unknown path, ValueError for a bad query."""
        with self._reading:
            model, now = self.current(), self._clock()
            node, before, limit = _whole(query, "node"), _whole(query, "before"), _whole(query, "limit")
            limit = max(1, min(1000, 200 if limit is None else limit))
            first, last = max(0, _whole(query, "first") or 0), _whole(query, "last")
            match path:
                case "summary":
                    return {**model.summary(now), "read": 1.0 if self._found is None else self._tail.share}
                case "nodes":
                    return model.nodes(_number(query, "since"), first, last)
                case "lanes":
                    start, end = _number(query, "start"), _number(query, "end")
                    if not 0 < end - start < _LONGEST_WINDOW:
                        raise ValueError("start must be before end")
                    width = max(1, min(4000, _whole(query, "width") or 1000))
                    return model.lanes(start, end, width, now, first, last)
                case "calls":
                    return model.calls(query.get("text", ""), node, query.get("outcome", ""), before, limit)
                case "call":
                    return model.call(query.get("id", ""))
                case "output":
                    return model.output(query.get("text", ""), node, query.get("call", ""), before, limit)
                case "metrics":
                    return model.metrics()
                case "events":
                    return model.moments(before, limit)
                case _:
                    raise KeyError(path)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], handler: type[_Handler]) -> None:
        super().__init__(address, handler)
        self._open: dict[Any, None] = {}  # in the order in which they came
        self._lock = threading.Lock()
        self._ended, self._ending = socket.socketpair()

    def serve(self) -> None:
        self.socket.setblocking(False)
        with selectors.DefaultSelector() as selector, self._ended:
            selector.register(self.socket, selectors.EVENT_READ)
            selector.register(self._ended, selectors.EVENT_READ)
            while not any(key.fileobj is self._ended for key, _ in selector.select()):
                self._accept()
        self.server_close()

    def _accept(self) -> None:
        try:
            request, address = self.get_request()
        except OSError:
            return  # it went away before it was accepted, or there are too many open files
        try:
            self.process_request(request, address)
        except RuntimeError:  # no thread can be started: this program has too many
            self.shutdown_request(request)

    def stop(self) -> None:
        self._ending.close()

    def get_request(self) -> tuple[socket.socket, Any]:
        found, address = super().get_request()
        found.setblocking(True)
        return found, address

    def process_request(self, request: Any, client_address: Any) -> None:
        """Closes the oldest connection when there are too many."""
        with self._lock:
            self._open[request] = None
            oldest = next(iter(self._open)) if len(self._open) > _CONNECTIONS else None
            if oldest is not None:
                del self._open[oldest]
                try:
                    oldest.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass  # it has just ended
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def keep(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that goes away is no error."""


class _Handler(BaseHTTPRequestHandler):
    page: PageServer
    protocol_version = "HTTP/1.1"
    server_version = "skyward"
    sys_version = ""
    timeout = 30

    def do_GET(self) -> None:
        origin = self.headers.get("Origin")
        if _host(self.headers.get("Host") or "") not in _HOSTS or (
            origin and _host(urlsplit(origin).netloc) not in _HOSTS
        ):
            self._refuse("this page is served to the computer that it runs on")  # not to a site that leads here
            return
        parts = urlsplit(self.path)
        query = {name: values[-1] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        if parts.path == "/":
            self._shell(query.get("token"))
        elif parts.path in _FILES:
            self._send(_static(parts.path), _FILES[parts.path])
        elif parts.path.startswith("/data/"):
            self._data(parts.path.removeprefix("/data/"), query)
        else:
            self._send(b"there is nothing here\n", "text/plain", HTTPStatus.NOT_FOUND)

    def refuse_method(self) -> None:
        """What follows the head is not read, so it must not be taken for a request."""
        self.close_connection = True
        self._send(b"this page can be read, and nothing else\n", "text/plain", HTTPStatus.METHOD_NOT_ALLOWED)

    do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = refuse_method

    def _shell(self, token: str | None) -> None:
        key = "" if token is None else self.page.key_for(token)
        if key is None:
            self._refuse("this address was used already, or is wrong; pool.view() and `sky view` print a new one")
            return
        self._send(_static("/index.html").replace(b"KEY", key.encode()), "text/html")

    def _data(self, path: str, query: dict[str, str]) -> None:
        if not self.page.admits(query.get("key", "")):
            self._refuse("the key is wrong; pool.view() and `sky view` print a new address")
            return
        if path == "live":
            self._live(query["key"], "quiet" in query)
            return
        if path == "shown":
            self.page.streams.show(query["key"])
            self._send(b"null", "application/json")
            return
        try:
            answer = self.page.answer(path, query)
        except KeyError:
            self._send(b"there is nothing here\n", "text/plain", HTTPStatus.NOT_FOUND)
        except ValueError as exc:
            self._send(f"{exc}\n".encode(), "text/plain", HTTPStatus.BAD_REQUEST)
        except Exception as exc:  # logged, and said on the page
            log.exception("the page cannot show %s", path)
            text = f"this cannot be shown: {type(exc).__name__}: {exc}. This is a bug of Skyward's.\n"
            self._send(text.encode(errors="replace"), "text/plain", HTTPStatus.INTERNAL_SERVER_ERROR)
        else:
            self._send(_json(answer), "application/json")

    def _live(self, key: str, quiet: bool) -> None:
        """At most once per second; a page in the background only gets the end."""
        streams = self.page.streams
        if not streams.begin(key):
            self._send(b"too many pages are open\n", "text/plain", HTTPStatus.SERVICE_UNAVAILABLE)
            return
        cast("_Server", self.server).keep(self.connection)
        sent, at = b"", 0.0
        try:
            self._head("text/event-stream", None)
            while True:
                woken, closed, now = streams.woken, self.page.closed, time.monotonic()
                if quiet and not woken:
                    self._write(b": still there")
                    streams.pause(woken, _BEAT)
                    continue
                summary = self.page.answer("summary", {})
                data = _json(summary)
                if data != sent or now - at > _BEAT:
                    self._write(b"data: " + data)
                    sent, at = data, now
                if woken and summary["state"] in ("closed", "killed"):
                    streams.tell(key)
                if closed:
                    self._write(b"event: end\ndata: {}")
                    return
                self.page.pause(woken)
        except OSError:
            pass  # the page was closed
        finally:
            self.close_connection = True
            streams.end(key)

    def _write(self, message: bytes) -> None:
        self.wfile.write(message + b"\n\n")
        self.wfile.flush()

    def _refuse(self, why: str) -> None:
        self._send(f"{why}\n".encode(), "text/plain", HTTPStatus.FORBIDDEN)

    def _send(self, body: bytes, kind: str, status: HTTPStatus = HTTPStatus.OK) -> None:
        self._head(kind, len(body), status)
        self.wfile.write(body)

    def _head(self, kind: str, length: int | None, status: HTTPStatus = HTTPStatus.OK) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        if length is not None:
            self.send_header("Content-Length", str(length))
        self.send_header("Content-Security-Policy", _POLICY)
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is printed for a request."""


def _host(text: str) -> str:
    return text if text.endswith("]") else text.rpartition(":")[0] or text


def _whole(query: dict[str, str], name: str) -> int | None:
    value = query.get(name)
    if value and len(value) > 15:
        raise ValueError(f"{name} is no such number")
    return int(value) if value else None


def _number(query: dict[str, str], name: str) -> float:
    value = float(query.get(name) or 0)
    if not math.isfinite(value):
        raise ValueError(f"{name} is no such number")
    return value


def _static(path: str) -> bytes:
    return (resources.files("skyward.view.page") / "static" / path.lstrip("/")).read_bytes()


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


_MOST = 32
_TOLD = 2.0  # seconds for writing the last state to all pages: far more than that takes
_SHOWN = 0.5  # seconds for pages to ask for the lists that belong to it


class Streams:
    def __init__(self) -> None:
        self.woken = 0
        self._open: Counter[str] = Counter()
        self._told: set[str] = set()
        self._shown: set[str] = set()
        self._change = threading.Condition()

    def begin(self, key: str) -> bool:
        with self._change:
            if self._open.total() >= _MOST:
                return False
            self._open[key] += 1
            return True

    def end(self, key: str) -> None:
        with self._change:
            self._open[key] -= 1
            self._open += Counter()  # those with none are left out
            self._change.notify_all()

    def pause(self, woken: int, seconds: float) -> None:
        with self._change:
            self._change.wait_for(lambda: self.woken != woken, seconds)

    def tell(self, key: str) -> None:
        self._mark(self._told, key)

    def show(self, key: str) -> None:
        self._mark(self._shown, key)

    def _mark(self, which: set[str], key: str) -> None:
        with self._change:
            which.add(key)
            self._change.notify_all()

    def wake(self) -> None:
        with self._change:
            self._told, self._shown = set(), set()
            self.woken += 1
            self._change.notify_all()

    def wait_shown(self) -> None:
        with self._change:
            if self._change.wait_for(lambda: self._open.keys() <= self._told, _TOLD):
                self._change.wait_for(lambda: self._open.keys() <= self._shown, _SHOWN)

    def wait_ended(self) -> None:
        with self._change:
            self._change.wait_for(lambda: not self._open, _SHOWN)
