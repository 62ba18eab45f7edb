"""`sky completion`: prints a script that completes the command line in bash, zsh or fish."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from skyward.cli.common import add_command, pool_names

__all__ = ["add", "complete", "run"]


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "completion",
        "complete command lines in bash, zsh or fish",
        "Prints a script that completes commands, options, files and pool names in your shell. bash: put the first "
        "example into ~/.bashrc. zsh: put the second into ~/.zshrc, below compinit. fish: run the third once.",
        [
            'eval "$(sky completion bash)"',
            'eval "$(sky completion zsh)"',
            "sky completion fish > ~/.config/fish/completions/sky.fish",
        ],
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), metavar="{bash,zsh,fish}", help="which shell")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from argcomplete.shell_integration import shellcode

    script = shellcode(["sky", "skyward"], use_defaults=False, shell=arguments.shell)
    sys.stdout.write(script + "\n")
    sys.stdout.flush()
    return 0


def complete(line: str) -> None:
    """Answers the script, which has started this process with `line` in its environment; does not return."""
    import argcomplete

    from skyward.cli.main import COMMANDS, command_of, parser

    words = line.split()
    if "--" in words:  # what follows is of another program
        completed = argparse.ArgumentParser()
        completed.add_argument("rest", nargs="*", metavar="FILE")
    else:
        completed = parser(command_of(words[1:], [name for names in COMMANDS.values() for name in names]))
    argcomplete.autocomplete(
        completed,
        always_complete_options=False,
        default_completer=_values,  # pyright: ignore[reportArgumentType] - any callable will do
    )


def _values(prefix: str, action: argparse.Action, parser: argparse.ArgumentParser, **_: object) -> Iterable[str]:
    from argcomplete.completers import FilesCompleter

    match action.metavar or action.dest.upper():
        case "POOL":
            return pool_names(parser.prog.split()[1])
        case "HOST":
            return _ssh_hosts()
        case "FILE" | "FOLDER" | "PATH" | "DIR":
            return FilesCompleter()(prefix)
        case _:
            return ()


def _ssh_hosts() -> list[str]:
    try:
        lines = Path("~/.ssh/config").expanduser().read_text(errors="replace").splitlines()
    except OSError:
        return []
    names = [name for line in lines if line.strip().lower().startswith("host ") for name in line.split()[1:]]
    return [name for name in names if not {*name} & {*"*?!"}]
