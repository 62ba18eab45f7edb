"""`sky completion`: prints a script that completes the command line in bash, zsh or fish."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from skyward.cli.common import add_command
from skyward.cli.main import Parser

__all__ = ["add", "run", "script"]


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "completion",
        "complete command lines in bash, zsh or fish",
        "Prints a script that completes commands, options, files and pool names in your shell. bash: put the first "
        "example into ~/.bashrc. zsh: put the second into ~/.zshrc, below compinit. fish: run the third once, and "
        "again after an update.",
        [
            'eval "$(sky completion bash)"',
            'eval "$(sky completion zsh)"',
            "sky completion fish > ~/.config/fish/completions/sky.fish",
        ],
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), metavar="{bash,zsh,fish}", help="which shell")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from skyward.cli.main import parser

    sys.stdout.write(script(arguments.shell, parser()))
    sys.stdout.flush()
    return 0


_FILES, _POOLS, _HOSTS, _ANYTHING = "@files", "@pools", "@hosts", "@anything"
_TAKES = {"FILE": _FILES, "FOLDER": _FILES, "PATH": _FILES, "POOL": _POOLS, "HOST": _HOSTS}


@dataclass(frozen=True)
class _Option:
    names: tuple[str, ...]
    about: str
    takes: str


@dataclass(frozen=True)
class _Command:
    words: tuple[str, ...]
    about: str
    options: tuple[_Option, ...]
    takes: str

    @property
    def name(self) -> str:
        return " ".join(self.words)


def script(shell: str, parser: Parser) -> str:
    commands = [
        command for name, each in parser.commands.items() for command in _read((name,), parser.summaries[name], each)
    ]
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](commands)


def _read(words: tuple[str, ...], about: str, parser: argparse.ArgumentParser) -> Iterator[_Command]:
    options: list[_Option] = []
    kinds: list[str] = []
    actions: list[argparse.Action] = parser._actions  # pyright: ignore[reportPrivateUsage] - argparse has no other list
    for action in actions:
        if isinstance(action, argparse._SubParsersAction):  # pyright: ignore[reportPrivateUsage] - likewise
            below: dict[str, argparse.ArgumentParser] = action.choices  # pyright: ignore[reportUnknownMemberType,reportUnknownVariableType]
            kinds.append(" ".join(below))
            for name, each in below.items():
                yield from _read((*words, name), each.description or "", each)
        elif action.option_strings:
            text = "" if action.help in (None, argparse.SUPPRESS) else str(action.help).replace("%%", "%")
            kind = _kind(action) if action.nargs != 0 else ""
            options.append(_Option(tuple(action.option_strings), text, kind))
        else:
            kinds.append(_kind(action))
    if len(kinds) > 1 and not kinds[0].startswith("@"):  # one of some words, and then something else
        for word in kinds[0].split():
            yield _Command((*words, word), about, tuple(options), _known(kinds[1:]))
    yield _Command(words, about, tuple(options), _known(kinds))


def _known(kinds: Sequence[str]) -> str:
    return next((kind for kind in kinds if kind != _ANYTHING), "")


def _kind(action: argparse.Action) -> str:
    if action.choices is not None:
        return " ".join(map(str, action.choices))
    name = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    return _TAKES.get(name, _ANYTHING)


def _bash(commands: Sequence[_Command]) -> str:
    cases = [
        f"        {_quoted(each.name)}) takes={_quoted(each.takes)} "
        f"options={_quoted(' '.join(name for option in each.options for name in option.names))} ;;"
        for each in commands
    ]
    return _filled(_BASH, commands, " ".join(_tops(commands)), cases)


def _zsh(commands: Sequence[_Command]) -> str:
    cases = [
        f"        {_quoted(each.name)}) takes={_quoted(each.takes)}; options=("
        + " ".join(_quoted(f"{name}:{_plain(option.about)}") for option in each.options for name in option.names)
        + ") ;;"
        for each in commands
    ]
    tops = " ".join(_quoted(f"{name}:{_plain(about)}") for name, about in _tops(commands).items())
    return _filled(_ZSH, commands, tops, cases)


def _filled(template: str, commands: Sequence[_Command], tops: str, cases: Sequence[str]) -> str:
    above = dict.fromkeys(command.words[0] for command in commands if len(command.words) > 1)
    values: list[str] = []
    for command in commands:
        for option in command.options:
            if option.takes:
                words = "|".join(_quoted(f"{command.name} {name}") for name in option.names)
                values.append(f"        {words}) takes={_quoted(option.takes)} ;;")
    fields = {"tops": tops, "above": "|".join(above) or "''", "values": "\n".join(values), "cases": "\n".join(cases)}
    for name, text in fields.items():
        template = template.replace(f"<{name}>", text)
    return template


def _fish(commands: Sequence[_Command]) -> str:
    lines = [_FISH]
    for program in ("sky", "skyward"):
        lines.append(f"complete -c {program} -f")
        first = f"complete -c {program} -n __fish_use_subcommand"
        for name, about in _tops(commands).items():
            what = f"-l {name[2:]}" if name.startswith("--") else f"-a {name}"
            lines.append(f"{first} {what} -d {_fish_quoted(_plain(about))}")
        for command in commands:
            below = [each.name for each in commands if each.words[:-1] == command.words]
            where = "; and not ".join(f"__sky_in {name}" for name in (command.name, *below))
            seen = f"complete -c {program} -n {_fish_quoted(where)}"
            for option in command.options:
                names = " ".join(f"-l {n[2:]}" if n.startswith("--") else f"-s {n[1:]}" for n in option.names)
                takes = f" {_fish_value(program, command, option.takes)}" if option.takes else ""
                lines.append(f"{seen} {names}{takes} -d {_fish_quoted(_plain(option.about))}")
            if command.takes:
                lines.append(f"{seen} {_fish_value(program, command, command.takes).removeprefix('-r ')}")
    return "\n".join(lines) + "\n"


def _fish_value(program: str, command: _Command, takes: str) -> str:
    if takes == _FILES:
        return "-r -F"
    if takes == _HOSTS:
        return "-x -a '(__fish_print_hostnames)'"
    if takes == _POOLS:
        return f"-x -a {_fish_quoted(f'({program} --names {command.words[0]} 2>/dev/null)')}"
    return "-x" if takes == _ANYTHING else f"-x -a {_fish_quoted(takes)}"


def _tops(commands: Sequence[_Command]) -> dict[str, str]:
    tops = {command.name: command.about for command in commands if len(command.words) == 1}
    return {**tops, "--help": "show the commands", "--version": "show the version"}


def _plain(text: str) -> str:
    return " ".join(text.split()).replace(":", " -")


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


_BASH = """\
# Completes sky in bash. Made by `sky completion bash`.
_sky() {
    local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} command=${COMP_WORDS[1]}
    local word options= takes=
    COMPREPLY=()
    if (( COMP_CWORD == 1 )); then
        COMPREPLY=($(compgen -W '<tops>' -- "$cur"))
        return
    fi
    for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
        if [[ $word == -- ]]; then takes=@files; fi
    done
    case $command in
        <above>) if (( COMP_CWORD > 2 )); then command="$command ${COMP_WORDS[2]}"; fi ;;
    esac
    if [[ -z $takes ]]; then case "$command $prev" in
