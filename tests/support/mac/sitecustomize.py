"""Takes away from Python what macOS does not have; on the Python path of a client and all programs that it starts.

There is no Mac among the machines that run these tests. What is removed: functions of `os`, `select`, `socket` and
`resource` that only Linux has, everything under /proc and /dev/shm, abstract sockets, and long paths of sockets.
"""

import builtins
import os
import resource
import select
import socket
import struct
import sys

_MISSING = {
    os: [
        *(
            "memfd_create posix_fallocate sched_getaffinity sched_setaffinity sched_getscheduler pidfd_open eventfd"
        ).split(),
        *("eventfd_read eventfd_write pipe2 copy_file_range splice getrandom setns unshare waitid O_TMPFILE").split(),
        *("O_PATH O_NOATIME getxattr setxattr listxattr prlimit timerfd_create posix_fadvise fdatasync").split(),
    ],
    select: ["epoll", *(name for name in dir(select) if name.startswith("EPOLL"))],
    socket: ["SO_PEERCRED", "SOCK_CLOEXEC", "SOCK_NONBLOCK", "MSG_NOSIGNAL", "MSG_CMSG_CLOEXEC", "TCP_USER_TIMEOUT"],
    resource: ["prlimit", "RLIMIT_NICE", "RLIMIT_RTPRIO", "RLIMIT_SIGPENDING"],
}
_HIDDEN = ("/proc", "/dev/shm", "/sys")
_MAC_NAMES = {"TCP_KEEPIDLE": "TCP_KEEPALIVE"}


def _hidden(path: object) -> bool:
    if isinstance(path, int):
        return False
    text = os.fsdecode(path)  # type: ignore[arg-type]
    return any(text == hidden or text.startswith(hidden + "/") for hidden in _HIDDEN)


def _guarded(act):  # type: ignore[no-untyped-def]
    def guarded(path=".", *args, **kwargs):  # type: ignore[no-untyped-def]
        if path is not None and _hidden(path):
            raise FileNotFoundError(2, "No such file or directory (macOS)", path)
        return act(path, *args, **kwargs)

    return guarded


def _addressed(act):  # type: ignore[no-untyped-def]
    def addressed(self, address, *args):  # type: ignore[no-untyped-def]
        if self.family == socket.AF_UNIX:
            raw = os.fsencode(address)
            if raw.startswith(b"\0") or len(raw) > 103:
                raise OSError(63, "File name too long, or an abstract socket (macOS)")
        return act(self, address, *args)

    return addressed


def _getsockopt(self, level, option, *size):  # type: ignore[no-untyped-def]
    if (level, option, size) == (0, 1, (76,)) and self.family == socket.AF_UNIX:  # LOCAL_PEERCRED
        _, uid, gid = struct.unpack("iII", _real(self, socket.SOL_SOCKET, 17, 12))
        return struct.pack("IIh2x16I", 0, uid, 1, gid, *[0] * 15)
    return _real(self, level, option, *size)


_real = socket.socket.getsockopt

if not sys.argv[0].endswith("pip"):
    import selectors
    import ssl  # noqa: F401 - both look at what there is when they are loaded
    import subprocess

    for _module, _names in _MISSING.items():
        for _name in _names:
            if hasattr(_module, _name):
                delattr(_module, _name)
    for _name in ("open", "stat", "lstat", "listdir", "scandir", "readlink", "access", "mkdir", "statvfs"):
        setattr(os, _name, _guarded(getattr(os, _name)))
    builtins.open = _guarded(builtins.open)
    for _name in ("bind", "connect"):
        setattr(socket.socket, _name, _addressed(getattr(socket.socket, _name)))
    socket.socket.getsockopt = _getsockopt  # type: ignore[method-assign]
    selectors.DefaultSelector = selectors.PollSelector  # type: ignore[misc]
    subprocess._USE_POSIX_SPAWN = False  # type: ignore[attr-defined]
    os.environ["SKYWARD_TESTS_MAC"] = "1"
