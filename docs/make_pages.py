"""Writes the pages that follow from the code: errors.md, cli.md and reference.md. `make docs` and a test run it."""

from __future__ import annotations

import inspect
import os
import re
import sys
from pathlib import Path

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


def pages() -> dict[str, str]:
    """The generated pages by name."""
    return {"errors.md": _errors(), "cli.md": _commands(), "reference.md": _reference()}


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
    for match in re.finditer(r"^([│ ]*)[├└]── (\w+)(?: \((\w+)\))? +(.+)$", inspect.getdoc(errors) or "", re.M):
        indent, name, base, advice = match.groups()
        meaning = (inspect.getdoc(getattr(errors, name)) or "").partition("\n\n")[0].replace("\n", " ")
        level = "##" if not indent.strip(" ") and not indent else "###"
        also = f" Also a `{base}`." if base and not hasattr(errors, base) else ""
        advice = advice.lstrip(". ").rstrip(".")
        lines += [
            f"{level} `{name}`",
            "",
            f"{meaning}{also}",
            "",
            f"**What to do**: {advice[0].lower()}{advice[1:]}.",
            "",
        ]
    return "\n".join(lines)


def _commands() -> str:
    """The help of every command."""
    os.environ["COLUMNS"] = "100"
    os.environ["NO_COLOR"] = "1"
    lines = ["# Command line", "", "`sky`, `skyward` or `python -m skyward`. Every command has `--help`.", ""]
    commands = parser().commands
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


if __name__ == "__main__":
    for page, text in pages().items():
        if "--check" not in sys.argv:
            (DOCS / page).write_text(text)
        elif (DOCS / page).read_text() != text:
            sys.exit(f"docs/{page} is not what the code says: run `python docs/make_pages.py`")
