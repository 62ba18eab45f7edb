"""The `sky` command."""

from __future__ import annotations

import subprocess
import sys

import pytest

import skyward
from skyward.api.image import Image
from skyward.cli import main
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
