"""What a host has said of itself, read from the lines of its check script. Pure.

A hostile host gives wrong facts at most: every text is printable and short, every number within limits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

__all__ = ["Facts", "Gpu", "Python", "printable", "read"]

_LONGEST = 300
_MOST = 64
_HIGHEST = 1 << 60


@dataclass(frozen=True)
class Python:
    """A Python that works there."""

    version: str
    path: str


@dataclass(frozen=True)
class Gpu:
    """A GPU as nvidia-smi lists it; memory in MiB."""

    name: str
    memory: int | None
    used: int | None
    driver: str


@dataclass
class Facts:
    """All that a host has said; what it did not say is empty or None. Sizes are in kilobytes."""

    system: str = ""
    libc: str = ""
    distribution: str = ""
    platform: str | None = None
    user: str = ""
    boot: str = ""
    """Another one after each boot, and on each machine."""
    cpus: int | None = None
    load: float | None = None
    memory: int | None = None
    available: int | None = None
    cache: str = ""
    room: int | None = None
    room_in: str = ""
    shm: int | None = None
    files: str = ""
    uv: str = ""
    python: str = ""
    """The Python that runs the test of the network; empty if there is none."""
    pythons: list[Python] = field(default_factory=list[Python])
    pools: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    """Pools of Skyward that run there: user and name."""
    gpus: list[Gpu] = field(default_factory=list[Gpu])
    gpu_failure: str = ""
    amd: bool = False
    ends_processes: bool = False
    """Whether logind ends what a user has started when the connection is lost."""
    indexes: list[tuple[str, str | None]] = field(default_factory=list[tuple[str, str | None]])
    """Package indexes, and why one cannot be reached: "" if it can, None if that could not be tried."""
    problems: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    complete: bool = False
    """Whether the script came to its end."""


def read(lines: Iterable[tuple[str, str]]) -> Facts:
    """The facts, from the first word and the rest of each line."""
    facts = Facts()
    for word, rest in lines:
        _take(facts, word, rest)
    return facts


def printable(text: str, longest: int = _LONGEST) -> str:
    """The text on one line, without control characters and what else a terminal would act on, and not too long."""
    kept = "".join(c if c.isprintable() else " " for c in text[: 4 * longest])
    kept = " ".join(kept.split())
    return kept if len(kept) <= longest else kept[: longest - 4] + " ..."


def _take(facts: Facts, word: str, rest: str) -> None:
    match word:
        case "system":
            parts = [*rest.split("\t"), "", ""]
            facts.system, facts.libc, facts.distribution = (printable(part) for part in parts[:3])
        case "platform" | "user" | "boot" | "cache" | "uv" | "files":
            setattr(facts, word, printable(rest))
        case "cpus":
            facts.cpus = _number(rest)
        case "load":
            facts.load = _fraction(rest)
        case "memory":
            facts.memory, facts.available = (_number(part) for part in [*rest.split(), "", ""][:2])
        case "room":
            room, _, where = rest.partition(" ")
            facts.room, facts.room_in = _number(room), printable(where)
        case "shm":
            facts.shm = _number(rest)
        case "python" if len(facts.pythons) < _MOST:
            version, _, path = rest.partition(" ")
            if printable(path) not in (known.path for known in facts.pythons):
                facts.pythons.append(Python(printable(version, 20), printable(path)))
        case "pool" if len(facts.pools) < _MOST:
            user, _, name = rest.partition(" ")
            pair = printable(user, 40), printable(name, 80)
            if pair not in facts.pools:  # an agent has the same command line as its keeper
                facts.pools.append(pair)
        case "gpu" if len(facts.gpus) < _MOST:
            name, memory, used, driver = [*(part.strip() for part in rest.split(",")), "", "", "", ""][:4]
            facts.gpus.append(Gpu(printable(name, 60), _number(memory), _number(used), printable(driver, 40)))
        case "gpu-failed":
            facts.gpu_failure = printable(rest.partition(" ")[2]) or "nvidia-smi has failed"
        case "amd":
            facts.amd = True
        case "logind":
            facts.ends_processes = rest.split()[:2] in ([yes, "no"] for yes in ("yes", "true", "1", "on"))
        case "index-ok" | "index-failed" | "index-unknown" if len(facts.indexes) < _MOST:
            url, _, why = rest.partition("\t")
            reason = {"index-ok": "", "index-unknown": None}.get(word, printable(why) or "no answer")
            facts.indexes.append((printable(url), reason))
        case "problem" if len(facts.problems) < _MOST:
            code, _, text = rest.partition(" ")
            facts.problems.append((printable(code, 20), printable(text, 600)))
        case "done":
            facts.complete, facts.python = True, rest.strip()
        case _:
            pass


def _number(text: str) -> int | None:
    text = text.strip()
    return min(int(text), _HIGHEST) if text.isascii() and text.isdigit() and len(text) < 25 else None


def _fraction(text: str) -> float | None:
    whole, _, part = text.strip().partition(".")
    number = _number(whole)
    return None if number is None else float(f"{number}.{part if part.isascii() and part.isdigit() else 0}")
