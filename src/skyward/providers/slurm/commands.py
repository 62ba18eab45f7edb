"""Runs Slurm's commands here, or on a login node by ssh."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from functools import cached_property

from skyward import errors
from skyward.api.secret import slurm_environment
from skyward.api.shell import Finished, Shell, SshTarget
from skyward.errors import SkywardError

__all__ = ["Commands", "SlurmRefused", "on_node", "refusal"]


# Some sites put the commands on the path only for logins that people type at. Variables by which people adapt the
# commands to their taste must not change what we read.
_PRELUDE = """
command -v squeue >/dev/null 2>&1 || {
  [ ! -r /etc/profile ] || . /etc/profile >/dev/null 2>&1
  PATH=$PATH:/opt/slurm/bin:/usr/local/slurm/bin
}
for name in $(env | sed -n 's/^\\(SQUEUE_[A-Z_]*\\|SINFO_[A-Z_]*\\|SCANCEL_[A-Z_]*\\)=.*/\\1/p'); do unset "$name"; done
export LC_ALL=C SLURM_TIME_FORMAT=%s
"""
_PLAIN = _PRELUDE + 'exec "$@"'
_WITH_SECRET = _PRELUDE + 'secret=$1; shift; IFS= read -r value; export "$secret=$value"; unset value; exec "$@"'
_TIMEOUT = 60.0
# While the job runs, in a step of its own beside that of the node; then here, where the node's files may be, too.
# A job that is completing takes no steps, and its processes may still have some of KillWait.
_ON_NODE = (
    _PRELUDE
    + """
job=$1 node=$2 left=60; shift 2
while
  state=$(squeue -h -j "$job" -o %T 2>&1) || case $state in
    *"Invalid job id"*) state= ;;
    *) echo "$state" >&2; exit 1 ;;
  esac
  [ "$state" = COMPLETING ] && [ "$((left -= 1))" -gt 0 ]
do sleep 1; done
case $state in '' | COMPLETING) exec "$@" ;; esac
exec srun --jobid="$job" --nodelist="$node" --nodes=1 --ntasks=1 --overlap --mem=0 --gres=none --mpi=none \\
  --unbuffered --quiet --job-name=look "$@"
"""
)


def on_node(job: str, node: str, argv: Sequence[str]) -> list[str]:
    """What runs a program on a job's node, where Slurm's commands are; there itself once the job is over."""
    return ["sh", "-c", _ON_NODE, "sh", job, node, *argv]


class Commands:
    """Thread-safe."""

    def __init__(self, login: SshTarget | None, ssh_timeout: float, settings: Mapping[str, object]) -> None:
        self.login, self._ssh_timeout, self._settings = login, ssh_timeout, settings
        self._shell: Shell | None = None
        self.cancelled: set[str] = set()
        self.final = ""

    @property
    def where(self) -> str:
        return "this computer" if self.login is None else str(self.login)

    @cached_property
    def user(self) -> str:
        return self.run("id", "-u").strip()

    def run(self, *argv: str, check: bool = True) -> str:
        return self._result(argv[0], self._finished(["sh", "-c", _PLAIN, "sh", *argv], b""), check)

    def submit(self, options: Sequence[str], variable: str, secret: str, script: str) -> str:
        """Returns the job's id. The secret goes through standard input into a variable."""
        argv = ["sbatch", "--parsable", f"--export={variable}", *options]
        data = f"{secret}\n{script}".encode()
        done = self._finished(["sh", "-c", _WITH_SECRET, "sh", variable, *argv], data)
        return self._result("sbatch", done, True).strip().splitlines()[-1].partition(";")[0]

    def close(self) -> None:
        shell, self._shell = self._shell, None
        if shell is not None:
            shell.close()

    def _result(self, program: str, done: Finished, check: bool) -> str:
        if done.code != 0 and check:
            settings = dict(self._settings)
            if "artition" in done.err:
                settings["partitions"] = self._partitions()
            raise refusal(program, done.code, done.err, self.where, settings)
        return done.out.decode("utf-8", "replace")

    def _partitions(self) -> str:
        try:
            return ", ".join(dict.fromkeys(self.run("sinfo", "-h", "-o", "%R").split())) or "none"
        except SkywardError:
            return "`sinfo -s` lists them"

    def _finished(self, argv: Sequence[str], data: bytes) -> Finished:
        try:
            if self.login is None:
                env = slurm_environment(os.environ)
                done = subprocess.run(
                    argv, input=data, capture_output=True, timeout=_TIMEOUT, check=False, cwd=os.sep, env=env
                )
                return Finished(done.returncode, done.stdout, done.stderr.decode("utf-8", "replace"))
            return self._connected(self.login).run(argv, data, _TIMEOUT)
        except subprocess.TimeoutExpired as exc:
            text = (
                f"Slurm did not answer within {_TIMEOUT:.0f} s on {self.where}. Try again later; is its controller up?"
            )
            raise SlurmRefused("asking", "timeout", text, self.where, "server") from exc

    def _connected(self, login: SshTarget) -> Shell:
        if self._shell is None:
            from skyward.setup.ssh.shell import SshShell

            shell = SshShell(login)
            shell.connect(time.monotonic() + self._ssh_timeout)
            self._shell = shell
        return self._shell


class SlurmRefused(errors.CloudRefused):
    """`code` is the exit status, `region` where it ran."""

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
    ("invalid --time", "other", 'time={time} is not a time. Write it as Slurm does: "2:00:00", "1-12:00:00"'),
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
    if code == 127 or re.search(rf"{program}: (?:command )?not found", said):
        message = (
            f"there is no {program} on {where}, so there is no Slurm to ask. Run this on a login node of the cluster, "
            'or name one that you reach by ssh: sky.Slurm(login="user@login").'
        )
        return SlurmRefused(program, str(code), message, where, "other")
    found = ((kind, meaning) for says, kind, meaning in _MEANT if re.search(says, said, re.IGNORECASE))
    kind, meaning = next(found, ("other", ""))
    names = {name: "(the default)" if value is None else str(value) for name, value in settings.items()}
    what = "Slurm refused the job" if program == "sbatch" else "Slurm did not answer"
    cleaned = _cleaned(program, said) or "nothing"
    text = f"{what}: {meaning.format(**names)}. ({program} on {where} said: {cleaned})"
    if not meaning:  # such as what a site's own filter of jobs says
        text = f"{what}: {cleaned} ({program} on {where} said this)"
    return SlurmRefused(program, str(code), text, where, kind)


def _cleaned(program: str, said: str) -> str:
    lines = [re.sub(rf"^{program}: (?:error: )?", "", line).strip() for line in said.splitlines()]
    return " / ".join(dict.fromkeys(line for line in lines if line))[:2000]
