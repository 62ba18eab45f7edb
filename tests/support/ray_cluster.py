"""A real Ray of three nodes on test hosts, for tests: the head on h0, GPUs that only Ray counts, and a token.

with RayCluster() as cluster:
    cluster.driver("import ray; ray.init('auto'); print(ray.cluster_resources())")
"""

from __future__ import annotations

import json
import secrets
import shutil
import subprocess
import sys
import urllib.request
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from uuid import NAMESPACE_OID, uuid5

from uv import find_uv_bin

from tests.support.hosts import Host, HostSpec, Network, Process
from tests.support.waiting import until

__all__ = ["GPUS", "PYTHON", "RayCluster"]

PYTHON = "/home/sky/ray/bin/python"
"""The cluster's Python: it has Ray, and neither Skyward nor anything that Skyward needs."""
GPUS = 2
"""What h1 and h2 have of GPUs, as far as Ray and nvidia-smi say."""
_SITE, _BIN, _CACHE, _SKYWARD = "/run/ray-packages", "/run/stand-ins", "/run/cache", "/run/skyward"
_SOURCE = Path(__file__).parents[2] / "src"
# Ray says within 14 s that a node is lost; with these within 3 s.
_QUICK = {"RAY_health_check_period_ms": "500", "RAY_health_check_timeout_ms": "1000"}
_QUICK |= {"RAY_health_check_failure_threshold": "4", "RAY_health_check_initial_delay_ms": "0"}


