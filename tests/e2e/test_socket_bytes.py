"""On a local pool nothing large crosses a socket: processes count what they send, the kernel what loopback carries."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

COUNTER = """
import os, socket

def counted(name):
    plain = getattr(socket.socket, name)
    def send(self, *args):
        sent = plain(self, *args)
        number = sent if sent is not None else memoryview(args[0]).nbytes
        if self.type & socket.SOCK_STREAM:
            fd = os.open("COUNTS", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            os.write(fd, b"%d %d\\n" % (os.getpid(), number))
            os.close(fd)
        return sent
    return send

for name in ("send", "sendall", "sendmsg"):
    setattr(socket.socket, name, counted(name))
"""

PROGRAM = """
from collections.abc import Iterator
import numpy as np
import skyward as sky

@sky.compute
def touch(array, *more):
    return int(array[::512].sum())

@sky.compute
def echo(value):
    return value

@sky.compute
def grown(array):
    return array + 1

@sky.compute
def numbered(count):
    for number in range(count):
        yield np.full(500_000, number)

@sky.compute
def total(items: Iterator[np.ndarray]) -> int:
    return sum(int(item[0]) for item in items)

with sky.ComputePool(nodes=4, console=False) as pool:
    array = np.arange(6_000_000)
    assert touch(array) @ pool == [int(array[::512].sum())] * 4
    assert touch(array, bytes(3_000_000), "x" * 3_000_000) @ pool == [int(array[::512].sum())] * 4
    assert [int(a[5]) for a in grown(array) @ pool] == [6] * 4
    assert len(echo(bytes(20_000_000)) >> pool) == 20_000_000
    small = [np.full(10_000, n) for n in range(500)]
    assert [int(a[0]) for a in echo(small) >> pool] == list(range(500))
    assert [int(a[0]) for a in numbered(5) >> pool] == list(range(5))
    assert total(np.full(500_000, n) for n in range(5)) >> pool == 10
    frozen = sky.compute(lambda: int(array[3]))
    assert frozen() @ pool == [3] * 4
print("done")
"""


def run(folder: Path, *before: str) -> tuple[int, int, str]:
    """Bytes that all processes sent, how many processes did, and what the program printed."""
    counts = folder / "counts"
    (folder / "sitecustomize.py").write_text(COUNTER.replace("COUNTS", str(counts)))  # nodes do not get our environment
    (folder / "program.py").write_text(PROGRAM)
    paths = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [*before, sys.executable, str(folder / "program.py")],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in counts.read_text().splitlines()]
    return sum(int(size) for _, size in lines), len({pid for pid, _ in lines}), done.stdout


def test_no_process_of_a_local_pool_sends_anything_large(tmp_path: Path) -> None:
    """Arguments, results, closures, items of streams both ways: 48 MB to four nodes and as much back."""
    sent, processes, printed = run(tmp_path)
    assert "done" in printed
    assert processes >= 9, "the client, four agents and four runners should have been counted"
    assert sent < 1 << 20


@pytest.mark.skipif(os.geteuid() != 0, reason="a network of its own needs root")
def test_a_local_pool_uses_no_network(tmp_path: Path) -> None:
    """In a network of its own, where nothing else runs, loopback carries nothing."""
    look = 'ip link set lo up 2>/dev/null; "$@"; grep lo: /proc/net/dev'
    _, _, printed = run(tmp_path, "unshare", "--net", "sh", "-c", look, "sh")
    fields = printed.splitlines()[-1].split(":")[1].split()
    assert int(fields[0]) < 1 << 16
