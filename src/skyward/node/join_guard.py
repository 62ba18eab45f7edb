"""Cleans up after a joiner that was killed: a second small process, which lives as long as a pipe stays open.

Part of the program that joins a pool (`node/join.py`): the standard library only, any Python from 3.8 on.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess

__all__ = ["clean_up", "kill", "start_guard", "started_at"]


def start_guard() -> int:
    """Starts the process that cleans up after a joiner that was killed; it is told of programs through this pipe."""
    reads, writes = os.pipe()
    child = os.fork()
    if child:
        os.close(reads)
        os.waitpid(child, 0)
        return writes
    os.setsid()
    if os.fork():
        os._exit(0)
    os.close(writes)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    running: dict[int, str] = {}
    at_end: list[list[str]] = []
    try:
        with open(reads, "rb") as lines:
            for message in map(json.loads, lines):
                if "program" in message:
                    running[message["program"]] = message["started"]
                elif "at_end" in message:
                    at_end.append(message["at_end"])
                elif "gone" in message:
                    running.pop(message["gone"], None)
        clean_up(running, at_end)
    finally:
        os._exit(0)


def clean_up(running: dict[int, str], at_end: list[list[str]]) -> None:
    """Runs what was ordered for the end, then kills programs that are still there."""
    for argv in at_end:
        try:
            subprocess.run(argv, stdin=subprocess.DEVNULL, timeout=30, check=False)
        except (OSError, subprocess.TimeoutExpired):
            pass
    for pid, started in list(running.items()):
        kill(pid, started)


def kill(pid: int, started: str) -> None:
    """Kills a program with its group, unless another process has got its number by now."""
    try:
        if started_at(pid) == started:
            os.killpg(pid, signal.SIGKILL)
    except OSError:
        pass


def started_at(pid: int) -> str:
    """When a process was started, in ticks since the machine was."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[19]
    except OSError:
        return ""
