"""Serves the page on loopback: a shell without data for everybody, data for whoever has the key.

    http://127.0.0.1:PORT/?token=...   works once: the page gets a key, which it keeps as long as its tab is open
    /data/...?key=...                  JSON; /data/live is a stream of server-sent events

It reads the pool's history, which the pool writes anyway, and only while somebody looks. Nothing of what it shows is
put into HTML here: the page itself puts texts into its elements as texts.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Any, cast
from urllib.parse import parse_qs, urlsplit

from skyward.history.store import Entry, Tail
from skyward.view.page.model import PageModel

__all__ = ["PageServer"]

_FILES = {"/app.js": "text/javascript", "/style.css": "text/css", "/icon.svg": "image/svg+xml"}
_HOSTS = frozenset(("127.0.0.1", "localhost", "[::1]", "::1"))
_TICK = 1.0
_LATEST = 0.2  # seconds for which an answer may be old
_KEYS = 64
_VIEWERS = 32
_CONNECTIONS = 128
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; base-uri 'none'; "
    "form-action 'none'"
)


class PageServer:
    """The page of one pool. It is served by daemon threads of this process until it is closed."""

    def __init__(
        self, entry: Entry, flush: Callable[[], None] = lambda: None, clock: Callable[[], float] = time.time
    ) -> None:
        self._entry, self._flush, self._clock = entry, flush, clock
        self._tail, self.model = Tail(entry.path), PageModel(entry.pool)
        self._reading = threading.Lock()
        self._read = 0.0
        self._tokens: dict[str, float | None] = {}  # with the time until which it still works
        self._keys: list[str] = []
        self._closed = threading.Event()
        self.viewers = threading.BoundedSemaphore(_VIEWERS)
        handler = cast("type[_Handler]", type("_Bound", (_Handler,), {"page": self}))
        self._server = _Server(("127.0.0.1", 0), handler)
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, name="skyward-page", daemon=True).start()

    def address(self) -> str:
        """A new address of the page; it can be opened once."""
        token = secrets.token_urlsafe(24)
        self._tokens[token] = None
        return f"http://127.0.0.1:{self.port}/?token={token}"

    def close(self) -> None:
        """Stops serving; pages that are open say so."""
        self._closed.set()
        self._server.shutdown()
        self._server.server_close()

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._closed.is_set()

    def pause(self) -> bool:
        """Waits for the next look at the history; False if the page is closed."""
        return not self._closed.wait(_TICK)

    def key_for(self, token: str) -> str | None:
        """A key, if the token is right and was not used before; browsers may ask twice within a few seconds."""
        for known, until in list(self._tokens.items()):
            if hmac.compare_digest(known.encode(), token.encode()) and (until is None or self._clock() < until):
                self._tokens[known] = self._clock() + 5 if until is None else until
                key = secrets.token_urlsafe(24)
                self._keys = [*self._keys[-_KEYS:], key]
                return key
        return None

    def admits(self, key: str) -> bool:
        """Whether a key is one of ours."""
        return any(hmac.compare_digest(known.encode(), key.encode()) for known in self._keys)

    def current(self) -> PageModel:
        """The state of the pool, as new as its history is."""
        now = time.monotonic()
        if now - self._read > _LATEST:
            self._flush()
            try:
                self.model.apply(self._tail.read())
            except OSError:
                pass  # removed meanwhile: what is known stays
            if self.model.state != "closed" and not self._entry.running:
                self.model.state = "killed"
            self._read = now
        return self.model

    def answer(self, path: str, query: dict[str, str]) -> Any:
        """The data behind a path; KeyError for a path that there is not, ValueError for a query that is wrong."""
        with self._reading:
            model, now = self.current(), self._clock()
            node = int(query["node"]) if query.get("node") else None
            before = int(query["before"]) if query.get("before") else None
            limit = min(1000, int(query.get("limit") or 200))
            match path:
                case "summary":
                    return model.summary(now)
                case "nodes":
                    return model.nodes(float(query.get("since") or 0))
                case "lanes":
                    width = min(4000, int(query["width"]))
                    return model.lanes(float(query["start"]), float(query["end"]), width, now)
                case "calls":
                    return model.calls(query.get("text", ""), node, query.get("outcome", ""), before, limit)
                case "call":
                    return model.call(query["id"])
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

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serves a connection; when there are too many, the oldest is closed: anybody on this computer can connect."""
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
        """A connection has shown the key: it makes no room for others."""
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
        """Nothing can be changed here; what follows the head is not read, so it must not be taken for a request."""
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
            self._live()
            return
        try:
            answer = self.page.answer(path, query)
        except KeyError:
            self._send(b"there is nothing here\n", "text/plain", HTTPStatus.NOT_FOUND)
        except ValueError as exc:
            self._send(f"{exc}\n".encode(), "text/plain", HTTPStatus.BAD_REQUEST)
        else:
            self._send(_json(answer), "application/json")

    def _live(self) -> None:
        """Sends the summary once a second, as long as somebody looks and it changes."""
        if not self.page.viewers.acquire(blocking=False):
            self._send(b"too many pages are open\n", "text/plain", HTTPStatus.SERVICE_UNAVAILABLE)
            return
        cast("_Server", self.server).keep(self.connection)
        try:
            self._head("text/event-stream", None)
            while True:
                data = _json(self.page.answer("summary", {}))
                self.wfile.write(b"data: " + data + b"\n\n")
                self.wfile.flush()
                if not self.page.pause():
                    self.wfile.write(b"event: end\ndata: {}\n\n")
                    return
        except OSError:
            pass  # the page was closed
        finally:
            self.close_connection = True
            self.page.viewers.release()

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
    """The host of `host:port`, with the brackets of an IPv6 address."""
    return text if text.endswith("]") else text.rpartition(":")[0] or text


def _static(path: str) -> bytes:
    return (resources.files("skyward.view.page") / "static" / path.lstrip("/")).read_bytes()


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
