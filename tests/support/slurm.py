"""A real Slurm on test hosts, for tests: h0 is the login node and runs the controller, h1, h2, ... are the nodes.

with Cluster(cache) as cluster:
    cluster.run("sinfo")                      # as the user sky, on the login node
    subprocess.run(["sinfo"], env={**os.environ, **cluster.environ})   # from this machine, as the same user

Everything of it runs on the hosts and ends with them: munged with a key and a socket of its own, slurmctld, a slurmd in
the namespaces of each node. Nothing of it is seen by another run.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.support.hosts import Host, HostSpec, Network, lacks_python, unavailable
from tests.support.hosts.machine import SLURM, missing
from tests.support.hosts.spec import USERS
from tests.support.waiting import until

__all__ = ["CACHE", "Cluster", "unavailable_slurm"]

CACHE = "/run/cache"
_DIRECTORY = "/run/slurm"
_SOCKET = f"{_DIRECTORY}/munge.socket"
_USABLE = {"idle", "mixed", "allocated", "completing"}
_PROGRAMS = ("sbatch", "squeue", "scancel", "scontrol", "sinfo", "srun", "sacct", "id")


def unavailable_slurm() -> str | None:
    """Why there can be no Slurm on this machine, in a sentence; None when there can."""
    if lacking := missing(SLURM):
        return f"A Slurm for tests needs {', '.join(lacking)}; run `python -m tests.support.hosts install`."
    return unavailable() or lacks_python()


class Cluster:
    """Slurm with `nodes` nodes of 4 CPUs, 4000 MB and two pretended A100 each, in the partitions main, small and short.

    main: all nodes, any time. small: the first node. short: all nodes, at most two minutes. low: all nodes, preempted
    by jobs in high. Jobs of the user sky find the directory `cache` of this machine at CACHE.
    """

    def __init__(
        self,
        cache: Path,
        nodes: int = 3,
        *,
        tracking: str = "linuxproc",
        kill_wait: int = 5,
        hide: Sequence[str] = (),
    ) -> None:
        """`tracking` is "linuxproc" or "cgroup"; `hide` are programs that compute nodes do not have."""
        self._tracking, self._kill_wait = tracking, kill_wait
        self._key = secrets.token_hex(128)
        share = {CACHE: cache}
        hosts = [HostSpec(share=share), *[HostSpec(share=share, hide=hide)] * nodes]
        self.network = Network(hosts, internet=True)
        # what cgroups are named after is seen by the whole machine
        self._mark = secrets.token_hex(3)

    def __enter__(self) -> Cluster:
        self.network.open()
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Removes everything."""
        self.network.close()
        if self._tracking == "cgroup":
            _remove_cgroups([self.name(node) for node in self.nodes])

    @property
    def _directory(self) -> Path:
        return self.network.directory / "slurm"

    @property
    def login(self) -> Host:
        """The login node, on which the controller runs as well."""
        return self.network[0]

    @property
    def nodes(self) -> list[Host]:
        """The compute nodes."""
        return self.network.hosts[1:]

    def name(self, node: Host) -> str:
        """What Slurm calls a node."""
        return f"{node.name}-{self._mark}" if self._tracking == "cgroup" else node.name

    @property
    def environ(self) -> dict[str, str]:
        """Variables with which a program of this machine finds the commands of Slurm, which then act as sky."""
        return {"PATH": f"{self._directory}/bin:{os.environ['PATH']}"}

    def run(self, *argv: str, check: bool = True) -> str:
        """Runs a command on the login node as sky; returns what it said."""
        done = self.login.run(argv, check=check)
        return done.stdout if done.returncode == 0 else done.stdout + done.stderr

    def admin(self, *argv: str) -> str:
        """Runs a command on the login node as root."""
        return self.login.run(argv, user="root").stdout

    def jobs(self) -> list[str]:
        """The jobs that are not over, as "id name state"."""
        return self.admin("squeue", "-h", "-o", "%i %j %T").splitlines()

    def cancel_all(self) -> None:
        """Ends every job and waits until all are gone."""
        if self.jobs():
            self.admin("scancel", "--user=sky")
        until(lambda: not self.jobs(), 60)

    def state(self, node: Host) -> str:
        """The state of a node, as sinfo says it."""
        return self.admin("sinfo", "-h", "-n", self.name(node), "-o", "%T", "-p", "main").strip()

    def resume(self) -> None:
        """Makes every node usable again, whatever a test did to it."""
        for node in self.nodes:
            if not node.alive:
                node.restart()
                self._settle(node)
            if not any(process.argv[0].endswith("slurmd") for process in node.processes()):
                self._start_slurmd(node)
                # else Slurm asks it for the ends of jobs again only after half a minute or more
                self.admin("scontrol", "update", f"nodename={self.name(node)}", "state=down", "reason=restarted")
        for node in self.nodes:
            if self.state(node) not in _USABLE:
                self.login.run(
                    ["scontrol", "update", f"nodename={self.name(node)}", "state=resume"], user="root", check=False
                )
        self._wait_usable()

    def fail(self, node: Host) -> None:
        """Kills a node with everything on it, and has Slurm notice at once."""
        node.kill()
        self.admin("scontrol", "update", f"nodename={self.name(node)}", "state=down", "reason=killed by a test")

    def logs(self) -> str:
        """What the daemons have written down."""
        show = ["sh", "-c", f"tail -n 30 {_DIRECTORY}/slurm*.log"]
        return "\n".join(host.run(show, user="root").stdout for host in self.network if host.alive)

    @contextmanager
    def down(self, node: Host) -> Generator[None]:
        """A node is in drain while the block runs: it takes no new jobs."""
        self.admin("scontrol", "update", f"nodename={self.name(node)}", "state=drain", "reason=maintenance")
        try:
            yield
        finally:
            self.admin("scontrol", "update", f"nodename={self.name(node)}", "state=resume")

    # how

    def _start(self) -> None:
        for host in self.network:
            self._settle(host)
        self.login.run(["/usr/sbin/slurmctld"], user="root")
        for node in self.nodes:
            self._start_slurmd(node)
        self._write_machine()
        self._wait_usable()

    def _write_machine(self) -> None:
        """Commands for programs of this machine: they see the login node's files, and act as sky."""
        (self._directory / "bin").mkdir(parents=True)
        enter = " ".join(self.login.place.entered([], ["mnt"]))
        number = USERS["sky"]
        become = f"setpriv --reuid={number} --regid={number} --init-groups -- env -C / HOME=/home/sky USER=sky"
        for program in _PROGRAMS:
            path = self._directory / "bin" / program
            path.write_text(f'#!/bin/sh\nexec {enter} {become} /usr/bin/{program} "$@"\n')
            path.chmod(0o755)

    def _settle(self, host: Host) -> None:
        """Settings where sites have them, and a munged."""
        host.run(["mkdir", "-p", "/etc/slurm", "/run/slurmd", _DIRECTORY], user="root")
        # what a login finds, jobs find as well: Slurm asks a login shell
        variables = {"SKYWARD_CACHE": CACHE, **self.network.setenv}
        profile = "".join(f"export {name}={value}\n" for name, value in variables.items())
        host.put("/etc/profile.d/tests.sh", profile.encode())
        host.put("/etc/slurm/slurm.conf", self._config().encode())
        host.put("/etc/slurm/cgroup.conf", _CGROUP.encode())
        devices = "rm -f /run/a100-*; mknod /run/a100-0 c 1 3; mknod /run/a100-1 c 1 3"  # each is a /dev/null
        host.run(["sh", "-c", devices], user="root")
        names = ",".join(self.name(node) for node in self.nodes)
        host.put("/etc/slurm/gres.conf", f"NodeName={names} Name=gpu Type=a100 File=/run/a100-[0-1]\n".encode())
        host.put(f"{_DIRECTORY}/munge.key", self._key.encode(), mode="600")
        files = [f"--{name}-file={_DIRECTORY}/munge.{name}" for name in ("key", "pid", "log", "seed")]
        host.run(["/usr/sbin/munged", "--force", f"--socket={_SOCKET}", *files], user="root")

    def _start_slurmd(self, node: Host) -> None:
        node.run(["/usr/sbin/slurmd", "-N", self.name(node)], user="root")

    def _wait_usable(self) -> None:
        deadline = time.monotonic() + 60
        while True:
            said = self.login.run(["sinfo", "-h", "-N", "-p", "main", "-o", "%T"], user="root", check=False).stdout
            if len(said.split()) == len(self.nodes) and set(said.split()) <= _USABLE:
                return
            if time.monotonic() > deadline:
                raise AssertionError(f"the nodes of Slurm are {said.split()}:\n{self.logs()}")
            time.sleep(0.1)

    def _config(self) -> str:
        """slurm.conf."""
        nodes = "".join(
            f"NodeName={self.name(node)} NodeHostname={node.name} NodeAddr={node.address} CPUs=4 RealMemory=4000 "
            "Gres=gpu:a100:2 State=UNKNOWN\n"
            for node in self.nodes
        )
        names = ",".join(self.name(node) for node in self.nodes)
        values = {
            "socket": _SOCKET,
            "directory": _DIRECTORY,
            "login": f"{self.login.name}({self.login.address})",
            "tracking": f"proctrack/{self._tracking}",
            "task": "task/cgroup" if self._tracking == "cgroup" else "task/none",
            "kill_wait": self._kill_wait,
            "nodes": nodes,
            "names": names,
            "first": self.name(self.nodes[0]),
        }
        return _CONFIG.format(**values)


