"""`sky run` and `sky exec`: real pools on this computer, in processes of their own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import skyward as sky
from skyward.cli.init import SETTINGS
from skyward.cli.run import own_pool_line

PROGRAM = """
import sys
import skyward as sky


@sky.compute
def square(n: int) -> int:
    return n * n


print(sys.argv[1:], square(3) >> pool, square(4) >> sky, pool.nodes)
if "raise" in sys.argv:
    raise LookupError("of the program")
sys.exit(int(sys.argv[1]))
"""


def sky_command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "skyward", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(PROGRAM)
    return tmp_path


def test_a_program_gets_the_pool_of_the_settings_and_its_arguments(project: Path) -> None:
    (project / "sky.toml").write_text("[pools.two]\nnodes = 2\n")
    done = sky_command(project, "run", "train.py", "--console", "silent", "--", "3", "--epochs")
    assert done.stdout == "['3', '--epochs'] 9 16 2\n", done.stderr
    assert done.returncode == 3


def test_options_count_before_settings_and_errors_are_those_of_the_program(project: Path) -> None:
    (project / "sky.toml").write_text("[pools.two]\nnodes = 2\n")
    done = sky_command(project, "run", "train.py", "--nodes", "1", "--console", "silent", "--", "0", "raise")
    assert done.stdout == "['0', 'raise'] 9 16 1\n", done.stderr
    assert done.returncode == 1
    assert "LookupError: of the program" in done.stderr
    assert "runpy" not in done.stderr


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["run", "nothing.py"], 1, "nothing.py: no such file"),
        (["run", "train.py", "--provider", "azure"], 2, "there are"),
        (["run", "train.py", "--plugin", "toch"], 2, "sky run: error: --plugin toch: there are huggingface, jax,"),
        (["exec", "--plugin", "huggingface", "--", "true"], 2, "huggingface() needs token"),
        (["exec"], 2, "write it after --"),
        (["run", "train.py", "--pool", "gpu"], 1, "`sky init` writes one"),
        (["ps", "--", "x"], 2, "only `sky run`, `sky exec`, `sky ssh` and `sky plan`"),
        (["run"], 2, "FILE"),
    ],
)
def test_a_wrong_command_line_says_what_to_write(project: Path, words: list[str], status: int, said: str) -> None:
    done = sky_command(project, *words)
    assert done.returncode == status
    assert said in done.stderr


def test_a_command_runs_on_every_node(project: Path) -> None:
    (project / "sky.toml").write_text("[pools.two]\nnodes = 2\n")
    done = sky_command(project, "exec", "--console", "plain", "--", "echo hello; exit 3")
    assert done.returncode == 3, done.stderr
    assert sum("hello" in line for line in done.stdout.splitlines() + done.stderr.splitlines()) == 2
    done = sky_command(project, "exec", "--json", "--", sys.executable, "-c", "print(1)")
    assert json.loads(done.stdout) == [{"node": node, "code": 0, "out": "1\n", "err": ""} for node in (0, 1)]
    done = sky_command(project, "exec", "--nodes", "1", "--", "no-such-program-here")
    assert done.returncode == 127
    assert "No such file" in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("words", "right"),
    [
        (["exec", "hostname"], "sky exec -- hostname"),
        (["exec", "--nodes", "2", "nvidia-smi", "-L"], "sky exec --nodes 2 -- nvidia-smi -L"),
        (["run", "train.py", "--epochs", "3"], "sky run train.py -- --epochs 3"),
    ],
    ids=["exec", "exec with options", "run"],
)
def test_a_command_without_the_mark_before_it_is_told_where_it_goes(
    project: Path, words: list[str], right: str
) -> None:
    done = sky_command(project, *words)
    assert done.returncode == 2
    assert done.stderr.rstrip().endswith(f"goes after --: {right}")


@pytest.mark.parametrize(
    ("program", "line"),
    [
        ("print(f(1) >> pool)", None),
        ("import skyward as sky\nprint(f(1) >> sky)", None),
        ("with sky.ComputePool(nodes=2) as pool:\n    f(1) >> pool", 1),
        ("x = 1\npool = sky.ComputePool.from_config('gpu').open()", 2),
        ("with ComputePool() as mine: f(1) >> mine", 1),
        ("def go(pool): f(1) >> pool\nwith sky.ComputePool() as p: go(p)", 2),
        ("with sky.ComputePool() as second:\n    f(g(1) >> pool) >> second", None),
        ("try:\n    pool\nexcept NameError:\n    pool = sky.ComputePool().open()", None),
        ("pool = globals().get('pool') or sky.ComputePool().open()", None),
        ("def f(:", None),
    ],
)
def test_a_program_that_makes_its_own_pool_is_told_from_one_that_uses_the_given(program: str, line: int | None) -> None:
    assert own_pool_line(program.encode()) == line


def test_a_second_pool_that_only_shows_when_the_program_runs_is_warned_of(project: Path) -> None:
    (project / "hidden.py").write_text("import skyward as sky\ndef opened(): return sky.ComputePool(name='second')\n")
    (project / "train.py").write_text(
        "import hidden\nwith hidden.opened() as mine:\n    print(pool.nodes, mine.nodes)\n"
    )
    done = sky_command(project, "run", "train.py", "--console", "plain")
    assert done.stdout == "1 1\n", done.stderr
    assert "warning: this program opens a pool of its own (second) beside the one of `sky run`" in done.stderr


def test_the_example_project_runs(tmp_path: Path) -> None:
    assert "written" in sky_command(tmp_path, "init", "mine").stdout
    done = subprocess.run(
        [sys.executable, "main.py"], cwd=tmp_path / "mine", capture_output=True, text=True, timeout=240
    )
    assert "2262 primes, by node: [" in done.stdout, done.stderr
    assert min(map(int, re.findall(r"\d+", done.stdout.rpartition("[")[2]))) > 500, "one node has nearly all the work"
    assert "sky run main.py" not in "".join(path.read_text() for path in (tmp_path / "mine").iterdir())  # two pools
    started = sky_command(tmp_path / "mine", "run", "main.py")
    assert started.returncode == 0, started.stderr
    assert "2262 primes" in started.stdout
    assert started.stderr.count("pool open: 2 nodes") == 1, "one pool, that of the program"
    assert "main.py opens a pool of its own in line 12, so `sky run` opens none" in started.stderr
    refused = sky_command(tmp_path / "mine", "run", "main.py", "--nodes", "3")
    assert refused.returncode == 1
    assert "so --nodes would have no effect. Run it with `python main.py`" in refused.stderr
    assert "pool open" not in refused.stderr
    (tmp_path / "mine" / "main.py").write_text("changed")
    again = sky_command(tmp_path / "mine", "init", "--json")
    assert json.loads(again.stdout) == {"written": [], "kept": ["sky.toml", "main.py"]}
    assert (tmp_path / "mine" / "main.py").read_text() == "changed"


def test_all_of_the_example_settings_are_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "token-of-a-test")
    lines = SETTINGS.splitlines()
    commented = [line.removeprefix("# ") for line in lines if re.match(r"# (\[|\w+ = )", line)]
    (tmp_path / "sky.toml").write_text("\n".join([*commented, "[pools.here]", "nodes = 2"]))
    for name in ("here", "lab", "cloud"):
        sky.ComputePool.from_config(name, path=tmp_path / "sky.toml")


def test_the_version_has_what_a_report_needs(tmp_path: Path) -> None:
    assert sky_command(tmp_path, "version").stdout == f"skyward {sky.__version__}\n"
    found = json.loads(sky_command(tmp_path, "version", "--verbose", "--json").stdout)
    assert {"skyward", "python", "system", "ssh", "uv", "torch"} <= set(found)
    assert "python" in sky_command(tmp_path, "version", "-v").stdout
