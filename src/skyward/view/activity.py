"""What is going on, in words and figures: how far things are, how busy a node is, calls too short to be seen."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

from skyward import events as on

__all__ = ["Recent", "counted", "elapsed", "group_text", "progress_text"]

_SPAN = 2.0
_MOST = 100_000
_SHORT = 0.05


class Recent:
    """The calls that ended in the last two seconds."""

    def __init__(self) -> None:
        self._ended: deque[tuple[float, str, float]] = deque()
        self._names: Counter[str] = Counter()
        self._short = 0.0  # seconds of those that were short
        self._long: deque[tuple[float, float]] = deque(maxlen=_MOST)  # the others: when they ended, and their seconds

    def add(self, name: str, now: float, seconds: float = 0.0) -> None:
        """A call has ended, which took so many seconds."""
        if len(self._ended) == _MOST:
            self._drop()
        short = seconds if seconds < _SHORT else 0.0
        self._ended.append((now, name, short))
        self._names[name] += 1
        self._short += short
        if not short and seconds:
            self._long.append((now, seconds))
        self._forget(now)

    def text(self, now: float) -> str:
        """What the node was busy with: `double 140/s`; nothing if it was idle."""
        self._forget(now)
        busy = [(name, count) for name, count in self._names.most_common(3) if count > 0]
        return ", ".join(f"{name} {count / _SPAN:,.3g}/s" for name, count in busy)

    def busy(self, now: float, running: Iterable[float], slots: int, since: float) -> float:
        """The share of its slots' time that a node has worked, in the last two seconds; 1 is all of it.

        `running` are the times at which calls that run now began; the node takes calls since `since`.
        """
        self._forget(now)
        span = min(_SPAN, max(now - since, 0.1))
        ended = sum(max(0.0, min(seconds, span - (now - at))) for at, seconds in self._long)
        current = sum(min(max(0.0, now - began), span) for began in running)
        return min(1.0, (self._short + ended + current) / (span * max(slots, 1)))

    def _forget(self, now: float) -> None:
        while self._ended and self._ended[0][0] < now - _SPAN:
            self._drop()
        while self._long and self._long[0][0] < now - _SPAN:
            self._long.popleft()
        if not self._ended:
            self._short = 0.0  # what rounding has left of it

    def _drop(self) -> None:
        _, name, short = self._ended.popleft()
        self._short -= short
        self._names[name] -= 1
        if not self._names[name]:
            del self._names[name]


def elapsed(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02d}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def progress_text(event: on.Progress) -> str:
    """A report of `sky.progress`: `120/1,000 (12 %) loss 0.31`."""
    share = f"/{event.total:,g} ({event.step / event.total:.0%})" if event.total else ""
    return " ".join([f"{event.step:,g}{share}", *(f"{name} {value:.4g}" for name, value in event.metrics.items())])


def group_text(event: on.GroupProgress, age: float = 0.0) -> str:
    """How far a group is: `train: 34/100, 5.2/s, 13 s left`; `age` is how many seconds ago that was told."""
    total = "" if event.total is None else f"/{event.total:,}"
    parts = [f"{event.name}: {event.done:,}{total}{'' if total else ' done'}"]
    parts += [f"{event.failed:,} failed"] if event.failed else []
    if event.over:
        complete = event.done + event.failed == event.total
        return ", ".join([*parts, f"{'' if complete else 'stopped after '}{elapsed(event.seconds)}"])
    parts.append(f"{event.rate:,.1f}/s")
    if event.left is not None:
        parts.append(f"{elapsed(max(0.0, event.left - age))} left")
    return ", ".join(parts)