class RayCluster:
    """Use it in a `with`. Everything of it lies on the hosts, and goes with them."""

    def __init__(self, cache: Path, stand_ins: Path, token: bool = True) -> None:
        """`cache`: what hosts keep between pools. `stand_ins`: a directory for programs that only these hosts have."""
        found = find_spec("ray")
        assert found is not None, "ray is not installed"
        assert found.origin is not None
        self._cache = cache
        self.token = secrets.token_hex(16) if token else None
        stand_ins.chmod(0o755)
        _write_nvidia_smi(stand_ins / "nvidia-smi")
        shutil.copy(find_uv_bin(), stand_ins / "uv")
        shown = {_SITE: Path(found.origin).parents[1], _BIN: stand_ins, _SKYWARD: _SOURCE}
        setenv = {"SKYWARD_CACHE": _CACHE, "RAY_USAGE_STATS_ENABLED": "0", **_QUICK}
        setenv |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token} if self.token else {}
        plain = HostSpec(share={_CACHE: cache}, show=shown, setenv=setenv)
        path = {"PATH": f"{_BIN}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"}
        with_gpus = HostSpec(share={_CACHE: cache}, show=shown, setenv={**setenv, **path})
        self.network = Network([plain, with_gpus, with_gpus], internet=True)

    def __enter__(self) -> RayCluster:
        self.network.open()
        try:
            for host in self.network:
                _make_python(host)
            self._start([self.head])
            self._start(list(self.network)[1:])
        except BaseException:
            self.network.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.network.close()

    @property
    def python(self) -> str:
        """The cluster's Python, on each host."""
        return PYTHON

    @property
    def head(self) -> Host:
        """The host with Ray's head."""
        return self.network[0]

    @property
    def url(self) -> str:
        """Where the Jobs API answers."""
        return f"http://{self.head.address}:8265"

    def get(self, path: str) -> Any:
        """What the Jobs API says."""
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        with urllib.request.urlopen(urllib.request.Request(self.url + path, headers=headers), timeout=30) as answer:
            return json.load(answer)

    def driver(self, source: str, host: Host | None = None, check: bool = True, timeout: float = 300) -> str:
        """Runs a program with the cluster's Python on a host, the head if none is named; what it has printed."""
        done = (host or self.head).run([PYTHON, "-c", source], check=check, timeout=timeout)
        return done.stdout + ("" if check else done.stderr)

    def client(self, source: str, host: Host | None = None) -> subprocess.Popen[str]:
        """Starts a program that uses Skyward on a host, the head if none is named, with the cluster's Python."""
        where = host or self.head
        where.run(["ln", "-sf", f"{_BIN}/uv", str(Path(PYTHON).with_name("uv"))])
        argv = ["env", f"PYTHONPATH={_SKYWARD}", "PYTHONUNBUFFERED=1", PYTHON, "-c", source]
        return where.start(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def nodes(self) -> dict[str, dict[str, Any]]:
        """What Ray knows of each host that it takes for alive, by address."""
        told = self.driver("import json, ray; ray.init('auto', log_to_driver=False); print(json.dumps(ray.nodes()))")
        known: list[dict[str, Any]] = json.loads(told.strip().splitlines()[-1])
        return {node["NodeManagerAddress"]: node for node in known if node["Alive"]}

    def left(self) -> list[str]:
        """What is there of pools: processes and directories on hosts, jobs that run, groups that hold resources."""
        found = [f"{host.name}: {' '.join(p.argv)[:200]}" for host in self.network for p in _ours(host)]
        found += [f"pool {path.name}" for path in self._cache.glob("pools/*")]
        jobs = self.get("/api/jobs/")
        found += [
            f"job {j['submission_id']}" for j in jobs if j["submission_id"] and j["status"] in ("RUNNING", "PENDING")
        ]
        groups = self.get("/api/v0/placement_groups")["data"]["result"]["result"]
        return found + [f"group {group['name']} {group['state']}" for group in groups if group["state"] != "REMOVED"]

    def restart(self, host: Host) -> None:
        """Starts Ray on a host again whose raylet, or all of it, was killed; returns when Ray counts it in."""
        if not host.alive:
            host.restart()
        host.run(["sh", "-c", f"{PYTHON} -m ray.scripts.scripts stop --force >/dev/null 2>&1; rm -rf /tmp/ray"])
        self._start([host])
        until(lambda: host.address in self.nodes(), 60, f"Ray on {host.name}")

    def _start(self, hosts: list[Host]) -> None:
        begun = {host: self._begin(host) for host in hosts}
        for host, process in begun.items():
            said, _ = process.communicate(timeout=120)
            if process.returncode:
                raise RuntimeError(f"Ray did not start on {host.name}: {said[-2000:]}")

    def _begin(self, host: Host) -> subprocess.Popen[str]:
        first = host is self.head
        options = ["--disable-usage-stats", "--object-store-memory=80000000", "--num-cpus=4", "--log-color=false"]
        options += [f"--node-ip-address={host.address}"]
        options += ["--head", "--port=6379", f"--dashboard-host={host.address}", "--num-gpus=0"] if first else []
        options += [] if first else [f"--address={self.head.address}:6379", f"--num-gpus={GPUS}"]
        argv = [PYTHON, "-m", "ray.scripts.scripts", "start", *options]
        return host.start(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _ours(host: Host) -> list[Process]:
    """Processes of Skyward's on a host: joiners, and what they have started."""
    words = ("/proc/self/fd/", "skyward.node.")
    found = host.processes() if host.alive else []
    return [process for process in found if any(word in " ".join(process.argv) for word in words)]


def _make_python(host: Host) -> None:
    """A Python for Ray: an environment of its own that finds the packages of this one."""
    where, name = Path(PYTHON).parents[1], f"python{sys.version_info.major}.{sys.version_info.minor}"
    host.run([name, "-m", "venv", "--without-pip", str(where)])
    host.put(str(where / "lib" / name / "site-packages" / "packages.pth"), _SITE.encode(), user="sky")


def _write_nvidia_smi(path: Path) -> None:
    """Stands in for the driver's program; CUDA does not run there."""
    uuids = [f"GPU-{uuid5(NAMESPACE_OID, str(number))}" for number in range(GPUS)]
    listing = "\n".join(f"GPU {n}: NVIDIA A100-SXM4-80GB (UUID: {uuid})" for n, uuid in enumerate(uuids))
    memory = "\n".join(f"{uuid}, 81920" for uuid in uuids)
    path.write_text(
        f"#!/bin/sh\ncase $1 in\n-L) cat <<'END'\n{listing}\nEND\n;;\n*) cat <<'END'\n{memory}\nEND\n;;\nesac\n"
    )
    path.chmod(0o755)
