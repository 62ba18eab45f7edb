"""What facts about hosts mean for a pool. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from skyward.errors import BootstrapError

__all__ = [
    "Clock",
    "Facts",
    "Finding",
    "Gpu",
    "Python",
    "Reached",
    "agreement",
    "cleaned",
    "clock",
    "facts_of",
    "network_of",
    "not_reached",
    "printable",
    "read",
]


State = Literal["ok", "warning", "problem"]

_MEGABYTE, _GIGABYTE = 1 << 10, 1 << 20  # in kilobytes
_LITTLE_ROOM = 10 * _GIGABYTE
_LITTLE_SHM = 256 * _MEGABYTE
_LITTLE_MEMORY = _GIGABYTE
_BUSY_GPU = 1024
_WRONG = 1.0
_DAY = 86_400.0
_SHOWN = 8
_LEAST_PYTHON = (3, 11)
# Which script problems belong to which part; the words are those that a pool would fail with.
_PARTS = {"system": "system", "tool": "programs", "files": "limits", "processes": "limits"}


@dataclass(frozen=True)
class Finding:
    host: str
    """Empty for this computer."""
    what: str
    state: State
    text: str
    do: str = ""


@dataclass(frozen=True)
class Clock:
    """How many seconds a host's clock is ahead, and the possible error."""

    offset: float
    uncertain: float


@dataclass(frozen=True)
class Reached:
    name: str
    ip: str
    why: str
    seconds: float | None = None
    rate: float | None = None


def cleaned(finding: Finding) -> Finding:
    text, do = printable(finding.text, 1000), printable(finding.do, 1000)
    return replace(finding, host=printable(finding.host), text=text.rstrip("."), do=do.rstrip("."))


def not_reached(host: str, error: BootstrapError) -> Finding:
    words, *rest = error.detail.split("\n")
    hand = next((line for line in rest if line.startswith("To try by hand: ")), "")
    said = " ".join(line for line in rest if line != hand)
    return Finding(host, "ssh", "problem", f"{words} {said}", hand)


def facts_of(host: str, facts: Facts, python: tuple[int, int]) -> Iterator[Finding]:
    told = {_PARTS.get(code, "disk") for code, _ in facts.problems}
    for code, text in facts.problems:
        yield Finding(host, _PARTS.get(code, "disk"), "problem", text)
    if "system" not in told:
        yield Finding(host, "system", *_system(facts))
    yield Finding(host, "python", *_python(facts, python))
    if "disk" not in told:
        yield Finding(host, "disk", *_disk(facts))
    yield Finding(host, "memory", *_memory(facts))
    if facts.shm is not None:
        little = facts.shm < _LITTLE_SHM
        do = "What does not fit goes to the disk; workers of a DataLoader fail. Make it larger (docker: --shm-size=1g)"
        text = f"{_size(facts.shm)} free in /dev/shm, for large arguments and results"
        yield Finding(host, "shm", "warning" if little else "ok", text, do if little else "")
    if "limits" not in told:
        yield Finding(host, "limits", "ok", f"{facts.files or 'no known limit of'} open files")
    yield Finding(host, "gpus", *_gpus(facts))
    if facts.pools:
        names = ", ".join(f"{name} of user {user}" for user, name in facts.pools[:_SHOWN])
        text = f"pools of Skyward run here: {names}"
        yield Finding(host, "in use", "warning", text, "Wait for them, or expect to share memory and GPUs")
    if facts.ends_processes:
        text = "its logind ends what you run as soon as the connection is lost (KillUserProcesses=yes)"
        yield Finding(host, "logind", "warning", text, f"Run there once: loginctl enable-linger {facts.user}".rstrip())
    for url, why in facts.indexes:
        yield Finding(host, "packages", *_index(url, why))


def clock(host: str, found: Clock | None) -> Finding:
    if found is None:
        return Finding(host, "clock", "warning", "it does not say what time it is", "Look at `date` there")
    off, unsure = found.offset, found.uncertain
    way = "ahead of" if off > 0 else "behind"
    text = f"{_seconds(abs(off))} {way} this computer's (give or take {_seconds(unsure)})"
    do = "Set it there: sudo timedatectl set-ntp true"
    if abs(off) - unsure >= _DAY:
        return Finding(host, "clock", "problem", f"{text}: certificates of a pool are not valid there", do)
    if abs(off) - unsure > _WRONG:
        return Finding(host, "clock", "warning", f"{text}: times of files and logs do not agree", do)
    return Finding(host, "clock", "ok", f"within {_seconds(abs(off) + unsure)} of this computer's")


