"""The command line: which commands there are, and how errors are shown."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from skyward.cli.parser import Parser, command_of, told_unknown
from skyward.errors import SkywardError

__all__ = ["COMMANDS", "main", "parser"]

COMMANDS = {
    "start": ("init", "run", "exec"),
    "look": ("ps", "top", "view", "logs", "history", "stacks"),
    "money": ("plan", "offers", "cost"),
    "machines": ("ssh", "hosts", "join", "down", "script"),
    "this computer": ("doctor", "version", "completion"),
}
"""The commands under the headings that `sky --help` has. Each is a file of this folder with the same name."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    given = list(sys.argv[1:] if argv is None else argv)
    if len(given) == 2 and given[0] == "--names":  # what the completion of a shell asks
        from skyward.cli.names import pool_names

        print("\n".join(pool_names(given[1])))
        return 0
    cut = given.index("--") if "--" in given else len(given)
    words, rest = given[:cut], given[cut + 1 :]
    name = command_of(words, [name for names in COMMANDS.values() for name in names])
    parsing = parser(name)
    if name is None:
        parsing.leave(words)
    arguments, unknown = parsing.parse_known_args(words)
    if unknown:
        parsing.commands[name].error(told_unknown(parsing, name, words, unknown, rest))
    arguments.rest = rest  # argparse would lose the place of the mark
    if rest and not getattr(arguments, "takes_rest", False):
        able = "`sky run`, `sky exec`, `sky ssh` and `sky plan`"
        parsing.error(f"only {able} take something after --, not: {' '.join(rest)}")
    try:
        return arguments.run(arguments)
    except SkywardError as exc:
        print(f"{parsing.prog}: {exc}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130  # what was open is closed
    except BrokenPipeError:
        sys.stderr.close()  # whoever read our output has gone, and Python would complain about it at exit
        return 1


def parser(only: str | None = None) -> Parser:
    """The parser of all commands, or of one: the files of the others are not imported then."""
    return Parser({title: names if only is None else [*{only} & {*names}] for title, names in COMMANDS.items()})
