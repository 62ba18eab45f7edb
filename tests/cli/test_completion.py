"""`sky completion`: what real shells offer for the beginning of a command line."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from skyward import events
from skyward.cli import main
from skyward.cli.common import pool_names
from skyward.history.recorder import Recorder
from skyward.machines.ledger import Ledger

SHELLS = ("bash", "zsh", "fish")


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SKYWARD_STATE", str(tmp_path / "state"))
    return tmp_path


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripts, and `sky` as a program: what shells run."""
    folder = tmp_path_factory.mktemp("completion")
    for shell in SHELLS:
        command = [sys.executable, "-m", "skyward", "completion", shell]
        (folder / shell).write_text(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    (folder / "sky").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m skyward "$@"\n')
    (folder / "sky").chmod(0o700)
    return folder


def _recorded(pool: str) -> Recorder:
    recorder = Recorder(pool)
    recorder.record(events.PoolOpening(pool, 1, "Local"))
    recorder.flush()
    return recorder


def _offered(shell: str, scripts: Path, *words: str, cwd: Path | None = None) -> list[str]:
    """What a shell offers for the last word."""
    path = shutil.which(shell)
    if path is None:
        pytest.skip(f"there is no {shell} on this computer")
    env = {**os.environ, "PATH": f"{scripts}:{os.environ['PATH']}", "HOME": str(scripts)}
    source = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}[shell]
    quiet = {"bash": ["--norc"], "zsh": ["-f"], "fish": ["--no-config"]}[shell]
    command = [path, *quiet, "-c", source, *([] if shell == "fish" else ["test"]), str(scripts / shell), *words]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=cwd, timeout=120, check=False)
    assert done.stderr == ""
    return sorted(line.partition("\t")[0].strip() for line in done.stdout.splitlines() if line.strip())


_BASH = """
source "$1"; shift
complete -p skyward > /dev/null || exit 1
compopt() { return 1; }  # there is no line that is being edited
COMP_LINE="sky $*"; COMP_POINT=${#COMP_LINE}
_python_argcomplete sky
printf '%s\\n' "${COMPREPLY[@]}"
"""

# the functions of zsh that add matches work in its editor only; this one prints what it is given
_ZSH = """
compdef() { :; }
_describe() { print -rl -- "${(@)${(@P)2}%%:*}" }
source "$1"; shift
words=(sky "$@"); BUFFER="sky $*"; CURSOR=$#BUFFER
_python_argcomplete
"""

_FISH = 'source $argv[1]; complete -C "sky $argv[2..-1]"'


@pytest.mark.parametrize("shell", SHELLS)
def test_commands_options_and_choices_are_completed(shell: str, scripts: Path) -> None:
    assert _offered(shell, scripts, "lo") == ["logs"]
    assert _offered(shell, scripts, "ver") == ["version"]
    assert {"init", "ps", "completion"} <= set(_offered(shell, scripts, ""))
    assert _offered(shell, scripts, "logs", "--fo") == ["--follow"]
    assert _offered(shell, scripts, "exec", "--console", "l") == ["live"]
    assert _offered(shell, scripts, "completion", "") == ["bash", "fish", "zsh"]
    assert _offered(shell, scripts, "version", "x") == []
    assert _offered(shell, scripts, "hosts", "ch") == ["check"]
    assert _offered(shell, scripts, "hosts", "check", "--accept") == ["--accept-new"]
    assert "check" not in _offered(shell, scripts, "hosts", "check", "che")


@pytest.mark.parametrize("shell", SHELLS)
def test_files_are_completed_where_a_command_takes_one(shell: str, scripts: Path, tmp_path: Path) -> None:
    (tmp_path / "train me.py").touch()
    (offered,) = _offered(shell, scripts, "run", "tra", cwd=tmp_path)
    assert offered.replace("\\", "") == "train me.py"


@pytest.mark.parametrize("shell", SHELLS)
def test_names_of_pools_are_completed(shell: str, scripts: Path) -> None:
    _recorded("sweep-2").close()
    runs = _recorded("sweep-1")
    try:
        assert _offered(shell, scripts, "logs", "sw") == ["sweep-1", "sweep-2"]
        assert _offered(shell, scripts, "top", "sw") == ["sweep-1"]
    finally:
        runs.close()


def test_names_are_those_that_a_command_could_be_about() -> None:
    _recorded("gone").close()
    ledger = Ledger.start("rented-1a2b3c", {"provider": "AWS"})
    try:
        assert pool_names("logs") == ["gone"]
        assert pool_names("stacks") == []
        assert pool_names("down") == ["rented-1a2b3c"]
    finally:
        ledger.remove()


def test_the_newest_ten_pools_are_offered(state: Path) -> None:
    for number in range(12):
        (state / "state" / "history" / f"sweep{number}-202601{number + 10}-101010-1a2b").mkdir(parents=True)
    assert pool_names("logs") == [f"sweep{number}" for number in range(11, 1, -1)]


def test_a_missing_shell_is_told_which_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["completion"])
    assert ended.value.code == 2
    assert "required: {bash,zsh,fish}" in capsys.readouterr().err


def test_a_name_that_a_shell_would_run_is_not_offered(state: Path) -> None:
    """Shells expand the words that they are given."""
    for name in ("$(reboot)", "`id`", "a b", "-rf"):
        (state / "state" / "history" / f"{name}-20260101-101010-1a2b").mkdir(parents=True)
    assert pool_names("logs") == []


def test_a_line_is_completed_without_importing_anything_heavy(tmp_path: Path) -> None:
    source = "import os; os._exit = exit; from skyward.cli import main; main()"
    env = {"_ARGCOMPLETE": "1", "COMP_LINE": "sky logs ", "COMP_POINT": "9", "_ARGCOMPLETE_STDOUT_FILENAME": os.devnull}
    command = [sys.executable, "-X", "importtime", "-c", source]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, **env})
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "argcomplete" in loaded
    assert not {"ssl", "asyncio", "rich", "skyward.pool.pool", "skyward.providers.ssh"} & loaded


def test_hosts_are_those_of_the_configuration_of_ssh(scripts: Path) -> None:
    (scripts / ".ssh").mkdir()
    (scripts / ".ssh" / "config").write_text("Host gpu1 gpu2\n  User me\nhost gpu*\nMatch host x\n")
    assert _offered("bash", scripts, "hosts", "check", "gp") == ["gpu1", "gpu2"]


def test_a_shell_that_is_not_known_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["completion", "zhs"])
    assert ended.value.code == 2
    assert "Did you mean zsh?" in capsys.readouterr().err
