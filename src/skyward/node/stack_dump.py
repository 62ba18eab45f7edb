"""The stack of a runner's thread, taken from outside: the agent signals the thread, and C code writes it.

Works without the GIL, also inside C code or a collective, unless the body blocks our signal.
"""

from __future__ import annotations

import ctypes
import faulthandler
import re
import signal
import sys
import sysconfig
import threading
from pathlib import Path
from types import FrameType
from typing import Any

__all__ = ["SIGNAL", "Frames", "ask", "complete", "helpers", "listen", "of_the_user", "parse"]

Frames = list[tuple[str, int, str]]
"""File, line and function, outermost first."""

SIGNAL = int(signal.SIGRTMIN) + 11 if hasattr(signal, "SIGRTMIN") else int(signal.SIGUSR2)

_PACKAGE = str(Path(__file__).parent.parent) + "/"
_LINE = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.M)
_END = re.compile(r'/node/runner\.py", line \d+ in (_work|_init)\n')  # what is outside says nothing
_DUMP = re.compile(
    r"^(?P<head>(?:Current thread|Thread|Stack)\b[^\n]* \(most recent call first\):\n)"
    r"(?P<frames>(?:  (?:File |\.\.\.)[^\n]*(?:\n|\Z))+)"
    r"(?:\n?Extension modules: [^\n]*(?:\n|\Z))?(?P<gap>\n?)",
    re.M,
)
_AROUND = tuple(f'  File "{_PACKAGE}node/{name}.py"' for name in ("body", "runner"))
_AROUND_IT = (f'  File "{_PACKAGE}', f'  File "{sysconfig.get_path("stdlib")}/asyncio/')
_MOST_HELPERS, _MOST_FRAMES = 64, 32
_CUT = "  ...\n"  # faulthandler writes no more than 100 frames


def listen(fd: int) -> None:
    faulthandler.register(SIGNAL, file=fd, all_threads=False, chain=False)


def ask(pid: int, thread: int) -> str:
    """Returns why it cannot work, or ""."""
    # Without a handler the signal would kill the process: before `listen`, or in a program that has taken its place.
    if not _mask(f"/proc/{pid}/status", "SigCgt"):
        return "its process takes no stack samples: it is starting, or its code has replaced the signal's handler"
    if _mask(f"/proc/{pid}/task/{thread}/status", "SigBlk"):
        return f"its thread blocks signal {SIGNAL}, by which stacks are taken"
    if _libc().tgkill(pid, thread, SIGNAL) != 0:
        return "its thread has ended"
    return ""


def complete(text: str) -> bool:
    return text.endswith(_CUT) or _END.search(text) is not None


def parse(text: str) -> Frames:
    frames: Frames = []
    for file, line, function in _LINE.findall(text):  # the innermost comes first
        if file in (f"{_PACKAGE}node/body.py", f"{_PACKAGE}node/runner.py"):
            break
        frames.append((file, int(line), function))
    frames.reverse()
    while len(frames) > 1 and frames[0][0].startswith(_PACKAGE):
        del frames[0]  # decorators and plugins of ours around the body
    return frames


def helpers(body: int) -> list[Frames] | None:
    ours = {thread.ident for thread in threading.enumerate() if thread.name.startswith("skyward-")}
    standing = sys._current_frames()  # pyright: ignore[reportPrivateUsage] - documented, in spite of its name
    threads = [frame for ident, frame in standing.items() if ident != body and ident not in ours]
    return [_frames(thread) for thread in threads] if len(threads) <= _MOST_HELPERS else None


def _frames(frame: FrameType | None) -> Frames:
    found: Frames = []
    while frame is not None and len(found) < _MOST_FRAMES:
        found.append((frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name))
        frame = frame.f_back
    return found[::-1]


def of_the_user(text: str) -> str:
    return _DUMP.sub(_cut, text) if "(most recent call first):\n" in text else text


def _cut(found: re.Match[str]) -> str:
    kept: list[str] = []
    for line in found["frames"].splitlines(keepends=True):
        if line.startswith(_AROUND):
            break
        kept.append(line)
    while kept and kept[-1].startswith(_AROUND_IT):
        kept.pop()
    if not kept:
        return "" if found["head"].startswith("Thread ") else found[0]
    return found["head"] + "".join(kept) + found["gap"]


def _mask(path: str, name: str) -> bool:
    try:
        found = re.search(rf"^{name}:\s*([0-9a-f]+)$", Path(path).read_text(), re.M)
    except OSError:
        return False
    return found is not None and bool(int(found[1], 16) >> (SIGNAL - 1) & 1)


def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)
