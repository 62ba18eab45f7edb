"""The `sky` command."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import skyward
from skyward.api.image import Image
from skyward.cli import main
from skyward.cli.ps import _is_of_amazon  # pyright: ignore[reportPrivateUsage]
from skyward.setup.env.script import script


def test_it_says_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"skyward {skyward.__version__}\n"


def test_the_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "skyward", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"skyward {skyward.__version__}\n"


def test_the_script_of_an_image_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["script", "--python", "3.12", "--pip", "humanize", "--pip", "rich>=15", "--apt", "git"]) == 0
    printed = capsys.readouterr().out
    version = next(line for line in printed.splitlines() if line.startswith("uv_version=")).partition("=")[2]
    assert printed == script(Image(python="3.12", pip=["humanize", "rich>=15"], apt=["git"]), version)
    subprocess.run(["sh", "-n"], input=printed, text=True, check=True)
    assert main(["script", "--python", "3.12", "--pip", "humanize", "--pip", "rich>=15", "--apt", "git", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == {"python": "3.12", "pip": ["humanize", "rich>=15"], "apt": ["git"], "script": printed}


def test_what_is_wrong_is_said_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """SEC-17."""
    assert main(["script", "--pip=--index-url=https://evil"]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("sky: pip holds '--index-url=https://evil', an option of pip")
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2


def test_a_reader_that_goes_away_is_no_error_worth_a_traceback() -> None:
    done = subprocess.run(
        f"'{sys.executable}' -m skyward script | head -n 1", shell=True, capture_output=True, text=True, check=True
    )
    assert done.stdout == "#!/bin/sh\n"
    assert done.stderr == ""


def test_ps_of_someone_who_has_no_cloud_is_no_error(tmp_path: Path) -> None:
    """boto3 is optional: a user with ssh hosts alone has none, and no ledger that says otherwise."""
    source = "import sys; sys.modules['boto3'] = None; from skyward.cli import main; sys.exit(main(['ps', '--json']))"
    env = {**os.environ, "XDG_STATE_HOME": str(tmp_path), "SKYWARD_STATE": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert "boto3" not in done.stderr
    assert not [row for row in map(json.loads, done.stdout.splitlines()) if row["left"]]


def test_ps_of_a_profile_without_boto3_says_what_to_install(tmp_path: Path) -> None:
    source = "import sys; sys.modules['boto3'] = None; from skyward.cli import main; "
    source += "sys.exit(main(['ps', '--profile', 'work']))"
    env = {**os.environ, "XDG_STATE_HOME": str(tmp_path), "SKYWARD_STATE": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, env=env)
    assert done.returncode == 1
    assert "pip install boto3" in done.stderr


def test_ps_without_a_login_says_nothing_of_clouds_unless_something_names_one(tmp_path: Path) -> None:
    """The commands of Slurm may be there without a cluster, too: no pool was ever opened on one."""
    (tmp_path / "squeue").write_text(
        "#!/bin/sh\necho 'fatal: Could not establish a configuration source' >&2\nexit 1\n"
    )
    (tmp_path / "squeue").chmod(0o700)
    with socket.create_server(("127.0.0.1", 0)) as service:  # as AWS has one for logins on its machines
        env = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        env |= {"SKYWARD_STATE": str(tmp_path), "HOME": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        env["AWS_EC2_METADATA_SERVICE_ENDPOINT"] = f"http://127.0.0.1:{service.getsockname()[1]}"
        command = [sys.executable, "-m", "skyward", "ps", "--json"]
        done = subprocess.run(command, capture_output=True, text=True, env=env)
        assert done.returncode == 0, done.stderr
        assert not [row for row in map(json.loads, done.stdout.splitlines()) if row["left"]]
        assert done.stderr == ""
        service.setblocking(False)
        if not _is_of_amazon():
            with pytest.raises(BlockingIOError):  # nobody has come to ask it
                service.accept()
        env["AWS_EC2_METADATA_DISABLED"] = "true"
        for more, variables in ((["--region", "eu-west-1"], {}), ([], {"AWS_PROFILE": "no-such-profile"})):
            named = subprocess.run([*command, *more], capture_output=True, text=True, env={**env, **variables})
            assert "clouds were not asked: no AWS login that works" in named.stderr
            assert named.returncode == int(bool(more))
