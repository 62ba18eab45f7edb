"""`sky completion`: prints a script that completes the command line in bash, zsh or fish."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from skyward.cli.common import add_command

__all__ = ["add", "run"]


def add(commands: Any) -> None:
    """Adds the command to the parser."""
    parser = add_command(
        commands,
        "completion",
        "complete command lines in bash, zsh or fish",
        "Prints a script for a shell, which then completes commands, options, files, and names of pools, of `sky` and "
        "`skyward`. bash: put the first example into ~/.bashrc. zsh: put the second into ~/.zshrc, below compinit. "
        "fish: run the third once. Make it again after an update.",
        [
            'eval "$(sky completion bash)"',
            'eval "$(sky completion zsh)"',
            "sky completion fish > ~/.config/fish/completions/sky.fish",
        ],
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), metavar="{bash,zsh,fish}", help="which shell")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    from skyward.cli.completion_scripts import script
    from skyward.cli.main import parser

    sys.stdout.write(script(arguments.shell, parser()))
    sys.stdout.flush()
    return 0
