"""Writes the pages that follow from the code, and the table of measured rows. `make docs` and a test run it.

errors.md, cli.md and reference.md are made as a whole; in comparison.md the table between its marks is.
"""

from __future__ import annotations

import importlib
import inspect
import json
import math
import os
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import skyward as sky
from skyward import errors
from skyward.cli.main import COMMANDS, parser

DOCS = Path(__file__).parent

GROUPS = {
    "Pools and calls": "ComputePool compute Compute PendingCompute PendingComputeGroup gather Stream plan sky Ref once "
    "Once History Transfer",
    "Where machines come from": "Local SSH AWS Join Slurm Ray Dask Provider Machine Offer",
    "What nodes have": "Image PipIndex Secret Spec Worker Accelerator",
    "Inside a body": "instance_info InstanceInfo is_head shard progress preempted Preemption Preempted "
    "stdout stderr silent redirect_output CallbackWriter",
    "Shared collections": "counter dict set queue lock event barrier SharedCounter SharedDict SharedSet SharedQueue "
    "SharedLock SharedEvent SharedBarrier",
    "Plugins": "plugins Plugin Cluster integrations",
    "Other modules": "events errors SkywardError accelerators",
}


_ALL_COMMANDS = """\
`sky`, `skyward` or `python -m skyward`. Every command has `--help`, with examples. A wrong command or option is
answered with the one that was probably meant.
"""

_CONVENTIONS = """\
## Exit status

| status | meaning |
|---|---|
| 0 | all went well |
| 1 | something did not; the last line on standard error says what, why, and what to do |
| 2 | the command line is wrong: nothing was done |
| 130 | ended by Ctrl-C; what was open is closed |

`sky run` ends with the status of the program, `sky exec` with the highest of all nodes (127 where there is no such
program, 128 and the signal where one ended it). The help of each command says what its status means.

## For programs

`--json` prints JSON on standard output and nothing else there; what is for people goes to standard error. Lists
are one object a line, so that `jq` and a loop over lines read them (`sky doctor` and `sky exec` print one list).
The help of each command names the fields. New ones may come; those that are there keep their name and meaning.
`null` is what is not known.

## Completion

Commands, options, files and names of pools, completed by the tab key:

| shell | once |
|---|---|
| bash | `eval "$(sky completion bash)"` in `~/.bashrc` |
| zsh | `eval "$(sky completion zsh)"` in `~/.zshrc`, below `compinit` |
| fish | `sky completion fish > ~/.config/fish/completions/sky.fish` |

## Colours

Skyward's own colours are there on a terminal only. `NO_COLOR=1` turns them off everywhere, also in the live view
and in what bodies print. `FORCE_COLOR=1` keeps the colours of bodies when `sky logs` writes to a pipe.
"""


def pages() -> dict[str, str]:
    """The generated pages by name."""
    return {"errors.md": _errors(), "cli.md": _commands(), "reference.md": _reference(), "comparison.md": _comparison()}


def _errors() -> str:
    """Every error with what it means and what to do, in the order of the tree."""
    lines = [
        "# Errors",
        "",
        "Every error of Skyward's own, with what it means and what to do next. They are in `sky.errors`, and all are",
        "`sky.SkywardError`. Exceptions that your functions raise are never wrapped: they keep their type and carry",
        "the remote traceback in a note.",
        "",
    ]
    advice = tomllib.loads((DOCS / "next_steps.toml").read_text())
    for match in re.finditer(r"^([│ ]*)[├└]── (\w+)(?: \((\w+)\))? +.+$", inspect.getdoc(errors) or "", re.M):
        indent, name, base = match.groups()
        meaning = (inspect.getdoc(getattr(errors, name)) or "").partition("\n\n")[0].replace("\n", " ")
        level = "##" if not indent.strip(" ") and not indent else "###"
        also = f" Also {'an' if base[0] in 'AEIO' else 'a'} `{base}`." if base and not hasattr(errors, base) else ""
        lines += [
            f"{level} `{name}`",
            "",
            f"{meaning}{also}",
            "",
            f"**What to do**: {advice[name]}",
            "",
        ]
    return "\n".join(lines)


def _commands() -> str:
    """The help of every command."""
    os.environ["COLUMNS"] = "100"
    os.environ["NO_COLOR"] = "1"
    commands = parser().commands
    lines = ["# Command line", "", _ALL_COMMANDS]
    for title, names in COMMANDS.items():
        if names:
            lines += [f"**{title.capitalize()}**", ""]
            lines += [f"- [`sky {name}`](#sky-{name}): {parser(name).summaries[name]}" for name in names] + [""]
    lines += [_CONVENTIONS]
    for title, names in COMMANDS.items():
        if names:
            lines += [f"## {title.capitalize()}", ""]
        for name in names:
            lines += [f"### sky {name}", "", "```text", commands[name].format_help().rstrip(), "```", ""]
    return "\n".join(lines)


def _reference() -> str:
    """Where every public name is explained."""
    lines = [
        "# Reference",
        "",
        "Every public name, as its docstring explains it. The same text is in `help(sky.ComputePool)`.",
        "",
    ]
    homes: dict[str, str] = sky._HOMES  # pyright: ignore[reportPrivateUsage,reportAttributeAccessIssue,reportUnknownMemberType,reportUnknownVariableType]
    for title, names in GROUPS.items():
        lines += [f"## {title}", ""]
        for name in names.split():
            if not hasattr(sky, name):
                continue
            path = f"{homes[name]}.{name}" if name in homes else f"skyward.{name}"
            lines += [f"### `sky.{name}`", "", f"::: {path}", ""]
    return "\n".join(lines)


def _comparison() -> str:
    """The comparison, with the rows that `make bench` has printed for benchmarks/figures.json."""
    folder = DOCS.parent / "benchmarks"
    kept = json.loads((folder / "figures.json").read_text())
    sys.path.insert(0, str(folder))
    contest: Any = importlib.import_module("contest")
    date, machine, versions = kept["about"].split("\n")
    lines = [
        f"The run of {date}: {machine}; {versions}.",
        "",
        "| what | Skyward | peer | ratio | good is | our aim | met |",
        "|---|---:|---:|---:|---|---|---|",
    ]
    for group, rounds in kept["groups"].items():
        lines += [_row(contest, row) for row in importlib.import_module(group).rows(contest.Medians(rounds))]
    page = (DOCS / "comparison.md").read_text()
    return re.sub(
        r"(<!-- rows -->\n\n).*(\n\n<!-- end of rows -->)",
        lambda at: at[1] + "\n".join(lines) + at[2],
        page,
        flags=re.S,
    )


def _row(contest: Any, row: Any) -> str:
    better = "large" if row.unit in ("/s", "") else "small"
    aim = f"at most {row.at_most:.2f}" if row.at_most else f"at least {row.at_least:.2f}" if row.at_least else "none"
    met = {True: "yes", False: "**no**", None: ""}[row.met]
    ratio = "" if math.isnan(row.ratio) else f"{row.ratio:.2f}"
    peer = f"{row.peer}: {contest.figure(row.theirs, row.unit)}"
    cells = (row.what, contest.figure(row.ours, row.unit), peer, ratio, better, aim, met)
    return f"| {' | '.join(cell.strip() for cell in cells)} |"


if __name__ == "__main__":
    for page, text in pages().items():
        if "--check" not in sys.argv:
            (DOCS / page).write_text(text)
        elif (DOCS / page).read_text() != text:
            sys.exit(f"docs/{page} is not what the code says: run `python docs/make_pages.py`")
