"""What is going on, in words: how far things are, and calls too short to be seen while they run."""

from __future__ import annotations

from collections import Counter, deque

from skyward import events as on

__all__ = ["Recent", "elapsed", "group_text", "progress_text"]

_SPAN = 2.0
_MOST = 100_000


class Recent:
    """The calls that ended in the last two seconds."""

    def __init__(self) -> None:
        self._ended: deque[tuple[float, str]] = deque(maxlen=_MOST)
        self._names: Counter[str] = Counter()

    def add(self, name: str, now: float) -> None:
        """A call has ended."""
        if len(self._ended) == _MOST:
            self._names[self._ended.popleft()[1]] -= 1
        self._ended.append((now, name))
        self._names[name] += 1
        self._forget(now)

    def text(self, now: float) -> str:
        """What the node was busy with: `double 140/s`; nothing if it was idle."""
        self._forget(now)
        busy = [(name, count) for name, count in self._names.most_common(3) if count > 0]
        return ", ".join(f"{name} {count / _SPAN:,.3g}/s" for name, count in busy)

    def _forget(self, now: float) -> None:
        while self._ended and self._ended[0][0] < now - _SPAN:
            name = self._ended.popleft()[1]
            self._names[name] -= 1
            if not self._names[name]:
                del self._names[name]


def elapsed(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02d}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def progress_text(event: on.Progress) -> str:
    """A report of `sky.progress`: `120/1,000 (12 %) loss 0.31`."""
    share = f"/{event.total:,g} ({event.step / event.total:.0%})" if event.total else ""
    return " ".join([f"{event.step:,g}{share}", *(f"{name} {value:.4g}" for name, value in event.metrics.items())])


def group_text(event: on.GroupProgress) -> str:
    """How far a group is: `train: 34/100, 5.2/s, 13 s left`."""
    left = "" if event.left is None else f", {elapsed(event.left)} left"
    return f"{event.name}: {event.done:,}/{event.total:,}, {event.rate:,.1f}/s{left}"
