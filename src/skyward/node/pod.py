"""The first process of a pod, and the way into it: one file, the standard library only, any Python from 3.8 on.

    python3 pod.py stay SECONDS GRACE    waits for the keeper, which `kubectl exec` starts, and ends with it
    python3 pod.py reach HOST PORT       makes a connection of its standard input and output

The keeper is not its child, so it looks for it among the pod's processes. A pod unused for SECONDS ends by itself. One
that is to end tells its nodes, which have GRACE seconds.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from typing import NoReturn

__all__ = ["CRASHED", "REACHED", "find_keeper", "main"]

REACHED = b"+"
"""How a connection begins; anything else is the reason why there is none."""
CRASHED = 1
"""The exit status if the keeper was killed: Kubernetes then starts another one."""
_TAKEN_AWAY = 143
_KEEPER = b"skyward.node.keeper"
_PIECE = 1 << 18
_LOOK = 0.5
_REACH = 10.0


def find_keeper() -> tuple[int, str] | None:
    for name in os.listdir("/proc"):
        words = _words(name) if name.isdigit() else []
        if _KEEPER in words[:6]:
            at = words.index(_KEEPER)
            if len(words) > at + 1:
                return int(name), os.fsdecode(words[at + 1])
    return None


def _words(pid: str) -> list[bytes]:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().split(b"\0")
    except OSError:
        return []  # it has just ended


def _is_busy() -> bool:
    """Whether anything but this process runs here, such as a setup script."""
    own = {os.getpid(), os.getppid(), 1}
    return any(name.isdigit() and int(name) not in own and _words(name) for name in os.listdir("/proc"))


def _pause() -> None:
    """Also reaps orphans, which the first process of a pod inherits."""
    time.sleep(_LOOK)
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _stay(patience: float, grace: float) -> int:
    told: list[int] = []

    def on_notice(number: int, frame: object) -> None:
        """The pod is to end: evicted, preempted, or deleted."""
        path = os.environ.get("SKYWARD_NOTICE", "")
        if path and not told:
            with open(path + ".part", "w") as file:
                file.write(str(time.time() + grace))
            os.rename(path + ".part", path)
        told.append(number)

    signal.signal(signal.SIGTERM, on_notice)
    busy = time.monotonic()
    while (keeper := find_keeper()) is None:
        if told:
            return _TAKEN_AWAY
        if _is_busy():
            busy = time.monotonic()
        elif time.monotonic() - busy > patience:
            return 0  # whoever wanted this pod is gone
        _pause()
    pid, directory = keeper
    while _KEEPER in _words(str(pid)):
        _pause()
    # a keeper that ends removes its directory
    return _TAKEN_AWAY if told else CRASHED if os.path.exists(directory) else 0


def _reach(host: str, port: int) -> int:
    try:
        sock = socket.create_connection((host, port), timeout=_REACH)
    except OSError as exc:
        os.write(1, str(exc).encode())
        return 1
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    os.write(1, REACHED)
    threading.Thread(target=_send, args=(sock,), daemon=True).start()
    _copy(sock.fileno(), 1)
    return 0


def _send(sock: socket.socket) -> None:
    if not _copy(0, sock.fileno()):
        os._exit(0)
    sock.shutdown(socket.SHUT_WR)


def _copy(source: int, target: int) -> bool:
    """Until `source` ends; False if one side is gone, which the other learns by the end of its connection."""
    try:
        while piece := os.read(source, _PIECE):
            while piece:
                piece = piece[os.write(target, piece) :]
    except OSError:
        return False
    return True


def main() -> NoReturn:
    words = sys.argv[1:]
    if words[0] == "stay":
        sys.exit(_stay(float(words[1]), float(words[2])))
    sys.exit(_reach(words[1], int(words[2])))


if __name__ == "__main__":
    main()
