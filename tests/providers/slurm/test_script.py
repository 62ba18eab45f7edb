"""The script of a job, run with commands that stand for Slurm's: what each node does before it joins."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward.errors import InvalidArgument
from skyward.providers.slurm.options import batch_script, meaning

# Runs a step here: what follows the options.
_SRUN = 'while case $1 in --*) ;; *) false ;; esac; do shift; done\nexec "$@"\n'
_REPORT = """
import os, sys
print(os.environ["SKYWARD_PYTHON"], os.environ.get("LOADED"), sys.argv[1:], os.environ["SLURM_JOB_NAME"])
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A directory of commands: Slurm's, and a python3 that is as old as RHEL 8's."""
    for name, text in {"srun": _SRUN, "scontrol": "echo h1\n", "squeue": "echo 1\n", "python3": "echo 306\n"}.items():
        _command(tmp_path / name, text)
    return tmp_path


def _command(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}")
    path.chmod(0o755)


def _run(site: Path, **settings: Any) -> subprocess.CompletedProcess[str]:
    env = {"PATH": f"{site}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "skyward-a"}
    script = batch_script(_REPORT, 3, **settings)
    return subprocess.run(["sh"], input=script, env=env, capture_output=True, text=True, check=False, timeout=60)


def test_the_program_s_own_python_joins_before_that_of_the_node(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = site / "own" / "python3.11"
    own.parent.mkdir()
    own.symlink_to(os.path.realpath(sys.executable))
    monkeypatch.setattr(sys, "_base_executable", "/no/such/python")
    monkeypatch.setattr(sys, "executable", str(own))
    done = _run(site)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] == str(own)
    assert done.stdout.endswith("['--stdin', '--place', '3'] skyward-a\n")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to somebody else")
def test_a_python_that_somebody_else_could_have_put_there_is_not_run(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = site / "shared"
    (shared / "env" / "bin").mkdir(parents=True)
    shared.chmod(0o1777)
    planted = shared / "env" / "bin" / "python"
    _command(planted, f"touch {site}/ran\n")
    os.chown(shared / "env", 12345, 12345)
    monkeypatch.setattr(sys, "_base_executable", str(planted))
    monkeypatch.setattr(sys, "executable", str(planted))
    _run(site)
    assert not (site / "ran").exists()


def test_pythons_that_are_too_old_are_named_with_what_to_do(site: Path) -> None:
    done = _run(site, python=str(site / "python3"))
    text = meaning(done.returncode) or ""
    assert "no node has a Python from 3.8 on; the newest that was found is 3.6" in text
    assert "modules=['python/3.11']" in text
    assert "newest" not in (meaning(_run(site, python="no-such-python").returncode) or "")


def test_modules_and_setup_come_before_python_is_looked_for(site: Path) -> None:
    (site / "sw").mkdir()
    (site / "sw" / "python3").symlink_to(os.path.realpath(sys.executable))
    _command(site / "module", f'echo "$@" > {site}/loaded\n')
    setup = f"# it's there\nexport LOADED=yes PATH={site}/sw:$PATH"
    done = _run(site, modules=["python/3.11", "a b"], setup=setup, python="python3")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[:2] == [f"{site}/sw/python3", "yes"]
    assert (site / "loaded").read_text() == "load python/3.11 a b\n"


@pytest.mark.parametrize("setup", ["false", "exit 0", "exit 7", "set -e\nfalse\ntrue", "echo 'open", "module load x"])
def test_a_node_whose_setup_fails_does_not_join(site: Path, setup: str) -> None:
    done = _run(site, setup=setup)
    assert "modules= or setup= failed on a node" in (meaning(done.returncode) or ""), done
    assert done.stdout == ""


def test_modules_may_be_one_text_and_names_are_checked() -> None:
    assert sky.Slurm(modules="python/3.11 cuda") == sky.Slurm(modules=["python/3.11", "cuda"])
    for wrong in ({"python": "a\nb"}, {"modules": ["-f"]}, {"modules": [3]}, {"setup": 3}, {"setup": "END-OF-START"}):
        with pytest.raises(InvalidArgument):
            sky.Slurm(**wrong)


def test_nodes_that_could_not_connect_are_told_with_what_was_tried(site: Path) -> None:
    done = _run(site, setup="trap - EXIT; exit 1", python="python3")
    assert meaning(done.returncode, "Machines connect to port 1 of 10.1.2.3.") == (
        "no node could connect to the pool. Machines connect to port 1 of 10.1.2.3"
    )
