"""What holds for every command of `sky`: its help, its examples, and what is said to words that it does not know."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

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
    for word in ("kill", "close", "terminate"):
        assert f"there is no command {word!r}. Did you mean down?" in _refused(capsys, word, "lab")
    assert "there is no command 'status'. Did you mean ps?" in _refused(capsys, "status")
    assert "Did you mean" not in _refused(capsys, "frobnicate")
    assert "there is no option --verson. Did you mean --version?" in _refused(capsys, "--verson")


def test_an_option_that_does_not_exist_gets_the_one_that_was_meant(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--jsno. Did you mean --json?" in _refused(capsys, "version", "--jsno")
    assert "invalid choice: 'lvie'" in (said := _refused(capsys, "exec", "--console=lvie", "--", "true"))
    assert "Did you mean live?" in said


def test_options_before_the_command_are_put_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    assert "options go after the command: sky version --json" in _refused(capsys, "--json", "version")


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


WITHOUT_JSON = {
    "run": "what it prints is the program's",
    "attach": "what it prints is the program's",
    "join": "it serves a pool until that is closed",
    "top": "it is a live view; `sky ps --json` and `sky logs --json` are for programs",
    "completion": "it prints a program for the shell",
}


def _examples(name: str) -> list[str]:
    """The example lines of a command's help, without what explains them: two spaces or more stand before that."""
    epilog = parser(name).commands[name].epilog or ""
    lines = epilog.partition("examples:\n")[2].partition("\n\n")[0].splitlines()
    return [line.strip().split("   ")[0].rstrip() for line in lines]


@pytest.mark.parametrize("name", NAMES)
def test_each_command_explains_itself_with_examples_and_its_exit_status(name: str) -> None:
    command = parser(name).commands[name]
    assert len(command.description or "") > 40
    assert len(_examples(name)) >= 2
    assert "\nexit status: " in (command.epilog or "")


@pytest.mark.parametrize("name", NAMES)
def test_each_command_prints_json_of_a_documented_shape(name: str) -> None:
    options = parser(name).commands[name].format_help()
    assert ("--json" in options.partition("examples:")[0]) is (name not in WITHOUT_JSON)
    assert "--json: one " in options.replace("\n", " ") or name in WITHOUT_JSON or "With --json" in options


@pytest.mark.parametrize("name", NAMES)
def test_each_example_is_a_command_line_that_is_accepted(name: str) -> None:
    for example in _examples(name):
        words = [*shlex.split(example), "&&"]
        while words:
            end = next(at for at, word in enumerate(words) if word in ("|", ">", "&&"))
            part, words = words[:end], words[end + 1 :]
            if part[0] == "sky":
                mark = part.index("--") if "--" in part else len(part)
                arguments, unknown = parser(part[1]).parse_known_args(part[1:mark])
                assert unknown == [], example
                assert mark == len(part) or arguments.takes_rest


@pytest.mark.parametrize("name", NAMES)
def test_help_fits_a_terminal(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = parser(name).commands[name].format_help()
    assert [line for line in text.splitlines() if len(line) > 110] == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no host: name some"),
        (["gpu1", "--python", "three"], "write a version such as 3.12"),
        (["gpu1", "--timeout", "0"], "above zero"),
        (["gpu1", "--pool", "lab"], "hosts or a pool, not both"),
    ],
)
def test_hosts_that_are_not_said_are_a_wrong_command_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in _refused(capsys, "hosts", "check", *words)


@pytest.mark.parametrize("words", [("--ttl", "3", "train.py"), ("--min-nodes=2", "train.py"), ("--grace", "1")])
def test_an_option_that_only_a_pool_has_is_told_where_it_goes(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    option = words[0][2:].partition("=")[0].replace("-", "_")
    said = _refused(capsys, "run", *words)
    assert f"set {option} in sky.toml, or in the program: sky.ComputePool({option}=...)" in said


def test_make_help_lists_every_target_that_people_use() -> None:
    root = Path(__file__).parents[2]
    listed = subprocess.run(["make", "-s", "help"], cwd=root, capture_output=True, text=True, check=True).stdout
    targets = (root / "Makefile").read_text().partition(".PHONY: ")[2].partition("\n")[0].split()
    assert sorted(line.split()[0] for line in listed.splitlines()) == sorted(targets)
    assert all(len(line.split()) > 1 for line in listed.splitlines())
