"""The command line: the list of commands, and how errors are shown."""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from skyward.cli.common import EXIT_CODES
from skyward.errors import SkywardError

__all__ = ["COMMANDS", "Parser", "main", "parser"]


COMMANDS = {
    "start": ("init", "run", "exec"),
    "detached runs": ("attach", "fetch", "stop"),
    "look": ("ps", "top", "view", "logs", "history", "replay", "runs", "stacks"),
    "money": ("plan", "offers", "cost"),
    "machines": ("ssh", "hosts", "join", "down", "script"),
    "this computer": ("doctor", "version", "completion"),
}


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    if "_ARGCOMPLETE" in os.environ:
        from skyward.cli.completion import complete

        complete(os.environ["COMP_LINE"])
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
    return Parser({title: names if only is None else [*{only} & {*names}] for title, names in COMMANDS.items()})


_TOP = ("-h", "--help", "--version")
_ELSEWHERE = {
    **dict.fromkeys(("kill", "close", "terminate"), "down"),
    "status": "ps",
    "ls": "ps",
}  # other tools' words


class Parser(argparse.ArgumentParser):
    def __init__(self, groups: Mapping[str, Sequence[str]]) -> None:
        from skyward import __version__

        program = _program()
        super().__init__(
            prog=program,
            usage=f"{program} COMMAND [OPTIONS]",
            epilog=f"`{program} COMMAND --help` explains a command, with examples.\n{EXIT_CODES}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.add_argument("--version", action="version", version=f"skyward {__version__}")
        adding = self.add_subparsers(
            metavar="COMMAND", required=True, help=argparse.SUPPRESS, prog=program, parser_class=_Command
        )
        self.summaries: dict[str, str] = {}
        self._adding = adding
        text = ["Compute that exists only while it is needed."]
        for title, names in groups.items():
            for name in names:
                importlib.import_module(f"skyward.cli.{name}").add(self)
            if names:
                text += ["", f"{title}:", *(f"  {name:11} {self.summaries[name]}" for name in names)]
        self.description = "\n".join(text)

    @property
    def commands(self) -> Mapping[str, argparse.ArgumentParser]:
        return self._adding.choices

    def add_parser(self, name: str, *, help: str, **options: Any) -> argparse.ArgumentParser:
        self.summaries[name] = help
        return self._adding.add_parser(name, help=help, **options)

    def leave(self, words: Sequence[str]) -> NoReturn:
        if not words:
            self.print_help(sys.stderr)
            self.exit(2)
        if words[0] in _TOP:
            self.parse_args(words[:1])
        if not words[0].startswith("-"):
            meant = _ELSEWHERE.get(words[0], words[0])
            self.error(f"there is no command {words[0]!r}{_meant(meant, self.commands)}{self._list()}")
        if len(words) > 1 and words[1] in self.commands:
            words = [words[1], words[0], *words[2:]]
            self.error(f"options go after the command: {self.prog} {' '.join(words)}")
        self.error(f"there is no option {words[0]}{_meant(words[0], _TOP)}{self._list()}")

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")

    def _list(self) -> str:
        return f" `{self.prog} --help` lists the commands."


class _Command(argparse.ArgumentParser):
    def format_usage(self) -> str:
        return self._renamed(super().format_usage())

    def format_help(self) -> str:
        return self._renamed(super().format_help())

    def error(self, message: str) -> NoReturn:
        wrong = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        super().error(message + _meant(wrong[1], re.findall(r"[\w-]+", wrong[2])).rstrip(".") if wrong else message)

    def _renamed(self, text: str) -> str:
        program = self.prog.partition(" ")[0]
        return text if program == "sky" else re.sub(r"(?m)(^  |^usage: |`|&& )sky (?=[a-z-])", rf"\1{program} ", text)


def command_of(words: Sequence[str], known: Sequence[str]) -> str | None:
    return words[0] if words and words[0] in known else None


def told_unknown(parser: Parser, name: str, words: Sequence[str], unknown: Sequence[str], rest: Sequence[str]) -> str:
    command = parser.commands[name]
    text = f"unrecognized arguments: {' '.join(unknown)}"
    options = [option for option in command._option_string_actions if option.startswith("--")]  # pyright: ignore[reportPrivateUsage] - argparse has no other list of them
    pools = [word for word in unknown if word.startswith("--") and _is_of_pools(word[2:].partition("=")[0])]
    if pools and "--nodes" in options:
        option = pools[0][2:].partition("=")[0].replace("-", "_")
        return f"{pools[0]}: set {option} in sky.toml, or in the program: sky.ComputePool({option}=...)."
    meant = next((_meant(word, options) for word in unknown if word[0] == "-" and _meant(word, options) != "."), ".")
    if meant != "." or not command.get_default("takes_rest"):
        return f"{text}{meant} `{command.prog} --help` lists the options."
    end = [parser.prog, *(word for word in words if word not in unknown), "--", *unknown, *rest]
    return f"{text}. What is not for {parser.prog} goes after --: {' '.join(end)}"


def _is_of_pools(option: str) -> bool:
    import inspect

    from skyward.pool.pool import ComputePool

    return option.replace("-", "_") in inspect.signature(ComputePool).parameters


def _meant(word: str, known: Sequence[str] | Mapping[str, object]) -> str:
    bare = {name.lstrip("-"): name for name in known}
    found = difflib.get_close_matches(word.partition("=")[0].lstrip("-"), list(bare), n=1, cutoff=0.6)
    return f". Did you mean {bare[found[0]]}?" if found else "."


def _program() -> str:
    started = os.path.basename(sys.argv[0]).removesuffix(".exe") if sys.argv else ""
    return "skyward" if started == "skyward" else "sky"
