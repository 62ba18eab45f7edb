"""Detached runs on machines that have joined: they keep the run, and come to whoever looks at it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from skyward.cli.main import main
from skyward.pool.run import Run
from tests.ssh.joining import join, joiners, login
from tests.ssh.places import ours
from tests.support.hosts import Network
from tests.support.waiting import until

PROGRAM = """
import socket, sys, time
import skyward as sky
from skyward.api.shell import SshTarget

@sky.compute
def square(x):
    return x * x, socket.gethostname()

if __name__ == "__main__":
    with sky.ComputePool(provider=sky.Join({settings}), nodes=2, grace=2, console=False{options}) as pool:
{body}
    print("the end", flush=True)
"""
WAIT = """
print("ready", *sorted(square(3) @ pool), flush=True)
try:
    time.sleep(600)
finally:
    print("clean", flush=True)
"""


_joined: list[subprocess.Popen[bytes]] = []


@pytest.fixture(autouse=True)
def folder(net: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A state and a working directory of its own for each test, and nothing that stays on the hosts."""
    (tmp_path / "state").mkdir(mode=0o700)
    (tmp_path / "work").mkdir()
    monkeypatch.setenv("SKYWARD_STATE", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path / "work")
    yield tmp_path
    nothing_is_left(net)
    while _joined:
        _joined.pop().wait(60)


def nothing_is_left(net: Network) -> None:
    left = lambda: [[host.name, *ours(host), *joiners(host)] for host in net if ours(host) or joiners(host)]  # noqa: E731
    until(lambda: not left(), 90, left)


def submit(
    net: Network, body: str, settings: str = "", options: str = "", words: tuple[str, ...] = (), before: str = ""
) -> subprocess.CompletedProcess[str]:
    """In a process of its own, which is killed as soon as the run has begun."""
    path = Path("join.py").absolute()
    settings = f"file={str(path)!r}, {settings or f'addresses=[{net.address!r}]'}"
    lines = "\n".join(f"        {line}" for line in dedent(body).strip().splitlines())
    text = PROGRAM.replace("{settings}", settings).replace("{options}", options).replace("{body}", lines)
    Path("train.py").write_text(text)
    code = f"import os\n{before}\nfrom skyward.cli.main import main\ncode = main()\nos.kill(os.getpid(), 9)\n"
    argv = [sys.executable, "-c", code, "run", "--detach", "train.py", "--name", "grid", *words]
    over = threading.Event()

    def run() -> None:
        def written() -> bool:
            return over.is_set() or (path.exists() and path.read_text().endswith("main())\n"))

        until(written, 60)
        if not over.is_set():
            _joined.extend(join(host, path.read_text(), stdin=subprocess.DEVNULL) for host in (net[1], net[2]))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        return subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
    finally:
        over.set()
        thread.join()


def attached() -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "skyward", "attach", "grid"]
    return subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)


def text_of(run: Run) -> str:
    return b"".join(run.output()).decode()


def test_a_run_goes_on_when_whoever_submitted_it_is_killed(net: Network) -> None:
    done = submit(net, "for i in range(100):\n    print(i, *sorted(square(i) @ pool), flush=True)\ntime.sleep(3)")
    assert "grid runs" in done.stdout, done.stderr
    assert "Node 0 then stays for up to 60 min" in done.stdout
    assert not Path("join.py").exists(), "nobody else may join"
    assert Run("grid").status.stage == "running"
    both = [threading.Thread(target=attached) for _ in range(2)]
    for thread in both:
        thread.start()
    found = attached()
    for thread in both:
        thread.join()
    assert found.returncode == 0, found.stderr
    lines = [f"{i} ({i * i}, 'h1') ({i * i}, 'h2')" for i in range(100)]
    assert text_of(Run("grid")).splitlines() == [*lines, "the end"]
    assert main(["runs", "drop", "grid"]) == 0


def test_machines_that_only_reach_the_login_host_keep_a_run(net: Network, capfd: pytest.CaptureFixture[str]) -> None:
    for host in (net[1], net[2]):
        host.cut_client()
    try:
        done = submit(net, WAIT, f"login={login(net, net[0])!r}")
        assert "grid runs" in done.stdout, done.stderr
        run = Run("grid")
        until(lambda: "ready (9, 'h1') (9, 'h2')" in text_of(run), 60, lambda: text_of(run))
        assert main(["stop", "grid"]) == 0
        assert "grid is over: stopped" in capfd.readouterr().out
        assert "clean" in text_of(run)
        nothing_is_left(net)
    finally:
        for host in (net[1], net[2]):
            host.heal_client()


def test_what_can_reach_a_joined_machine_is_this_user_s_alone(net: Network, folder: Path) -> None:
    """SEC-34: the way back is kept for this user, and lets in the machine of node 0 only."""
    done = submit(net, WAIT)
    assert "grid runs" in done.stdout, done.stderr
    record = folder / "state" / "runs" / "grid"
    assert (record / "way").stat().st_mode & 0o777 == 0o600
    assert record.stat().st_mode & 0o077 == 0
    assert "secret" not in (record / "journal").read_text()
    assert main(["stop", "grid"]) == 0


def test_a_failed_hand_over_ends_the_machines(net: Network) -> None:
    killed = """
        import skyward.pool.detached, skyward.setup.fleet
        skyward.pool.detached._GO_WITHIN = 3.0
        skyward.setup.fleet.Fleet.let_go = lambda fleet: os.kill(os.getpid(), 9)
        """
    submit(net, "print('begun')", before=dedent(killed))
    nothing_is_left(net)


def test_machines_that_cannot_reach_each_other_are_refused_at_submission(net: Network) -> None:
    net[1].cut_from(net[2])
    try:
        done = submit(net, WAIT)
        assert "the nodes cannot reach each other" in done.stderr
        nothing_is_left(net)
    finally:
        net[1].heal_from(net[2])
    assert not os.listdir(Path(os.environ["SKYWARD_STATE"], "runs"))
