"""Pools over SSH against what ssh, scp and torchrun do on the same hosts; prints ratios, asserts nothing.

    sudo .venv/bin/python benchmarks/hosts.py               everything, on three hosts that it makes and removes
    sudo .venv/bin/python benchmarks/hosts.py open calls    some of it: open calls data slow ddp many
    ... --quick             small counts, one round: shows that it works, not how fast
    ... --json all.json     also add the rows to what run.py has written there

The hosts are network namespaces of this machine with an sshd each (tests/support/hosts), so they share its cores.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1])]

import contest
from contest import Row

import skyward as sky
from skyward.api.shell import SshTarget
from skyward.setup.ssh.shell import SshShell
from tests.support.hosts import Host, HostSpec, Network

__all__ = ["main"]

_PARTS = ("open", "calls", "data", "slow", "ddp", "many")
CACHE = "/run/skyward"
NUMPY = sky.Image(pip=["numpy"])
TORCH = sky.Image(pip=["torch==2.13.0", "numpy"], env={"OMP_NUM_THREADS": "1"})
LOOP = Path(__file__).with_name("ddp_loop.py")
_ECHO = """
import socket
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
while True:
    connection, _ = server.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while data := connection.recv(65536):
        connection.sendall(data)
"""


@sky.compute
def nothing() -> None:
    """The least that a call can do."""


@sky.compute
def given(data: Any) -> Any:
    """The argument, back."""
    return data


@sky.compute
def size(data: Any) -> int:
    """How large the argument is."""
    return len(data)


class Bench:
    """Three hosts, and how to get at them."""

    def __init__(self, net: Network, quick: bool) -> None:
        self.net, self.rounds, self.quick = net, 1 if quick else 5, quick
        key, known = str(net.key), str(net.known_hosts)
        self.provider = sky.SSH([host.address for host in net], user="sky", key=key, known_hosts=known)
        self.python = ""

    def pool(self, image: sky.Image = NUMPY) -> sky.ComputePool:
        """A pool on all hosts."""
        return sky.ComputePool(provider=self.provider, image=image, console=False)

    def ssh(self, host: Host, *argv: str, program: str = "ssh") -> list[str]:
        """A plain ssh or scp, with the cipher that Skyward asks for too."""
        options = ["-F", str(self.net.config), "-o", "BatchMode=yes", "-c", "aes128-gcm@openssh.com"]
        return [program, *options, *([host.name] if program == "ssh" else []), *argv]

    def interleaved(self, *acts: Callable[[], Any]) -> list[float]:
        """The median time of each, in turns."""
        seen: list[list[float]] = [[] for _ in acts]
        for _ in range(self.rounds):
            for act, times in zip(acts, seen, strict=True):
                began = time.perf_counter()
                act()
                times.append(time.perf_counter() - began)
        return [statistics.median(times) for times in seen]

    def open(self) -> Iterator[Row]:
        """A cached environment: from nothing to three nodes, against three plain logins that import asyncio and ssl."""
        kept: list[float] = []

        def opened() -> None:
            began = time.perf_counter()
            with self.pool():
                kept.append(time.perf_counter() - began)

        def plain() -> None:
            command = f"{self.python} -c 'import asyncio, ssl'"
            waiting = [subprocess.Popen(self.ssh(host, command)) for host in self.net]
            if any(process.wait() for process in waiting):
                raise RuntimeError("a plain ssh failed")

        _, ssh = self.interleaved(opened, plain)
        peer = 'ssh host python -c "import asyncio, ssl" x 3'
        yield Row("open 3 hosts, environment cached", statistics.median(kept), peer, ssh, "s", at_most=2.0)

    def calls(self) -> Iterator[Row]:
        """A call that does nothing, against bytes that an echo server on the host sends back through such a tunnel."""
        host = self.net[0]
        target = SshTarget(host.address, "sky", key=str(self.net.key), known_hosts=str(self.net.known_hosts))
        shell = SshShell(target)
        shell.connect(time.monotonic() + 20)
        with tempfile.TemporaryFile() as errors:
            server = shell.start([self.python, "-u", "-c", _ECHO], {}, errors)
            assert server.stdout is not None
            port = int(server.stdout.readline())
        count = 50 if self.quick else 1000
        ours: list[float] = []
        theirs: list[float] = []
        with self.pool() as pool, shell.reach("127.0.0.1", port) as echo:
            for _ in range(count):
                began = time.perf_counter()
                nothing() >> pool
                ours.append(time.perf_counter() - began)
                began = time.perf_counter()
                echo.sendall(b"x" * 200)
                echo.recv(65536)
                theirs.append(time.perf_counter() - began)
        server.kill()
        server.wait()
        shell.close()
        middle = [1000 * statistics.median(times) for times in (ours, theirs)]
        yield Row("no-op call, median", middle[0], "echo through the same tunnel", middle[1], "ms", at_most=2.5)

    def data(self) -> Iterator[Row]:
        """100 MB to a host and back, against scp both ways."""
        megabytes = 10 if self.quick else 100
        with self.pool() as pool, tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "data"
            given(b"x") >> pool

            def ours() -> None:
                content = os.urandom(megabytes * 1_000_000)
                began = time.perf_counter()
                back = given(content) >> pool
                times.append(time.perf_counter() - began)
                assert len(back) == len(content)

            def theirs() -> None:
                host = self.net[0]
                subprocess.run(self.ssh(host, "-q", str(path), f"{host.name}:/tmp/data", program="scp"), check=True)
                subprocess.run(self.ssh(host, "-q", f"{host.name}:/tmp/data", str(path), program="scp"), check=True)

            times: list[float] = []
            path.write_bytes(os.urandom(megabytes * 1_000_000))
            _, scp = self.interleaved(ours, theirs)
        yield Row(f"{megabytes} MB there and back", statistics.median(times), "scp both ways", scp, "s", at_most=1.05)

    def slow(self) -> Iterator[Row]:
        """50 MB to three hosts over a client's link of 100 Mbit/s, against sending it to one."""
        megabytes = 5 if self.quick else 50
        with self.pool() as pool, tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "data"
            path.write_bytes(os.urandom(megabytes * 1_000_000))
            size(b"x") @ pool
            self.net.slow_client(100)
            try:

                def ours() -> None:
                    content = os.urandom(megabytes * 1_000_000)
                    began = time.perf_counter()
                    assert size(content) @ pool == [len(content)] * 3
                    times.append(time.perf_counter() - began)

                def theirs() -> None:
                    with path.open("rb") as file:
                        subprocess.run(self.ssh(self.net[0], "cat > /dev/null"), stdin=file, check=True)

                times: list[float] = []
                _, once = self.interleaved(ours, theirs)
            finally:
                self.net.slow_client(None)
        yield Row(
            f"{megabytes} MB argument to 3 hosts, 100 Mbit/s",
            statistics.median(times),
            "sending it once with ssh",
            once,
            "s",
            at_most=1.2,
        )

    def ddp(self) -> Iterator[Row]:
        """One DDP training across the hosts, against torchrun on them, in turns; one thread each, as cores are few."""
        steps, loop = 100 if self.quick else 300, LOOP.read_text()
        rates: list[list[float]] = [[], []]
        with self.pool(TORCH) as pool:
            python = sky.compute(_interpreter)() >> pool
            for host in self.net:
                host.put("/home/sky/ddp_loop.py", loop.encode(), user="sky", mode="600")
            for turn in range(self.rounds):
                rates[0].append((sky.compute(_trained_here)(loop, steps) @ pool)[0])
                rates[1].append(self._torchrun(python, steps, 29500 + turn))
        ours, theirs = (statistics.median(seen) for seen in rates)
        yield Row("DDP across 3 hosts, steps/s", ours, "torchrun on the same hosts", theirs, "/s", at_least=0.98)

    def _torchrun(self, python: str, steps: int, port: int) -> float:
        """Steps per second of the same training."""
        head, into = self.net[0].address, "/home/sky/seen.json"
        settings = "OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=eth0 TP_SOCKET_IFNAME=eth0"
        run = f"{python} -m torch.distributed.run --nnodes 3 --nproc-per-node 1 --master-addr {head}"
        commands = [
            f"{settings} {run} --master-port {port} --node-rank {rank} /home/sky/ddp_loop.py {into} {steps}"
            for rank in range(3)
        ]
        waiting = [
            subprocess.Popen(self.ssh(host, command), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            for host, command in zip(self.net, commands, strict=True)
        ]
        said = [process.communicate()[0] for process in waiting]
        if any(process.returncode for process in waiting):
            raise RuntimeError("torchrun failed on a host:\n" + "\n".join(said))
        return float(json.loads(self.net[0].run(["cat", into], user="sky").stdout)["rate"])

    def many(self) -> Iterator[Row]:
        """Simulated nodes, all on this machine: how the cost grows with their number."""
        seen: dict[int, tuple[float, float, float]] = {}
        for nodes in (5, 10) if self.quick else (25, 50, 100, 200):
            began = time.perf_counter()
            with sky.ComputePool(nodes=nodes, console=False, provision_timeout=600) as pool:
                opened = time.perf_counter()
                nothing() @ pool
                broadcast = time.perf_counter()
            closed = time.perf_counter()
            seen[nodes] = (opened - began, broadcast - opened, closed - broadcast)
        least = min(seen)
        for nodes, figures in seen.items():
            for what, figure, first in zip(("open", "broadcast a no-op", "close"), figures, seen[least], strict=True):
                each = 1000 * figure / nodes
                yield Row(f"{what}, {nodes} nodes, each", each, f"at {least} nodes", 1000 * first / least, "ms")


def _interpreter() -> str:
    import sys

    return sys.executable


def _trained_here(loop: str, steps: int) -> float:
    """The body of ddp_loop.py, in the group that the decorator has formed."""
    import skyward as sky

    namespace: dict[str, Any] = {"__name__": "ddp_loop"}
    exec(compile(loop, "ddp_loop.py", "exec"), namespace)
    train = sky.integrations.torch(namespace["train"])
    return float(train(steps)["rate"])


@contextmanager
def _hosts() -> Iterator[Network]:
    cache = Path(tempfile.mkdtemp(prefix="skyward-bench-"))
    try:
        spec = HostSpec(share={CACHE: cache}, setenv={"SKYWARD_CACHE": CACHE})
        with Network([spec] * 3, internet=True) as net:
            yield net
    finally:
        shutil.rmtree(cache, ignore_errors=True)


def main() -> None:
    """Measures what is named, or everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"some of {' '.join(_PARTS)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="small counts, one round")
    parser.add_argument("--json", type=Path, help="also add the rows to this file, which run.py has written")
    args = parser.parse_args()
    if unknown := set(args.names) - set(_PARTS):
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}; there are {', '.join(_PARTS)}")
    rows: list[Row] = []
    print(contest.HEADER, flush=True)
    with _hosts() as net:
        bench = Bench(net, args.quick)
        with bench.pool() as pool:  # makes the environment, so that the rest finds it
            bench.python = sky.compute(_interpreter)() >> pool
        for name in args.names or _PARTS:
            for row in getattr(bench, name)():
                print(contest.line(row), flush=True)
                rows.append(row)
    if args.json:
        kept = json.loads(args.json.read_text())
        args.json.write_text(json.dumps(kept | {"hosts": [asdict(row) for row in rows]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
