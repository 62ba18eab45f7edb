"""What holds for every command of `sky`: its help, its examples, and what is said to words that it does not know."""

from __future__ import annotations

import subprocess
import sys

import pytest

from skyward.cli import main
from skyward.cli.main import COMMANDS, parser

NAMES = [name for names in COMMANDS.values() for name in names]


def _refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    return said.err


def test_the_help_lists_every_command_under_a_heading(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    for title, names in COMMANDS.items():
        if names:
            start = lines.index(f"{title}:") + 1
            assert [line.split()[0] for line in lines[start : start + len(names)]] == list(names)


def test_no_command_at_all_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert "start:\n  init " in _refused(capsys)


def test_a_command_that_does_not_exist_gets_the_one_that_was_meant(capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is no command 'histroy'. Did you mean history?" in _refused(capsys, "histroy")
    assert "Did you mean" not in _refused(capsys, "frobnicate")
    assert "there is no option --verson. Did you mean --version?" in _refused(capsys, "--verson")


def test_an_option_that_does_not_exist_gets_the_one_that_was_meant(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--jsno. Did you mean --json?" in _refused(capsys, "version", "--jsno")
    assert "invalid choice: 'lvie'" in (said := _refused(capsys, "exec", "--console=lvie", "--", "true"))
    assert "Did you mean live?" in said


def test_options_before_the_command_are_put_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    assert "options stand after the command: sky version --json" in _refused(capsys, "--json", "version")


def test_the_program_says_the_name_that_it_was_started_by(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/skyward"])
    with pytest.raises(SystemExit):
        main(["exec", "--help"])
    said = capsys.readouterr().out
    assert said.startswith("usage: skyward exec [OPTIONS] -- COMMAND")
    assert "\n  skyward exec -- nvidia-smi -L\n" in said
    assert "sky exec" not in said.replace("skyward exec", "")
    assert _refused(capsys, "pss").startswith("skyward: there is no command 'pss'")


def test_a_command_imports_no_file_of_another_one() -> None:
    source = "import sys; from skyward.cli.main import main; main(['version']); "
    source += "print(*(name for name in sys.modules if name.startswith('skyward.cli.')))"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    loaded = {name.rpartition(".")[2] for name in done.stdout.splitlines()[-1].split()}
    assert loaded & set(NAMES) == {"version"}


@pytest.mark.parametrize("name", NAMES)
def test_each_command_is_a_file_with_its_name(name: str) -> None:
    assert name in parser(name).commands
