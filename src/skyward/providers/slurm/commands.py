"""Runs the commands of Slurm: here, or on a login node by ssh."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping, Sequence

from skyward.api.shell import Finished, Shell, SshTarget
from skyward.errors import SkywardError
from skyward.providers.slurm.errors import SlurmRefused, refusal

__all__ = ["Commands"]

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


class Commands:
    """The commands of one cluster; usable from many threads."""

    def __init__(self, login: SshTarget | None, ssh_timeout: float, settings: Mapping[str, object]) -> None:
        self._login, self._ssh_timeout, self._settings = login, ssh_timeout, settings
        self._shell: Shell | None = None

    @property
    def where(self) -> str:
        """Where the commands are run, for people."""
        return "this computer" if self._login is None else str(self._login)

    def run(self, *argv: str, check: bool = True) -> str:
        """What a command says; SlurmRefused if it fails."""
        return self._result(argv[0], self._finished(["sh", "-c", _PLAIN, "sh", *argv], b""), check)

    def submit(self, options: Sequence[str], variable: str, secret: str, script: str) -> str:
        """Submits a job; gives its id. The secret goes by standard input, and from there into a variable of the job."""
        argv = ["sbatch", "--parsable", f"--export={variable}", *options]
        data = f"{secret}\n{script}".encode()
        done = self._finished(["sh", "-c", _WITH_SECRET, "sh", variable, *argv], data)
        return self._result("sbatch", done, True).strip().splitlines()[-1].partition(";")[0]

    def close(self) -> None:
        """Disconnects from the login node."""
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
            if self._login is None:
                done = subprocess.run(argv, input=data, capture_output=True, timeout=_TIMEOUT, check=False, cwd=os.sep)
                return Finished(done.returncode, done.stdout, done.stderr.decode("utf-8", "replace"))
            return self._connected(self._login).run(argv, data, _TIMEOUT)
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