def _remove_cgroups(names: Sequence[str]) -> None:
    """Removes the cgroups that daemons of nodes with these names have made, which nobody else removes."""
    for name in names:
        for top in Path("/sys/fs/cgroup").glob(f"*/slurm_{name}"):
            inside = sorted((path for path in top.rglob("*") if path.is_dir()), key=lambda path: -len(path.parts))
            for path in (*inside, top):
                try:
                    path.rmdir()
                except OSError:
                    pass  # a process in it is just ending; the machine keeps an empty group


_CGROUP = "CgroupAutomount=no\nConstrainCores=no\nConstrainRAMSpace=no\nConstrainDevices=no\n"

_CONFIG = """\
ClusterName=test
SlurmctldHost={login}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={socket}
CredType=cred/munge
StateSaveLocation={directory}/state
SlurmdSpoolDir=/run/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd.%n.log
ProctrackType={tracking}
TaskPlugin={task}
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
GresTypes=gpu
DefMemPerCPU=500
KillWait={kill_wait}
DebugFlags=NO_CONF_HASH
SchedulerParameters=sched_min_interval=50000,batch_sched_delay=0,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
{nodes}PartitionName=main Nodes={names} Default=YES MaxTime=INFINITE DefaultTime=30 State=UP
PartitionName=small Nodes={first} MaxTime=INFINITE DefaultTime=30 State=UP
PartitionName=short Nodes={names} MaxTime=2 DefaultTime=2 State=UP
PartitionName=low Nodes={names} PriorityTier=1 PreemptMode=CANCEL GraceTime=10 MaxTime=INFINITE DefaultTime=30 State=UP
PartitionName=high Nodes={names} PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE DefaultTime=30 State=UP
"""
