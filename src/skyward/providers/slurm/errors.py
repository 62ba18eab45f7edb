"""What Slurm refuses, in words: which setting is wrong, and what to do."""

from __future__ import annotations

import re
from collections.abc import Mapping

from skyward import errors

__all__ = ["SlurmRefused", "refusal"]


class SlurmRefused(errors.CloudRefused):
    """A command of Slurm that was not carried out; `code` is how it ended, `region` is where it was run."""

    def __str__(self) -> str:
        return self.message


# What sbatch says, which kind that is, and what it means; {names} are the provider's settings.
_MEANT = (
    ("invalid partition", "other", "there is no partition {partition}. These exist: {partitions}"),
    (
        "invalid account",
        "permission",
        "the account {account} does not exist, or may not use the partition {partition}. Give sky.Slurm(account=...) "
        "one of yours; where accounts are kept, `sacctmgr show assoc user=$USER format=account,qos` lists them",
    ),
    ("invalid qos", "permission", "the QOS {qos} does not exist, or your account may not use it. Give another qos="),
    ("time limit is invalid", "other", "the time limit {time} is longer than the partition {partition} allows"),
    ("invalid --time", "other", 'time={time} is no time. Write it as Slurm does: "2:00:00", "1-12:00:00"'),
    (
        "invalid node name",
        "other",
        "a node in nodelist={nodelist} or exclude={exclude} does not exist. `sinfo -N` lists the nodes",
    ),
    (
        "invalid feature",
        "other",
        "no node has the feature constraint={constraint}. `sinfo -o '%N %f'` lists features",
    ),
    (
        "invalid generic resource|invalid (?:gres|tres)",
        "other",
        "no node has the resources gres={gres}. `sinfo -o '%N %G'` lists what nodes have",
    ),
    (
        "node configuration is not available|node count specification invalid|more processors requested",
        "capacity",
        "no nodes of the partition {partition} have what is asked for, in this number. `sinfo -N -o '%N %c %m %G'` "
        "lists CPUs, memory in MB and GPUs of each node",
    ),
    (
        "violates accounting/qos policy|exceed|submit limit",
        "quota",
        "the job is over a limit of your account or QOS: too many jobs, nodes, GPUs, or too much time. Ask for less, "
        "or wait until other jobs of yours are over",
    ),
    ("not permitted|permission denied", "permission", "you may not use the partition {partition}. Choose another"),
    ("partition.*(?:down|inactive|not avail)", "capacity", "the partition {partition} takes no jobs now"),
    ("unrecognized option|invalid option", "other", "this sbatch does not know one of the options={options}"),
    (
        "configuration source|process configuration file",
        "other",
        "there are commands of Slurm, but no cluster that they belong to. Run this on a login node of the cluster, or "
        'name one that you reach by ssh: sky.Slurm(login="user@login")',
    ),
    (
        "unable to contact slurm|connection refused|zero bytes|timed out|backup controller",
        "server",
        "Slurm's controller does not answer. Try again later; `scontrol ping` tells whether it is back",
    ),
)


def refusal(program: str, code: int, said: str, where: str, settings: Mapping[str, object]) -> SlurmRefused:
    """The error for a command that failed; `settings` are the provider's, "partitions" and "options" among them."""
    if code == 127 or re.search(rf"{program}: (?:command )?not found", said):
        message = (
            f"there is no {program} on {where}, so there is no Slurm to ask. Run this on a login node of the cluster, "
            'or name one that you reach by ssh: sky.Slurm(login="user@login").'
        )
        return SlurmRefused(program, str(code), message, where, "other")
    found = ((kind, meaning) for says, kind, meaning in _MEANT if re.search(says, said, re.IGNORECASE))
    kind, meaning = next(found, ("other", f"{program} does not say more than this"))
    names = {name: "(the default)" if value is None else str(value) for name, value in settings.items()}
    what = "Slurm refused the job" if program == "sbatch" else "Slurm did not answer"
    text = f"{what}: {meaning.format(**names)}. ({program} on {where} said: {_cleaned(program, said) or 'nothing'})"
    return SlurmRefused(program, str(code), text, where, kind)


def _cleaned(program: str, said: str) -> str:
    lines = [re.sub(rf"^{program}: (?:error: )?", "", line).strip() for line in said.splitlines()]
    return " / ".join(dict.fromkeys(line for line in lines if line))[:500]
