"""CPU and memory of a node's processes, from /proc, and OOM kills."""

from __future__ import annotations

import os
import time
from pathlib import Path

__all__ = ["UsageMeter"]


_REFRESH = 0.05


class UsageMeter:
    """Includes descendants."""

    def __init__(self) -> None:
        self._tick = os.sysconf("SC_CLK_TCK")
        self._page = os.sysconf("SC_PAGE_SIZE")
        self._last: dict[int, float] = {}
        self._at = time.monotonic()
        self._refreshed = 0.0
        self._counters = _oom_counters()
        self._oom = self._oom_kills()

    def sample(self, pids: list[int]) -> tuple[float, int]:
        now, used, memory = time.monotonic(), 0.0, 0
        current: dict[int, float] = {}
        for pid in _with_descendants(pids):
            try:
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                memory += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * self._page
            except (OSError, IndexError):
                continue  # it has ended meanwhile
            current[pid] = (int(fields[11]) + int(fields[12])) / self._tick
            used += max(0.0, current[pid] - self._last.get(pid, current[pid]))
        span, self._at, self._last = max(1e-3, now - self._at), now, current
        return round(100 * used / span, 1), memory

    def cpu_seconds(self, pid: int) -> float:
        used = 0
        for each in _with_descendants([pid]):
            try:
                fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has ended meanwhile
            used += sum(map(int, fields[11:15]))  # with children that have ended and were waited for
        return used / self._tick

    def refresh(self) -> None:
        now = time.monotonic()
        if now - self._refreshed > _REFRESH:
            self._refreshed, self._oom = now, self._oom_kills()

    def out_of_memory(self) -> bool:
        before, self._oom = self._oom, self._oom_kills()
        return self._oom > before

    def _oom_kills(self) -> int:
        total = 0
        for path in self._counters:
            try:
                lines = path.read_text().splitlines()
            except OSError:
                continue
            total += sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
        return total


def _with_descendants(pids: list[int]) -> list[int]:
    found = list(pids)
    for pid in found:
        try:
            for task in Path(f"/proc/{pid}/task").iterdir():
                found += [int(p) for p in (task / "children").read_text().split()]
        except OSError:
            continue
    return found


def _oom_counters() -> list[Path]:
    found: list[Path] = []
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if not controllers:
            found.append(Path(f"/sys/fs/cgroup{group}/memory.events"))
        elif "memory" in controllers.split(","):
            found.append(Path(f"/sys/fs/cgroup/memory{group}/memory.oom_control"))
    return [path for path in found if path.exists()]