def network_of(host: str, own: str, peers: Sequence[Reached], required: bool) -> Iterator[Finding]:
    for peer in [peer for peer in peers if peer.why][:_SHOWN]:
        text = f"cannot connect to {peer.name} ({peer.ip}): {peer.why}"
        do = "Open the hosts' firewalls to each other"
        if not required:
            do += ". Calls still work, through this computer; groups of nodes (torch, jax) do not"
        yield Finding(host, "network", "problem" if required else "warning", text, do)
    there = [peer for peer in peers if not peer.why]
    if there:
        names = ", ".join(f"{peer.name} ({', '.join(_details(peer))})" for peer in there[:_SHOWN])
        more = f" and {len(there) - _SHOWN} more" if len(there) > _SHOWN else ""
        yield Finding(host, "network", "ok", f"from {own} it connects to {names}{more}")


def agreement(hosts: Mapping[str, Facts]) -> Iterator[Finding]:
    if len(hosts) < 2:
        return
    all_of = f"all {len(hosts)} hosts"
    for what, of in (("gpus", _gpu_names), ("driver", _driver), ("system", _machine)):
        kinds: dict[str, list[str]] = {}
        for name, facts in hosts.items():
            kinds.setdefault(of(facts), []).append(name)
        if len(kinds) < 2:
            continue
        if what == "driver" and "" in kinds:
            continue  # that some have no GPU is said already
        told = "; ".join(f"{kind or 'none'} on {', '.join(names[:_SHOWN])}" for kind, names in kinds.items())
        do = {
            "gpus": "A group of nodes is as slow as its slowest; sky.Spec(accelerator=...) checks what nodes have",
            "driver": "Install the same driver on all: NCCL and CUDA may refuse to work together",
            "system": "Packages are resolved once for each kind, and results of groups may differ",
        }[what]
        yield Finding(all_of, what, "warning", f"they differ: {told}", do)


def _details(peer: Reached) -> Iterator[str]:
    if peer.ip not in peer.name:
        yield peer.ip
    if peer.seconds is not None:
        yield _seconds(peer.seconds)
    if peer.rate is not None:
        yield _rate(peer.rate)


def _system(facts: Facts) -> tuple[State, str, str]:
    name = ", ".join(part for part in (facts.distribution, facts.system, facts.libc) if part)
    if facts.platform is not None and not facts.platform:
        return "problem", f"this is {facts.system}", "A host needs Linux on x86_64 or aarch64"
    cores = "" if facts.cpus is None else f", {facts.cpus} cores"
    load = "" if facts.load is None else f", load {facts.load:.1f}"
    if facts.load is not None and facts.cpus and facts.load > 1.5 * facts.cpus:
        return "warning", f"{name}{cores}{load}", "Something else keeps it busy: bodies will be slow"
    return "ok", f"{name}{cores}{load}", ""


def _python(facts: Facts, wanted: tuple[int, int]) -> tuple[State, str, str]:
    version = f"{wanted[0]}.{wanted[1]}"
    if wanted < _LEAST_PYTHON:
        return "problem", f"pools need Python 3.11 or newer, not {version}", "Leave --python out"
    for found in facts.pythons:
        if found.version.startswith(f"{version}."):
            return "ok", f"Python {found.version} at {found.path}", ""
    others = ", ".join(found.version for found in facts.pythons)
    text = f"no Python {version} that works{f' (there is {others})' if others else ''}"
    if any(why == "" for _, why in facts.indexes):
        return "ok", f"{text}; uv brings one", ""
    do = f"A pool fetches one here and sends it. If that fails, install python{version} there"
    return "warning", text, do


def _disk(facts: Facts) -> tuple[State, str, str]:
    if facts.room is None:
        return "warning", f"the free space of {facts.cache} is not known", "Look at `df` there"
    text = f"{_size(facts.room)} free in {facts.room_in}, where environments are made"
    if facts.room < _LITTLE_ROOM:
        return "warning", text, "Torch with CUDA takes 8 GB. Make room, or set SKYWARD_CACHE there to another disk"
    return "ok", text, ""


