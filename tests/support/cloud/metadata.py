"""A metadata service like EC2's (version 2 only), for machines of the test cloud: it serves the files of a directory.

    cloud -> write(), notice() -> DIRECTORY/meta-data/... -> python metadata.py DIRECTORY -> GET /latest/meta-data/...

It is also a program for a machine that has nothing but Python, so it uses the standard library alone.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingTCPServer

__all__ = ["Metadata", "main", "notice", "write"]

_TTL_HEADER = "X-aws-ec2-metadata-token-ttl-seconds"
_LONGEST = 21600
# cloud-init asks for the newest that it knows; what is said is the same under each.
_VERSIONS = ("1.0", "2009-04-04", "2016-09-02", "2018-09-24", "2021-03-23", "latest")
_KEYS = "public-keys"


def main(argv: Sequence[str] | None = None) -> None:
    """Serves a directory until it is killed; says "ready" as soon as it answers."""
    parser = argparse.ArgumentParser(prog="metadata", description="A metadata service like EC2's.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--address", default="169.254.169.254")
    parser.add_argument("--port", type=int, default=80)
    words = parser.parse_args(argv)
    with Metadata(words.directory, words.address, words.port) as server:
        print("ready", flush=True)
        server.serve_forever()


def write(directory: Path, path: str, text: str) -> None:
    """Has a service say this under a path such as "meta-data/instance-id" from now on."""
    target = directory / path
    target.parent.mkdir(parents=True, exist_ok=True)
    # Beside the directory: it is never served half-written, nor listed.
    part = directory.with_name(f"{directory.name}.{secrets.token_hex(4)}.part")
    part.write_text(text)
    part.rename(target)


def notice(directory: Path, deadline: float, action: str = "terminate") -> None:
    """Has a service tell that its machine is taken away at this time, in whole seconds as EC2 does."""
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(deadline))
    if action == "terminate":
        write(directory, "meta-data/spot/termination-time", at)
    write(directory, "meta-data/spot/instance-action", json.dumps({"action": action, "time": at}))


class Metadata(ThreadingTCPServer):
    """The service of one machine: no token, no answer. `longest` shortens the life of tokens."""

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, directory: Path, address: str, port: int, longest: int = _LONGEST) -> None:
        self.directory = directory
        self.longest = longest
        self.tokens: dict[str, float] = {}
        """Token -> when it expires."""
        self.calls: list[tuple[str, str, int]] = []
        """Method, path and status of all that was asked."""
        super().__init__((address, port), _Call)

    def valid(self, token: str) -> bool:
        """Whether a token counts by now."""
        return self.tokens.get(token, 0.0) > time.monotonic()

    def find(self, path: str) -> str | None:
        """The answer for a path; the names of what is in it for a directory."""
        base = os.path.realpath(self.directory)
        target = os.path.realpath(os.path.join(base, path.strip("/")))
        if target != base and not target.startswith(base + os.sep):
            return None
        try:
            if os.path.isdir(target):
                entries = sorted(os.scandir(target), key=lambda entry: entry.name)
                if os.path.basename(target) == _KEYS:
                    return "\n".join(f"{entry.name}=key" for entry in entries)
                return "\n".join(entry.name + ("/" if entry.is_dir() else "") for entry in entries)
            return Path(target).read_text()
        except OSError:
            return None


class _Call(BaseHTTPRequestHandler):
    server: Metadata  # pyright: ignore[reportIncompatibleVariableOverride] -- it is always this one
    server_version = "EC2ws"
    sys_version = ""
    timeout = 10

    def do_PUT(self) -> None:
        if self.path != "/latest/api/token":
            return self._say(405)
        if self.headers["X-Forwarded-For"] is not None:
            return self._say(403)  # it came through a proxy, which is nobody on this machine
        asked = self.headers[_TTL_HEADER] or ""
        if not asked.isdecimal() or not 1 <= int(asked) <= _LONGEST:
            return self._say(400)
        seconds = min(int(asked), self.server.longest)
        token = secrets.token_urlsafe(40)
        self.server.tokens[token] = time.monotonic() + seconds
        return self._say(200, token, {_TTL_HEADER: str(seconds)})

    def do_GET(self) -> None:
        if not self.server.valid(self.headers["X-aws-ec2-metadata-token"] or ""):
            return self._say(401)
        top, _, path = self.path.partition("?")[0].lstrip("/").partition("/")
        if not top:
            return self._say(200, "\n".join(_VERSIONS))
        found = self.server.find(path) if top in _VERSIONS else None
        return self._say(404) if found is None else self._say(200, found)

    def _say(self, status: int, text: str = "", headers: dict[str, str] | None = None) -> None:
        self.server.calls.append((self.command, self.path, status))
        body = text.encode()
        self.send_response(status)
        for name, value in {"Content-Type": "text/plain", "Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Calls are recorded, not printed."""


if __name__ == "__main__":
    main()
