"""Detached runs on real hosts: node 0 keeps them, and this computer may go."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

import skyward as sky
from skyward.cli.main import main
from skyward.errors import HostUnreachable, InvalidArgument
from skyward.history import failed_calls, runs
from skyward.history.store import entries
from skyward.pool.run import Run
from tests.ssh.places import CACHE, ours
from tests.support.hosts import Host, Network
from tests.support.waiting import until

HELPER = """
class Lacking(Exception):
    pass

def cubed(x):
    return x * x * x
"""

PROGRAM = """
import os, socket, sys, time
import skyward as sky
from helper import cubed

@sky.compute
def cube(x):
    return cubed(x), socket.gethostname()

if __name__ == "__main__":
    with sky.ComputePool(provider={provider}, console=False{options}) as pool:
{body}
    print("the end", flush=True)
"""

WORK = """
import skyward as sky
from helper import Lacking, cubed

@sky.compute
def cube(x):
    return cubed(x)

def work(count, fail=False):
    values = [cube(n) >> sky for n in range(count)]
    if fail:
        raise Lacking("no such data", values)
    return values
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A state and a working directory of its own for each test."""
    (tmp_path / "state").mkdir(mode=0o700)
    (tmp_path / "work").mkdir()
    monkeypatch.setenv("SKYWARD_STATE", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path / "work")
    Path("helper.py").write_text(HELPER)
    Path("password.txt").write_text("hunter2")
    return tmp_path


def program(net: Network, body: str, count: int = 2, options: str = "", lease: float = 900.0) -> str:
    body = "\n".join(f"        {line}" for line in dedent(body).strip().splitlines())
    hosts = f"hosts={[host.address for host in net][:count]}, user='sky', lease={lease}"
    provider = f"sky.SSH({hosts}, key={str(net.key)!r}, known_hosts={str(net.known_hosts)!r})"
    text = PROGRAM.replace("{provider}", provider).replace("{options}", options).replace("{body}", body)
    Path("train.py").write_text(text)
    return "train.py"


def submit(*words: str, before: str = "") -> subprocess.CompletedProcess[str]:
    """`sky run --detach` in a process of its own; `before` is run in it first."""
    code = f"import sys\n{before}\nfrom skyward.cli.main import main\nsys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "run", "--detach", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def text_of(run: Run) -> str:
    return b"".join(run.output()).decode()


def steward(host: Host) -> int:
    (found,) = [process.pid for process in host.processes() if "skyward.node.steward" in process.argv]
    return found


def nothing_runs(net: Network) -> bool:
    return not any(ours(host) for host in net)


def test_a_program_goes_on_on_its_hosts_when_this_computer_has_let_go(
    net: Network, capfd: pytest.CaptureFixture[str]
) -> None:
    file = program(net, "for i in range(4):\n    time.sleep(0.2)\n    print(*(cube(i) @ pool), flush=True)")
    done = submit(file, "--name", "grid")
    assert done.returncode == 0, done.stderr
    assert main(["attach", "grid"]) == 0, "in this process, which did not submit it"
    text = capfd.readouterr().out
    assert "(27, 'h0') (27, 'h1')" in text
    assert text.endswith("the end\n")
    until(lambda: nothing_runs(net), 60)
    assert main(["attach", "grid"]) == 0
    assert "the end" not in capfd.readouterr().out, "it continues where one left"
    assert main(["logs", "grid"]) == 0
    assert capfd.readouterr().out == text


def test_only_what_the_program_needs_is_sent_and_all_of_it_goes_with_the_run(net: Network) -> None:
    """SEC-38: what looks like a credential stays here, and others on the host see nothing of the run."""
    Path("unused.py").write_text("")
    options = ", image=sky.Image(includes=['.'], excludes=['unused.py'])"
    file = program(
        net, "print(sorted(name for name in os.listdir('.') if '.' in name), os.environ['SKYWARD_RESTART'])", 1, options
    )
    assert submit(file, "--name", "files").returncode == 0
    run = Run("files")
    assert run.wait(120).stage == "finished", text_of(run)
    assert "['helper.py', 'train.py'] 0" in text_of(run)
    modes = net[0].run(["find", run.folder, "-maxdepth", "1", "-printf", "%m %u %y\n"], user="root").stdout.split("\n")
    assert set(filter(None, modes)) == {"700 sky d", "600 sky f"}
    assert main(["runs", "drop", "files"]) == 0
    assert net[0].run(["test", "-e", run.folder], user="root", check=False).returncode == 1


def test_no_key_of_a_run_is_on_a_disk_and_its_authority_stays_here(net: Network) -> None:
    """SEC-38: node 0 speaks as the client, from memory; it cannot make other certificates."""
    look = """
    folders = [os.environ["SKYWARD_RUN_FOLDER"], os.environ["SKYWARD_CACHE"] + "/pools", "/dev/shm", "/tmp"]
    files = [os.path.join(at, name) for top in folders for at, _, names in os.walk(top) for name in names]
    held = [path for path in files if os.access(path, os.R_OK) and os.path.isfile(path)]
    held = [path for path in held if b"PRIV" b"ATE KEY" in open(path, "rb").read(1 << 20)]
    print("held:", held, [name for name, value in os.environ.items() if "PRIV" "ATE KEY" in value], flush=True)
    """
    assert submit(program(net, look), "--name", "keys").returncode == 0
    run = Run("keys")
    assert run.wait(120).stage == "finished", text_of(run)
    assert "held: [] []" in text_of(run)
    assert b"PRIVATE KEY" not in runs.find("keys").journal.read_bytes()


def test_a_run_is_stopped_from_here_and_its_program_cleans_up(net: Network) -> None:
    file = program(
        net, "try:\n    print('ready', flush=True)\n    time.sleep(600)\nfinally:\n    print('clean', flush=True)"
    )
    assert submit(file, "--name", "long").returncode == 0
    run = Run("long")
    until(lambda: "ready" in text_of(run), 120)
    with pytest.raises(InvalidArgument, match="is not over"):
        run.check_over()
    assert run.stop().stage == "stopped"
    assert "clean" in text_of(run)
    until(lambda: nothing_runs(net), 60)


def test_a_run_ends_with_its_time_when_nobody_comes_back(net: Network) -> None:
    file = program(net, "print('ready', flush=True)\ntime.sleep(600)", options=", ttl=25, grace=1")
    assert submit(file, "--name", "short").returncode == 0
    assert not nothing_runs(net)
    until(lambda: nothing_runs(net), 120)
    assert Run("short").status.stage == "expired"


def test_all_hosts_end_by_their_lease_when_the_steward_is_gone(net: Network) -> None:
    file = program(net, "print('ready', flush=True)\ntime.sleep(600)", lease=8)
    assert submit(file, "--name", "lost").returncode == 0
    run = Run("lost")
    until(lambda: "ready" in text_of(run), 120)
    net[0].signal(steward(net[0]), "KILL")
    until(lambda: nothing_runs(net), 120)
    assert run.status.stage == "lost"


def test_a_program_that_fails_is_started_again_on_the_same_hosts(net: Network) -> None:
    file = program(
        net,
        "print('start', os.environ['SKYWARD_RESTART'], *(cube(2) @ pool), flush=True)\n"
        "if os.environ['SKYWARD_RESTART'] != '1':\n    os._exit(3)",
    )
    assert submit(file, "--name", "again", "--restarts", "2").returncode == 0
    run = Run("again")
    assert (run.wait(180).stage, run.status.restarts) == ("finished", 1)
    starts = [line for line in text_of(run).splitlines() if line.startswith("start")]
    assert starts == [f"start {n} (8, 'h0') (8, 'h1')" for n in range(2)]


def test_what_a_run_has_kept_is_fetched_and_taken_over_here(net: Network) -> None:
    file = program(
        net,
        """
        pool.on_event(lambda event: print(getattr(event, "text", ""), flush=True))
        found = pool.map(lambda x: 6 // (3 - x), range(4), resume="picky", return_exceptions=True)
        print(found[:3], flush=True)
        raise found[3]
        """,
    )
    assert submit(file, "--name", "grid").returncode == 0
    assert Run("grid").wait(180).stage == "failed"
    assert main(["fetch", "grid"]) == 0
    (entry,) = entries(Path("grid/state"))
    ((call, _),) = failed_calls.kept(entry)
    here = {**os.environ, "SKYWARD_STATE": str(Path("grid/state").resolve())}
    again = subprocess.run([sys.executable, file], env=here, capture_output=True, text=True, timeout=120)
    assert "3 of 4 taken from picky, 1 to compute." in again.stdout
    assert "[2, 3, 6]" in again.stdout
    replayed = subprocess.run(
        [sys.executable, "-m", "skyward", "replay", call.id], env=here, capture_output=True, text=True, timeout=120
    )
    assert "it failed as on the node: ZeroDivisionError" in replayed.stderr


def test_its_pool_is_seen_from_here_like_any_other(net: Network, capfd: pytest.CaptureFixture[str]) -> None:
    waits = """
    @sky.compute
    def waits():
        time.sleep(600)

    print(*(cube(3) @ pool), flush=True)
    waits() @ pool
    """
    file = program(net, waits, options=", name='cubes'")
    assert submit(file, "--name", "grid").returncode == 0
    run = Run("grid")
    until(lambda: "(27, 'h1')" in text_of(run), 120)

    def told(*words: str) -> str:
        assert main([*words]) == 0
        return capfd.readouterr().out

    until(lambda: "waits" in told("top", "grid"), 60)
    (line, note) = [line.split() for line in told("ps").splitlines() if "cubes" in line or "sky attach grid" in line]
    assert line[:4] == ["cubes", "detached", "SSH", "2"]
    assert note == ["`sky", "attach", "grid`", "shows", "it"]
    assert "in waits" in told("stacks", "grid")
    assert json.loads(told("history", "--json"))["state"] == "open"
    assert run.stop().over
    row = json.loads(told("history", "--json"))
    assert (row["pool"], row["state"], row["calls"]) == ("cubes", "closed", 4)
    assert "cubes" not in told("ps")
    (entry,) = run.histories()
    there = f"{run.folder}/state/history/{entry.id}/events.jsonl"
    assert entry.path.read_text() == net[0].run(["cat", there], user="root").stdout


STEPS = {
    "the files": ("skyward.pool.detached", "_send_files"),
    "the steward": ("skyward.setup.keeper_client", "KeeperClient.hold"),
    "the hand-over": ("skyward.setup.fleet", "Fleet.let_go"),
    "the start": ("skyward.setup.keeper_client", "KeeperClient.go"),
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", STEPS)
def test_a_submission_that_is_killed_leaves_a_whole_run_or_nothing(net: Network, step: str, when: str) -> None:
    module, name = STEPS[step]
    holder, _, attribute = f"module.{name}".rpartition(".")
    killed = dedent(f"""
        import os, importlib
        import skyward.pool.detached
        skyward.pool.detached._GO_WITHIN = 3.0
        module = importlib.import_module({module!r})
        real = {holder}.{attribute}
        def dies(*args, **named):
            if {when!r} == "after":
                real(*args, **named)
            os.kill(os.getpid(), 9)
        {holder}.{attribute} = dies
        """)
    file = program(net, "print(*(cube(3) @ pool), flush=True)")
    assert submit(file, "--name", "cut", before=killed).returncode == -9
    if (step, when) == ("the start", "after"):
        run = Run("cut")
        assert run.wait(120).stage == "finished"
        assert "(27, 'h0') (27, 'h1')" in text_of(run)
    until(lambda: nothing_runs(net), 120)
    if (step, when) != ("the start", "after"):
        run = Run("cut")
        assert run.status.over
        assert "27" not in text_of(run)


def test_a_function_returns_its_value_to_another_process(net: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("tasks.py").write_text(WORK)
    look = f"""
        import os, sys
        sys.path.insert(0, os.getcwd())
        import skyward as sky
        from tasks import work
        provider = sky.SSH(hosts={[host.address for host in net][:2]}, user="sky", key={str(net.key)!r},
            known_hosts={str(net.known_hosts)!r})
        pool = sky.ComputePool(provider=provider, console=False)
        sky.detach(work, 5, fail=sys.argv[1] == "fail", pool=pool, name=sys.argv[1])
        os.kill(os.getpid(), 9)
        """
    for name in ("value", "fail"):
        done = subprocess.run([sys.executable, "-c", dedent(look), name], capture_output=True, timeout=300, check=False)
        assert done.returncode == -9, done.stderr.decode()
    assert sky.attach("value").result(timeout=120) == [0, 1, 8, 27, 64]
    monkeypatch.syspath_prepend(os.getcwd())
    with pytest.raises(importlib.import_module("helper").Lacking, match="no such data"):
        sky.attach("fail").result(timeout=120)
    monkeypatch.delitem(sys.modules, "helper")


def test_hosts_that_cannot_reach_each_other_keep_no_run(net: Network) -> None:
    net[0].cut_from(net[1])
    try:
        done = submit(program(net, "pass"), "--name", "star")
    finally:
        net[0].heal_from(net[1])
    assert done.returncode == 1
    assert "the nodes cannot reach each other" in done.stderr
    assert "cannot connect to node" in done.stderr
    assert not runs.runs()
    until(lambda: nothing_runs(net), 60)


def test_what_lies_outside_of_the_working_directory_is_not_sent(net: Network, folder: Path) -> None:
    file = Path(program(net, "pass")).resolve()
    (folder / "elsewhere").mkdir()
    os.chdir(folder / "elsewhere")
    done = submit(str(file), "--name", "outside")
    assert done.returncode == 1
    assert "lies outside of the working directory" in done.stderr


def test_a_run_whose_host_does_not_answer_is_named_and_found_again(
    whole: Network, capfd: pytest.CaptureFixture[str]
) -> None:
    file = program(whole, "print('ready', flush=True)\ntime.sleep(600)", 1)
    assert submit(file, "--name", "away").returncode == 0
    run = Run("away")
    until(lambda: "ready" in text_of(run), 120)
    whole[0].kill()
    with pytest.raises(HostUnreachable):
        _ = Run("away").status
    capfd.readouterr()
    assert main(["runs", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["stage"] == "not reached"
    whole[0].restart()
    until(lambda: Run("away").status.stage == "lost", 60)
    whole[0].run(["sh", "-c", f"rm -rf {CACHE}/pools/*"])  # the disk of a machine that lost its power has it still


def test_the_first_line_comes_soon_after_one_asks(net: Network) -> None:
    """Two seconds on a computer that has nothing else to do; here it is enough that it takes one login."""
    assert submit(program(net, "print('ready', flush=True)\ntime.sleep(600)", 1), "--name", "soon").returncode == 0
    until(lambda: "ready" in text_of(Run("soon")), 120)
    began = time.monotonic()
    assert next(Run("soon").output()).startswith(b"ready")
    took = time.monotonic() - began
    assert Run("soon").stop().over
    assert took < 10


def test_another_computer_that_may_log_in_attaches_and_stops(net: Network) -> None:
    file = program(net, "print('ready', flush=True)\ntime.sleep(600)", 1)
    assert submit(file, "--name", "far").returncode == 0
    run = Run("far")
    until(lambda: "ready" in text_of(run), 120)
    (python,) = {process.argv[0] for process in net[0].processes() if "skyward.node.steward" in process.argv}
    other = net[2]
    other.put("/home/sky/id", net.key.read_bytes(), "sky", "600")
    other.put("/home/sky/known", net.known_hosts.read_bytes(), "sky", "600")
    settings = "Host first\nHostName {}\nUser sky\nIdentityFile ~/id\nUserKnownHostsFile ~/known\n"
    other.put("/home/sky/.ssh/config", settings.format(net[0].address).encode(), "sky", "600")

    def sky(*words: str) -> subprocess.CompletedProcess[str]:
        command = 'timeout "$0" "$@"; test $? -le 124'
        return other.run(["sh", "-c", command, "20", python, "-m", "skyward", *words], user="sky", check=False)

    try:
        assert "It keeps these runs: " in sky("attach", "other", "--host", "first").stderr
        attached = sky("attach", "far", "--host", "first")
        assert "ready" in attached.stdout, attached.stderr
        assert "stopped" in sky("stop", "far").stdout
    finally:
        other.run(["rm", "-rf", "/home/sky/id", "/home/sky/known", "/home/sky/.ssh/config"], user="root")
    assert run.status.stage == "stopped"
    until(lambda: nothing_runs(net), 60)
