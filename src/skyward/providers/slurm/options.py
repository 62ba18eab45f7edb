"""From a spec and the provider's settings to options of sbatch."""

from __future__ import annotations

import math
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skyward.accelerators import Accelerator
from skyward.api.checks import check_pairs
from skyward.api.spec import WEEK, Spec
from skyward.errors import InvalidArgument, NoOffer

__all__ = [
    "SETTINGS",
    "VARIABLE",
    "Gpus",
    "batch_script",
    "check_setup",
    "check_time",
    "extra_options",
    "gpu_request",
    "job_options",
    "meaning",
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


@dataclass(frozen=True)
class Gpus:
    type: str
    each: int
    nodes: int

    def __str__(self) -> str:
        kind = self.type or "GPUs of no named type"
        return f"{self.each} x {kind} on {self.nodes} node{'' if self.nodes == 1 else 's'}"


def check_time(time: Any) -> None:
    if not isinstance(time, str) or not _TIME.fullmatch(time):
        raise InvalidArgument(
            f'time={time!r} is not a time limit. Write it as Slurm does: "2:00:00" is two hours, "1-12:00:00" a day '
            'and a half, "90" ninety minutes.'
        )


def check_setup(python: Any, modules: Any, setup: Any) -> tuple[str, ...]:
    for name, value in (("python", python or "python3"), *(("modules", module) for module in modules)):
        if not isinstance(value, str) or not value.isprintable() or not value or value.startswith("-"):
            raise InvalidArgument(
                f'{name}: {value!r} is not a name. Write python="/sw/bin/python3.11", modules=["cuda"].'
            )
    if not isinstance(setup, str) or "\0" in setup or "END-OF-" in setup:
        raise InvalidArgument(f'setup={setup!r}: expected lines of bash, like setup="source /sw/env.sh".')
    return tuple(modules)


def seconds(time: str) -> float:
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
    pairs = check_pairs("options", options, '{"mail-type": "END", "exclusive": True}')
    for name, value in pairs:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise InvalidArgument(
                f"options: {name!r} is not a long option of sbatch. Write it without dashes in front, like "
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
    """Parses `sinfo -h -o '%D|%G'`: lines like "3|gpu:a100:2(S:0-1),gpu:t4:1"."""
    found: dict[tuple[str, int], int] = {}
    for line in said.splitlines():
        nodes, _, rest = line.partition("|")
        for item in re.findall(r"(?:^|,)gpu(?::([A-Za-z][^:,()]*))?(?::(\d+))?", re.sub(r"\([^)]*\)", "", rest)):
            kind = (item[0], int(item[1] or 1))
            found[kind] = found.get(kind, 0) + (int(nodes) if nodes.strip().isdigit() else 0)
    return [Gpus(kind, each, nodes) for (kind, each), nodes in found.items()]


def gpu_request(accelerator: Accelerator | None, available: Sequence[Gpus], where: str) -> str | None:
    """--gres in the site's own words; NoOffer if no node has such GPUs. Without types, the nodes check."""
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
    words = re.split(r"[-_ .]+", type.lower())
    wanted = re.sub(r"[-_ .]", "", accelerator.name.lower())
    joined = {"".join(words[first:last]) for first in range(len(words)) for last in range(first + 1, len(words) + 1)}
    if wanted not in joined:
        return False
    sizes = [int(word[:-2]) for word in words if re.fullmatch(r"\d+gb", word)]
    return not sizes or not accelerator.exact or accelerator.memory_gb in sizes


# The batch script of a pool's job: it starts one step a node, and each step runs the program that joins the pool.
#
# What joins is in the script itself; what it may join with is a secret, and comes in a variable of the job instead.


VARIABLE = "SKYWARD_JOIN"
# How the script ends if no node has a Python that runs the program, if none could join, if the user's own lines failed.
# If Pythons are too old, that of the newest is _OLD and its minor version.
_NO_PYTHON, _CANNOT_JOIN, _SETUP_FAILED, _OLD = 41, 42, 43, 50

# A place knows by the end of its standard input that it is gone. srun passes on what it reads, so it reads from a pipe
# that stays open, and nobody writes to.
_SCRIPT = """\
#!/bin/sh
umask 077
SKYWARD_PROGRAM=$(cat <<'END-OF-PROGRAM'
{program}
END-OF-PROGRAM
)
export SKYWARD_PROGRAM
held=$(mktemp -d "${{TMPDIR:-/tmp}}/skyward-XXXXXX") || exit 1
mkfifo "$held/pipe" && exec 3<>"$held/pipe"
rm -rf "$held"

start=$(cat <<'END-OF-START'
{start}
END-OF-START
)

SKYWARD_JOB_END=${{SLURM_JOB_END_TIME:-$(SLURM_TIME_FORMAT=%s squeue -h -j "$SLURM_JOB_ID" -o %e 2>/dev/null)}}
export SKYWARD_JOB_END
place={first}
steps=
for node in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
  srun --nodes=1 --ntasks=1 --ntasks-per-node=1 --nodelist="$node" --job-name="place-$place" --export=ALL --mpi=none \\
    --cpu-bind=none --no-kill --unbuffered {shell} -c "$start" place "$place" "$SLURM_JOB_NAME" <&3 &
  steps="$steps $!"
  place=$((place + 1))
done
unset SKYWARD_PROGRAM {variable}
ended={cannot_join}
for step in $steps; do
  wait "$step"
  code=$?
  case $code in
    0) ended=0 ;;
    {no_python} | {setup_failed} | 5[0-7]) [ "$ended" -eq 0 ] || ended=$code ;;
  esac
done
exit "$ended"
"""
# What a step runs. In a directory to which everybody may write, whoever came first has made what lies there.
_START = """\
export SLURM_JOB_NAME="$2"
skyward_place=$1
{setup}
is_safe() {{
  case $1 in /*) at=$1 ;; *) return 0 ;; esac
  while above=${{at%/*}} && [ -n "$above" ]; do
    [ -z "$(find "$above/." -prune -perm -0002 2>/dev/null)" ] ||
      [ -n "$(find "$at" -prune \\( -user 0 -o -user "$(id -u)" \\) 2>/dev/null)" ] || return 1
    at=$above
  done
}}
newest=0
for SKYWARD_PYTHON in {pythons}; do
  {check}
  found=$("$SKYWARD_PYTHON" -c 'import sys; print(sys.version_info[0] * 100 + sys.version_info[1])' 2>/dev/null)
  case $found in '' | *[!0-9]*) continue ;; esac
  [ "$found" -le "$newest" ] || newest=$found
  [ "$found" -ge 308 ] || continue
  SKYWARD_PYTHON=$(command -v "$SKYWARD_PYTHON")
  export SKYWARD_PYTHON
  exec "$SKYWARD_PYTHON" -E -s -c 'import os; exec(os.environ.pop("SKYWARD_PROGRAM"))' --stdin --place "$skyward_place"
done
[ "$newest" -lt 300 ] || exit "$((newest - 300 + {old}))"
exit {no_python}"""
_SETUP = """\
trap 'exit {setup_failed}' EXIT
{lines}
[ "$?" -eq 0 ] || exit
trap - EXIT
set +eu"""
_LOAD = """\
command -v module >/dev/null 2>&1 || [ ! -r /etc/profile ] || . /etc/profile
command -v module >/dev/null 2>&1 || [ ! -r "$MODULESHOME/init/bash" ] || . "$MODULESHOME/init/bash"
module load {modules} || exit
"""


def batch_script(
    program: str, first: int, python: str | None = None, modules: Sequence[str] = (), setup: str = ""
) -> str:
    """The script of a job whose nodes take the places from `first` on.

    Each loads `modules`, runs `setup`, and joins with `python`, this program's Python if it exists there, or its own.
    """
    lines = (_LOAD.format(modules=shlex.join(modules)) if modules else "") + setup
    own = dict.fromkeys([getattr(sys, "_base_executable", ""), sys.executable, "python3"])
    pythons = [python] if python else [*filter(None, own), "/usr/bin/python3", "/usr/local/bin/python3"]
    start = _START.format(
        setup=_SETUP.format(lines=lines, setup_failed=_SETUP_FAILED) if lines else "",
        pythons=shlex.join(pythons),
        check="" if python else 'is_safe "$SKYWARD_PYTHON" || continue',
        old=_OLD,
        no_python=_NO_PYTHON,
    )
    assert "END-OF-" not in program + start
    return _SCRIPT.format(
        program=program,
        start=start,
        first=first,
        shell="bash" if lines else "sh",
        variable=VARIABLE,
        no_python=_NO_PYTHON,
        cannot_join=_CANNOT_JOIN,
        setup_failed=_SETUP_FAILED,
    )


def meaning(code: int, tried: str = "") -> str | None:
    if code == _CANNOT_JOIN:
        return f"no node could connect to the pool. {tried}".rstrip(". ")
    if code == _SETUP_FAILED:
        return (
            "what sky.Slurm has in modules= or setup= failed on a node. "
            'sky.Slurm(options={"output": "/path/of/a/file"}) keeps what it says'
        )
    old = f"; the newest that was found is 3.{code - _OLD}" if _OLD <= code < _OLD + 8 else ""
    if code == _NO_PYTHON or old:
        return (
            f"no node has a Python from 3.8 on{old}. sky.Slurm(python=...) was tried or, without it, {sys.executable} "
            "and python3. Give python= the path of one that nodes have, or load one: modules=['python/3.11']"
        )
    return None
