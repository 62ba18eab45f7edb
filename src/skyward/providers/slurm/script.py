"""The batch script of a pool's job: it starts one step a node, and each step runs the program that joins the pool.

What joins is in the script itself; what it may join with is a secret, and comes in a variable of the job instead.
"""

from __future__ import annotations

__all__ = ["CANNOT_JOIN", "NO_PYTHON", "VARIABLE", "batch_script"]

VARIABLE = "SKYWARD_JOIN"
NO_PYTHON, CANNOT_JOIN = 41, 42
"""How the script ends if no node has a Python that runs the program, or if no node could join."""

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

start='for python in python3 /usr/bin/python3 /usr/local/bin/python3; do
  "$python" -c "import sys; sys.exit(sys.version_info < (3, 8))" 2>/dev/null || continue
  exec "$python" -E -s -c "import os; exec(os.environ.pop(\\"SKYWARD_PROGRAM\\"))" --stdin --place "$1"
done
exit {no_python}'

SKYWARD_JOB_END=${{SLURM_JOB_END_TIME:-$(SLURM_TIME_FORMAT=%s squeue -h -j "$SLURM_JOB_ID" -o %e 2>/dev/null)}}
export SKYWARD_JOB_END
place={first}
steps=
for node in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
  srun --nodes=1 --ntasks=1 --ntasks-per-node=1 --nodelist="$node" --job-name="place-$place" --export=ALL --mpi=none \\
    --cpu-bind=none --no-kill --unbuffered {step} sh -c "$start" place "$place" <&3 &
  steps="$steps $!"
  place=$((place + 1))
done
unset SKYWARD_PROGRAM {variable}
ended={cannot_join}
for step in $steps; do
  wait "$step"
  code=$?
  [ "$code" -eq 0 ] && ended=0
  [ "$code" -eq {no_python} ] && [ "$ended" -ne 0 ] && ended={no_python}
done
exit "$ended"
"""


def batch_script(program: str, first: int, step: str = "") -> str:
    """The script of a job whose nodes are the places from `first` on; `step` are further options of srun."""
    assert "END-OF-PROGRAM" not in program
    return _SCRIPT.format(
        program=program, first=first, step=step, no_python=NO_PYTHON, cannot_join=CANNOT_JOIN, variable=VARIABLE
    )
