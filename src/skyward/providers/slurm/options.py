"""From a spec and the provider's settings to the options of sbatch; which of a site's GPUs an accelerator means."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skyward.accelerators import Accelerator
from skyward.api.keywords import check_pairs
from skyward.api.spec import WEEK, Spec
from skyward.errors import InvalidArgument, NoOffer

__all__ = [
    "SETTINGS",
    "Gpus",
    "check_time",
    "extra_options",
    "gpu_request",
    "job_options",
    "parse_gpus",
    "seconds",
]

_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<parts>\d+(?::\d{1,2}){0,2})")
_NAME = re.compile(r"[a-z][a-z0-9-]*")
# What decides how a pool finds its job, and what runs in it, is not the user's to change.
_OURS = """
    array batch chdir comment export export-file get-user-env help het-group hold ignore-pbs job-name
    kill-on-invalid-dep nodefile nodes ntasks ntasks-per-core ntasks-per-gpu ntasks-per-node ntasks-per-socket no-kill
    no-requeue parsable quiet requeue signal test-only usage version wait wrap
""".split()
SETTINGS = ("partition", "account", "qos", "time", "constraint", "gres", "nodelist", "exclude")
"""The options of sbatch that are settings of the provider, under the same names."""


@dataclass(frozen=True)
class Gpus:
    """GPUs of one type that nodes have: Slurm's own name for the type, how many a node has, on how many nodes."""

    type: str
    each: int
    nodes: int

    def __str__(self) -> str:
        kind = self.type or "GPUs of no named type"
        return f"{self.each} x {kind} on {self.nodes} node{'' if self.nodes == 1 else 's'}"


def check_time(time: Any) -> None:
    """Refuses what Slurm would not read as a time, or would read in another unit than was meant."""
    if not isinstance(time, str) or not _TIME.fullmatch(time):
        raise InvalidArgument(
            f'time={time!r} is no time limit. Write it as Slurm does: "2:00:00" is two hours, "1-12:00:00" a day and a '
            'half, "90" ninety minutes.'
        )


def seconds(time: str) -> float:
    """A time as Slurm writes it in seconds; infinite for UNLIMITED, and for what is no time."""
    found = _TIME.fullmatch(time.strip())
    if found is None:
        return math.inf
    parts = [int(part) for part in found["parts"].split(":")]
    if found["days"] is not None:  # days-hours, days-hours:minutes, ...
        hours, minutes, rest = (*parts, 0, 0)[:3]
        return int(found["days"]) * 86400 + hours * 3600 + minutes * 60 + rest
    if len(parts) == 3:
        return parts[0] * 3600 + parts[1] * 60 + parts[2]
    return parts[0] * 60 + (parts[1] if len(parts) == 2 else 0)


def extra_options(options: Mapping[str, Any] | Sequence[tuple[str, Any]]) -> tuple[tuple[str, Any], ...]:
    """The user's further options of sbatch, checked, as pairs."""
    pairs = check_pairs("options", options, '{"mail-type": "END", "exclusive": True}')
    for name, value in pairs:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise InvalidArgument(
                f"options: {name!r} is no long option of sbatch. Write it without dashes in front, like "
                'options={"mail-type": "END", "exclusive": True}.'
            )
        if name in SETTINGS:
            raise InvalidArgument(f"options: {name!r} has a setting of its own: sky.Slurm({name}=...).")
        if name in _OURS:
            raise InvalidArgument(f"options: --{name} is set by the pool itself. Leave it out.")
        if value is not None and not isinstance(value, str | int | float):
            raise InvalidArgument(f"options: {name}={value!r} is neither a text, a number, nor True.")
        if isinstance(value, str) and re.search(r"[\x00-\x1f\x7f]", value):
            raise InvalidArgument(f"options: {name}={value!r} has a line break or another control character in it.")
    return tuple((name, value) for name, value in pairs if value is not None and value is not False)


def job_options(
    settings: Mapping[str, str | None],
    extra: Sequence[tuple[str, Any]],
    spec: Spec,
    count: int,
    gpus: str | None,
) -> list[str]:
    """The options that say what a job gets; `gpus` is the request of GPUs, of which the user's own `gres` is one."""
    made: dict[str, Any] = {"nodes": str(count), "ntasks-per-node": "1"}
    if spec.vcpus is not None:
        made["cpus-per-task"] = str(math.ceil(spec.vcpus))
    if spec.memory_gb is not None:
        made["mem"] = f"{math.ceil(spec.memory_gb * 1024)}M"
    if gpus is not None:
        made["gres"] = gpus
    if spec.ttl != WEEK:
        made["time"] = str(max(1, math.ceil(spec.ttl / 60)))
    made |= {name: value for name, value in settings.items() if value is not None}
    if spec.ttl != WEEK and seconds(made["time"]) > spec.ttl:
        made["time"] = str(max(1, math.ceil(spec.ttl / 60)))

    made |= {"no-requeue": True, "no-kill": True, "output": "/dev/null", "chdir": "/"} | dict(extra)
    return [f"--{name}" if value is True else f"--{name}={value}" for name, value in made.items()]


def parse_gpus(said: str) -> list[Gpus]:
    """What `sinfo -h -o '%D|%G'` says of GPUs: lines like "3|gpu:a100:2(S:0-1),gpu:t4:1"."""
    found: dict[tuple[str, int], int] = {}
    for line in said.splitlines():
        nodes, _, rest = line.partition("|")
        for item in re.findall(r"(?:^|,)gpu(?::([A-Za-z][^:,()]*))?(?::(\d+))?", re.sub(r"\([^)]*\)", "", rest)):
            kind = (item[0], int(item[1] or 1))
            found[kind] = found.get(kind, 0) + (int(nodes) if nodes.strip().isdigit() else 0)
    return [Gpus(kind, each, nodes) for (kind, each), nodes in found.items()]


def gpu_request(accelerator: Accelerator | None, available: Sequence[Gpus], where: str) -> str | None:
    """What --gres is given for an accelerator, in the site's own words; NoOffer if no node has such GPUs.

    A site that names no types is asked for GPUs of any kind; whether they are the right ones is seen on the nodes.
    """
    if accelerator is None:
        return None
    fitting = [gpus for gpus in available if gpus.each >= accelerator.count]
    named = [gpus for gpus in fitting if gpus.type and _means(gpus.type, accelerator)]
    if named:
        best = max(named, key=lambda gpus: gpus.nodes)
        return f"gpu:{best.type}:{accelerator.count}"
    if any(not gpus.type for gpus in fitting):
        return f"gpu:{accelerator.count}"
    have = [str(gpus) for gpus in available] or ["no GPUs at all"]
    hint = 'if one of these is meant, write it as Slurm does: sky.Slurm(gres="gpu:TYPE:1")'
    raise NoOffer(f"{accelerator.described()} a node", where, [*have, hint])


def _means(type: str, accelerator: Accelerator) -> bool:
    """Whether a site's name of a type, such as "a100", "nvidia_a100_80gb_pcie" or "A100-SXM4-40GB", is this model."""
    words = re.split(r"[-_ .]+", type.lower())
    wanted = re.sub(r"[-_ .]", "", accelerator.name.lower())
    joined = {"".join(words[first:last]) for first in range(len(words)) for last in range(first + 1, len(words) + 1)}
    if wanted not in joined:
        return False
    sizes = [int(word[:-2]) for word in words if re.fullmatch(r"\d+gb", word)]
    return not sizes or not accelerator.exact or accelerator.memory_gb in sizes