<values>
    esac; fi
    if [[ -z $takes ]]; then case $command in
<cases>
    esac; fi
    if [[ $cur == -* ]]; then
        COMPREPLY=($(compgen -W "$options" -- "$cur"))
        return
    fi
    case $takes in
        ''|@anything) ;;
        @files)
            local IFS=$'\\n'
            compopt -o filenames 2>/dev/null
            COMPREPLY=($(compgen -f -- "$cur")) ;;
        @hosts) COMPREPLY=($(compgen -A hostname -- "$cur")) ;;
        @pools) COMPREPLY=($(compgen -W "$("$1" --names "${COMP_WORDS[1]}" 2>/dev/null)" -- "$cur")) ;;
        *) COMPREPLY=($(compgen -W "$takes" -- "$cur")) ;;
    esac
}
complete -F _sky sky skyward
"""

_ZSH = """\
#compdef sky skyward
# Completes sky in zsh. Made by `sky completion zsh`.
_sky() {
    local command=$words[2] prev=$words[CURRENT-1] takes=
    local -a options names commands
    commands=(<tops>)
    if (( CURRENT == 2 )); then
        _describe -t commands command commands
        return
    fi
    if (( $words[(I)--] && $words[(I)--] < CURRENT )); then
        _files
        return
    fi
    case $command in
        <above>) if (( CURRENT > 3 )); then command="$command $words[3]"; fi ;;
    esac
    case "$command $prev" in
<values>
    esac
    if [[ -z $takes ]]; then case $command in
<cases>
    esac; fi
    if [[ $PREFIX == -* ]]; then
        _describe -t options option options
        return
    fi
    case $takes in
        ''|@anything) ;;
        @files) _files ;;
        @hosts) _hosts ;;
        @pools) names=(${(f)"$($words[1] --names $words[2] 2>/dev/null)"}); compadd -a names ;;
        *) names=(${=takes}); compadd -a names ;;
    esac
}
if [[ $funcstack[1] == _sky ]]; then _sky "$@"; else compdef _sky sky skyward; fi
"""

_FISH = """\
# Completes sky in fish. Made by `sky completion fish`.
function __sky_in
    set -l given (commandline -opc)[2..-1]
    test (count $given) -ge (count $argv); or return 1
    contains -- -- $given; and return 1
    for place in (seq (count $argv))
        test "$given[$place]" = "$argv[$place]"; or return 1
    end
end
"""