def _memory(facts: Facts) -> tuple[State, str, str]:
    if facts.memory is None or facts.available is None:
        return "ok", "not known", ""
    text = f"{_size(facts.available)} of {_size(facts.memory)} available"
    little = facts.available < _LITTLE_MEMORY
    return ("warning", text, "End other programs there, or use another host") if little else ("ok", text, "")


def _gpus(facts: Facts) -> tuple[State, str, str]:
    if facts.gpu_failure:
        return "problem", f"its GPUs cannot be used: {facts.gpu_failure}", "Install the driver again, or restart it"
    if not facts.gpus:
        return "ok", "GPUs of AMD" if facts.amd else "none", ""
    text = f"{_gpu_names(facts)}, driver {_driver(facts)}"
    busy = [(number, gpu.used) for number, gpu in enumerate(facts.gpus) if (gpu.used or 0) > _BUSY_GPU]
    if busy:
        used = ", ".join(f"GPU {number} has {(used or 0) / 1024:.1f} GB in use" for number, used in busy[:_SHOWN])
        return "warning", f"{text}; {used}", "Another program uses it: look at nvidia-smi there"
    return "ok", text, ""


def _index(url: str, why: str | None) -> tuple[State, str, str]:
    if why is None:
        return "ok", f"whether it reaches {url} could not be tried: it has neither curl nor Python", ""
    if not why:
        return "ok", f"it reaches {url}", ""
    do = "Packages are then fetched by this computer and sent. If it should reach it, look at its proxy settings"
    return "warning", f"it does not reach {url}: {why}", do


def _gpu_names(facts: Facts) -> str:
    counts: dict[str, int] = {}
    for gpu in facts.gpus:
        size = "" if gpu.memory is None else f" ({gpu.memory / 1024:.0f} GB)"
        counts[gpu.name + size] = counts.get(gpu.name + size, 0) + 1
    return ", ".join(f"{count} x {name}" for name, count in counts.items())


def _driver(facts: Facts) -> str:
    return ", ".join(dict.fromkeys(gpu.driver for gpu in facts.gpus))


def _machine(facts: Facts) -> str:
    return (facts.platform or "").partition("-")[0]


def _size(kilobytes: int) -> str:
    if kilobytes < _GIGABYTE:
        return f"{kilobytes / _MEGABYTE:.0f} MB"
    return f"{kilobytes / _GIGABYTE:.{1 if kilobytes < 100 * _GIGABYTE else 0}f} GB"


def _seconds(seconds: float) -> str:
    if seconds < 1:
        return f"{1000 * seconds:.{1 if seconds < 0.01 else 0}f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _rate(rate: float) -> str:
    bits = 8 * rate
    return f"{bits / 1e9:.1f} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.0f} Mbit/s"


# What a host has said of itself, read from the lines of its check script. Pure.
#
# A hostile host gives wrong facts at most: every text is printable and short, every number within limits.


_LONGEST = 300
_MOST = 64
_HIGHEST = 1 << 60


@dataclass(frozen=True)
class Python:
    version: str
    path: str


@dataclass(frozen=True)
class Gpu:
    name: str
    memory: int | None
    used: int | None
    driver: str


@dataclass
class Facts:
    """Missing facts are empty or None. Sizes in kilobytes."""

    system: str = ""
    libc: str = ""
    distribution: str = ""
    platform: str | None = None
    user: str = ""
    boot: str = ""
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
    pythons: list[Python] = field(default_factory=list[Python])
    pools: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    gpus: list[Gpu] = field(default_factory=list[Gpu])
    gpu_failure: str = ""
    amd: bool = False
    ends_processes: bool = False
    indexes: list[tuple[str, str | None]] = field(default_factory=list[tuple[str, str | None]])
    problems: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    complete: bool = False


def read(lines: Iterable[tuple[str, str]]) -> Facts:
    facts = Facts()
    for word, rest in lines:
        _take(facts, word, rest)
    return facts


def printable(text: str, longest: int = _LONGEST) -> str:
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
