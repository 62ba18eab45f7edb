"""`sky ssh` on real hosts: the node's own directory and Python, a terminal, and the node that was meant."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

import skyward as sky
from tests.ssh.places import reached
from tests.support.hosts import Network
from tests.support.waiting import until


@sky.compute
def where() -> tuple[str, str]:
    return os.getcwd(), sys.executable


def shell(*words: str, data: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **variables}
    command = [sys.executable, "-m", "skyward", "ssh", *words]
    return subprocess.run(command, input=data, capture_output=True, text=True, timeout=240, env=env)


def test_a_shell_on_a_host_is_where_bodies_are(net: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SEC-6: nothing of this computer's environment goes along."""
    monkeypatch.setenv("SKYWARD_STATE", str(tmp_path))
    with sky.ComputePool(provider=reached(net, 2), name="shells", console=False) as pool:
        bodies = where() @ pool
        for node, (directory, python) in enumerate(bodies):
            look = shell("shells", str(node), "--", "hostname; pwd; command -v python; id -un; env", MY_TOKEN="hunter2")
            assert look.returncode == 0, look.stderr
            lines = look.stdout.splitlines()
            assert lines[:4] == [net[node].name, directory, python, "sky"]
            assert "hunter2" not in look.stdout
        assert shell("shells", net[1].address, "--", "hostname").stdout == "h1\n"
        assert shell("shells", "0", "--", "sh", "-c", 'exit "$1"', "x", "9").returncode == 9
        assert shell("shells", "0", data="echo from $(hostname)\nexit 3\n").stdout == "from h0\n"  # no terminal
        assert _typed(["shells", "1"], "tty && hostname && exit 5\r") == ("h1", 5)
        listed = subprocess.run(
            [sys.executable, "-m", "skyward", "ps", "--here", "--json"], capture_output=True, text=True, check=True
        ).stdout
        (row,) = [row for row in map(json.loads, listed.splitlines()) if row["pid"] == os.getpid()]
        assert (row["pool"], row["state"], row["provider"], row["up"]) == ("shells", "open", "SSH", 2)
        assert (row["done"], row["failed"], row["cost"], row["machines"]) == (2, 0, 0, "")
        until(lambda: not [p for host in net for p in host.processes("sky") if p.argv[0].endswith("bash")], 30)
    assert shell("shells", "--", "true").returncode == 1


def _typed(words: list[str], text: str) -> tuple[str, int]:
    """What a shell answers on a terminal to a line that is typed there: the host's name, and the exit status."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "skyward", "ssh", *words]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    os.write(ours, text.encode())
    said = b""
    try:
        while part := os.read(ours, 1 << 16):
            said += part
    except OSError:
        pass  # how Linux says that the other end is closed
    os.close(ours)
    code = process.wait(120)
    lines = said.decode().replace("\r", "").splitlines()
    assert any("/dev/pts/" in line for line in lines), lines
    return next(line for line in lines if line in ("h0", "h1", "h2")), code
