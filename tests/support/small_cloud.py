"""The API of the small cloud of examples/extensions/small_cloud.py, on this computer: servers are entries in a list.

GET  /v1/account, /v1/types, /v1/servers?label=NAME[=VALUE], /v1/keys?label=...
POST /v1/servers, /v1/keys      201 {"id"}; 409 if the name exists, 507 if there is no room
DELETE /v1/servers/ID, /v1/keys/ID
"""

from __future__ import annotations

import json
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from skyward.testing import Call, Fault, Faults

__all__ = ["TOKEN", "SmallCloud"]

TOKEN = "a-token-for-tests"
_TYPES = {"small": (2, 4, 0.02), "medium": (4, 16, 0.08), "large": (16, 64, 0.32)}


class SmallCloud:
    """`with SmallCloud() as cloud: ... Nimbus(cloud.url, TOKEN)`."""

    def __init__(self, boot: float = 0.05, shutdown: float = 0.05) -> None:
        self.boot, self.shutdown = boot, shutdown
        self.things: dict[str, dict[str, Any]] = {}
        """Servers and keys that exist, by path and id: "servers/s-1"."""
        self.room = dict.fromkeys(_TYPES, 10)
        """How many servers of a type there can be."""
        self.calls: list[Call] = []
        self.faults = Faults()
        self._lock = threading.RLock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"cloud": self}))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    def __enter__(self) -> SmallCloud:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=10)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def fail(self, action: str, **how: Any) -> Fault:
        """Has calls such as "POST servers" fail."""
        return self.faults.add(Fault(action, **how))

    def listed(self, path: str) -> list[dict[str, Any]]:
        """What exists now: servers that have ended are gone for good."""
        with self._lock:
            now = time.time()
            for id in [id for id, thing in self.things.items() if now >= thing.get("gone_at", now + 1)]:
                del self.things[id]
            found = [thing for id, thing in self.things.items() if id.startswith(f"{path}/")]
            for thing in found:
                if thing.get("state") == "starting" and now - thing["created"] >= self.boot:
                    thing |= {"state": "running", "ip": f"192.0.2.{thing['number']}"}
            return [dict(thing) for thing in found]

    def recorded(self, action: str, params: Mapping[str, str]) -> Call:
        with self._lock:
            call = Call(len(self.calls), "small cloud", action, "", params, time.time())
            self.calls.append(call)
            return call

    def answer(self, method: str, path: str, query: Mapping[str, list[str]], body: dict[str, Any]) -> tuple[int, Any]:
        """The status and content of an answer."""
        with self._lock:
            kind = path.partition("/")[0]
            if (method, path) == ("GET", "account"):
                return 200, {"id": "account-7"}
            if (method, path) == ("GET", "types"):
                return 200, [
                    {"name": name, "vcpus": cpus, "memory_gb": gb, "hourly": price}
                    | {"disk_hourly": 0.005, "address_hourly": 0.001}
                    for name, (cpus, gb, price) in _TYPES.items()
                ]
            if kind not in ("servers", "keys"):
                return 404, {"error": f"there is no {path}"}
            if method == "GET":
                name, _, value = query["label"][0].partition("=")
                found = self.listed(kind)
                return 200, [t for t in found if name in t["labels"] and value in ("", t["labels"][name])]
            if method == "DELETE":
                return self._deleted(path)
            return self._made(kind, body)

    def _deleted(self, path: str) -> tuple[int, Any]:
        thing = self.things.get(path)
        if thing is None:
            return 404, {"error": f"there is no {path}"}
        if path.startswith("keys/"):
            del self.things[path]
        elif thing["state"] != "ending":
            thing |= {"state": "ending", "gone_at": time.time() + self.shutdown}
        return 204, None

    def _made(self, kind: str, body: dict[str, Any]) -> tuple[int, Any]:
        existing = self.listed(kind)
        if any(thing["name"] == body["name"] for thing in existing):
            return 409, {"error": f"{body['name']} exists"}
        id = f"{kind[0]}-{secrets.token_hex(4)}"
        thing = {**body, "id": id, "created": time.time()}
        if kind == "servers":
            if sum(server["type"] == body["type"] for server in existing) >= self.room[body["type"]]:
                return 507, {"error": f"no room for {body['type']}"}
            number = 1 + sum(name.startswith("servers/") for name in self.things)
            thing |= {"state": "starting", "ip": "", "private_ip": f"10.0.0.{number}", "number": number}
        self.things[f"{kind}/{id}"] = thing
        return 201, {"id": id}


class _Handler(BaseHTTPRequestHandler):
    cloud: SmallCloud
    timeout = 10

    def do_GET(self) -> None:
        self._serve()

    do_POST = do_DELETE = do_GET

    def _serve(self) -> None:
        parts = urlsplit(self.path)
        path = parts.path.removeprefix("/v1/")
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or b"{}")
        if self.headers["Authorization"] != f"Bearer {TOKEN}":
            return self._say(401, {"error": "who are you?"})
        call = self.cloud.recorded(f"{self.command} {path.partition('/')[0]}", {"body": json.dumps(body)})
        fault = self.cloud.faults.due(call)
        if fault is not None and fault.mode in ("refuse", "cut"):
            status, content = fault.status, {"error": fault.message}
        else:
            status, content = self.cloud.answer(self.command, path, parse_qs(parts.query), body)
        if fault is not None and fault.mode == "fail":
            status, content = fault.status, {"error": fault.message}
        if fault is not None and fault.mode in ("lose", "cut"):
            self.close_connection = True
            return self.connection.shutdown(socket.SHUT_RDWR)
        return self._say(status, content)

    def _say(self, status: int, content: Any) -> None:
        text = b"" if content is None else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: object) -> None:
        """Calls are recorded, not printed."""
