"""A service that says from which address it was asked, as checkip.amazonaws.com does. Run as a program, by its path."""

from __future__ import annotations

import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

__all__: list[str] = []


class _Echo(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(f"{self.client_address[0]}\n".encode())

    def log_message(self, *args: object) -> None:
        """Nothing is said."""


if __name__ == "__main__":
    server = ThreadingHTTPServer((sys.argv[1], 80), _Echo)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    print("ready", flush=True)
    sys.stdin.read()  # ends with whoever started it
