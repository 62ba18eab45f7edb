"""A real dask cluster on test hosts: its scheduler on h0, workers under nannies on all, and TLS among them.

with Network(shown(cache, certificates)) as net, DaskCluster(list(net), certificates, [0, 1, 1]) as cluster:
    cluster.client()
"""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

from distributed import Client
from distributed.security import Security

from .hosts import Host, HostSpec
from .waiting import until

__all__ = ["DaskCluster", "shown"]

_PORT = 8786
_SITE, _TLS, _CACHE = "/run/dask-packages", "/run/dask-tls", "/run/cache"
_PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"


def shown(cache: Path, certificates: Path, hosts: int = 3) -> list[HostSpec]:
    """Hosts that have dask's packages, its certificates, and what pools keep."""
    found = find_spec("distributed")
    assert found is not None
    assert found.origin is not None
    show = {_SITE: Path(found.origin).parents[1], _TLS: certificates}
    return [HostSpec(share={_CACHE: cache}, show=show, setenv={"SKYWARD_CACHE": _CACHE})] * hosts


class DaskCluster:
    """Use it in a `with`. `workers` has the numbers of hosts, each as often as it is to have workers."""

    def __init__(self, hosts: Sequence[Host], certificates: Path, workers: Sequence[int]) -> None:
        self.hosts, self._certificates, self._numbers = hosts, certificates, workers
        self.address = f"tls://{hosts[0].address}:{_PORT}"
        self.security = Security.temporary()
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> DaskCluster:
        with ExitStack() as steps:
            steps.callback(self.close)
            self._write_certificates()
            self._start(self.hosts[0], "scheduler", ["--port", str(_PORT), "--no-dashboard"])
            for number in self._numbers:
                self.add_worker(number)
            with self.client() as client:
                client.wait_for_workers(len(self._numbers), timeout=120)
            steps.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends what runs of dask on the hosts."""
        for host in [host for host in self.hosts if host.alive]:
            _kill(host, "distributed.cli.dask_", "spawn_main")
        for process in self._processes:
            process.kill()
            process.wait()

    def client(self) -> Client:
        """A client of the test's own."""
        with warnings.catch_warnings():  # hosts have a Python of the system's, with another last number
            warnings.filterwarnings("ignore", "Mismatched versions found")
            return Client(self.address, security=self.security, set_as_default=False, timeout=60)

    def add_worker(self, number: int) -> subprocess.Popen[bytes]:
        """Starts another worker on a host; returns its nanny."""
        host = self.hosts[number]
        options = [self.address, "--nthreads", "2", "--no-dashboard", "--host", host.address]
        return self._start(host, "worker", [*options, "--local-directory", "/tmp/dask"])

    def kill_workers(self, host: Host) -> None:
        """kill -9 to a host's workers; their nannies start others."""
        assert _kill(host, "spawn_main")

    def end_workers(self, host: Host) -> None:
        """kill -9 to a host's nannies and workers: dask has nothing left there."""
        assert _kill(host, "dask_worker", "spawn_main")

    def until_workers(self, count: int) -> None:
        """Waits until the scheduler knows so many workers."""
        with self.client() as client:
            until(lambda: len(client.scheduler_info(n_workers=-1)["workers"]) == count, 120, f"{count} dask workers")

    def _write_certificates(self) -> None:
        for role in ("scheduler", "worker"):
            for part in ("cert", "key"):
                (self._certificates / f"{role}-{part}.pem").write_text(getattr(self.security, f"tls_{role}_{part}"))
        (self._certificates / "ca.pem").write_text(str(self.security.tls_ca_file))
        for file in self._certificates.iterdir():
            file.chmod(0o644)

    def _start(self, host: Host, program: str, options: Sequence[str]) -> subprocess.Popen[bytes]:
        tls = [f"--tls-cert={_TLS}/{program}-cert.pem", f"--tls-key={_TLS}/{program}-key.pem"]
        argv = ["env", f"PYTHONPATH={_SITE}", _PYTHON, "-m", f"distributed.cli.dask_{program}"]
        process = host.start(
            [*argv, f"--tls-ca-file={_TLS}/ca.pem", *tls, *options],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._processes.append(process)
        return process


def _kill(host: Host, *words: str) -> bool:
    found = [row.pid for row in host.processes("sky") if any(word in text for word in words for text in row.argv)]
    for pid in found:
        host.run(["kill", "-KILL", str(pid)], user="root", check=False)
    return bool(found)
