"""The first process of a test host (and of each other place on the test network): makes it, watches over it, ends it.

Runs as a program, with the machine's own Python. Talks to the network's owner by lines of JSON:

    owner -> here: what to make             here -> owner: {"pid": ...}  namespaces exist, links can be put in
    owner -> here: "go"                     here -> owner: {"ready": true}

It ends, and with it everything on the host, when the owner is gone, however that died, or has closed the pipe.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import time
import traceback
from typing import Any

from furnish import make_host, start_sshd
from kernel import PRIVATE, REC, detach, die_with_parent, enter, mount, unshare

__all__ = ["main"]


def main() -> None:
    """Makes the place that the first line of input describes, then stays until the owner is gone."""
    spec = json.loads(line())
    owner = os.pidfd_open(spec["owner"])
    os.umask(0o022)
    os.chdir("/")
    if "mounts_of" in spec:
        enter("mnt", f"/proc/{spec['mounts_of']}/ns/mnt")
    for kind in spec["new"]:
        unshare(kind)
    if "pid" in spec["new"]:
        child = os.fork()
        if child:
            say({"pid": child})
            os.waitpid(child, 0)
            # All processes of the host are gone; its kernel, so to speak, still answers, until the owner lets go.
            select.select([owner, 0], [], [])
            return
        die_with_parent()
    else:
        say({"pid": os.getpid()})
    if "mnt" in spec["new"]:
        mount(None, "/", None, REC | PRIVATE)
    line()
    for path, value in spec["sysctl"].items():
        with open(f"/proc/sys/{path}", "w") as setting:
            setting.write(value)
    subprocess.run(["/sbin/ip", "-batch", "-"], input=spec["ip"], text=True, check=True)
    if "host" in spec:
        make_host(spec["name"], spec["host"])
        start_sshd(spec["host"])
    say({"ready": True})
    watch(owner)
    if "remove" in spec:
        remove(spec["remove"])


def watch(owner: int) -> None:
    """Reaps what has died, until the owner is gone or closes the pipe."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    poll = select.poll()
    for fd in (owner, 0, woken):
        poll.register(fd, select.POLLIN)
    while True:
        reap()
        ready = [fd for fd, _ in poll.poll()]
        if owner in ready or (0 in ready and not os.read(0, 4096)):
            return
        if woken in ready:
            os.read(woken, 4096)


def reap() -> None:
    """Takes note of every child that has ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def remove(directory: str) -> None:
    """Takes away the run's directory; hosts that are just dying may still write to it, so this is tried for a while.

    Under another name first: as soon as its own is free, another run may take it.
    """
    with open("/proc/self/mountinfo") as table:
        points = [row.split()[4] for row in table]
    for point in reversed(points):
        if point.startswith(directory + "/"):
            detach(point)
    above, name = os.path.split(directory)
    doomed = os.path.join(above, f".{name}-{os.getpid()}")
    try:
        os.rename(directory, doomed)
    except FileNotFoundError:
        pass  # another run has swept it
    deadline = time.monotonic() + 60
    while os.path.exists(doomed) and time.monotonic() < deadline:
        shutil.rmtree(doomed, ignore_errors=True)
        time.sleep(0.02)
    try:
        held = os.open(above, os.O_RDONLY)
        fcntl.flock(held, fcntl.LOCK_EX)  # nobody is about to make another network in it
        os.rmdir(above)
    except OSError:
        pass  # there are other networks in it, or it is gone already


def line() -> str:
    """One line of input and not a byte more: what follows is for the process that we fork."""
    read = b""
    while not read.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            raise SystemExit(0)
        read += byte
    return read.decode()


def say(message: dict[str, Any]) -> None:
    os.write(1, json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    try:
        main()
    except Exception as problem:  # the owner says it
        traceback.print_exc()
        say({"error": f"{type(problem).__name__}: {problem}"})
        raise SystemExit(1) from problem
