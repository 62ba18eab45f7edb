"""What is printed when a pool under stress has failed: the client's state, and the stacks of all processes."""

from __future__ import annotations

import faulthandler
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil

import skyward as sky

__all__ = ["report"]

_WIDTH = 400


def report(pool: sky.ComputePool) -> str:
    """Client state and stacks; what cannot be had is left out."""
    parts = ["client state:", *_state(pool.__dict__.get("_engine"), "engine", 2), "client stacks:", _stacks_here()]
    return "\n".join([*parts, *map(_stacks_of, psutil.Process().children(recursive=True))])


def _state(thing: object, name: str, depth: int) -> list[str]:
    """The attributes of an object of the engine, and of the objects that it holds."""
    try:
        values = dict(vars(thing))
    except TypeError:
        values = {n: getattr(thing, n, None) for n in getattr(type(thing), "__slots__", ())}
    lines: list[str] = []
    for key, value in values.items():
        lines.append(f"  {name}.{key} = {_brief(value)}")
        own = [value] if not isinstance(value, dict | list | tuple) else list(_items(value))[:16]
        for index, part in enumerate(own):
            if depth and type(part).__module__.startswith("skyward"):
                inner = f"{name}.{key}" if part is value else f"{name}.{key}[{index}]"
                lines += _state(part, inner, depth - 1)
    return lines


def _items(value: object) -> list[object]:
    return list(value.values()) if isinstance(value, dict) else list(value)  # type: ignore[call-overload]


def _brief(value: object) -> str:
    try:
        text = repr(value)
    except Exception as exc:  # it is only left out of the report
        text = f"<{type(value).__name__}: {exc}>"
    return text if len(text) <= _WIDTH else text[:_WIDTH] + " ..."


def _stacks_here() -> str:
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()


def _stacks_of(process: psutil.Process) -> str:
    """Command line and state of a process; its Python stacks where py-spy is installed."""
    try:
        head = f"process {process.pid} (child of {process.ppid()}), {process.status()}: {' '.join(process.cmdline())}"
        threads = [
            f"  thread {task.name}: waits in {(task / 'wchan').read_text() or '-'}"
            for task in Path(f"/proc/{process.pid}/task").iterdir()
        ]
    except (psutil.Error, OSError) as exc:
        return f"process {process.pid}: {exc}"
    beside = Path(sys.executable).with_name("py-spy")
    spy = str(beside) if beside.exists() else shutil.which("py-spy")
    if spy is None:
        return "\n".join([head, *threads])
    try:
        argv = [spy, "dump", "--pid", str(process.pid)]
        seen = subprocess.run(argv, capture_output=True, text=True, timeout=20, check=False)
    except subprocess.TimeoutExpired:
        return "\n".join([head, *threads])
    return "\n".join([head, seen.stdout, seen.stderr])
