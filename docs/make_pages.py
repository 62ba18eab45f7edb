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

_COLLECTIONS = "counter dict set queue lock event barrier"

GROUPS = {
    "Pools and calls": "ComputePool compute Compute PendingCompute PendingComputeGroup gather Stream plan sky Ref once "
    "Once History Transfer detach attach replay",
    "Where machines come from": "Local SSH AWS Join Slurm Ray Dask Kubernetes Provider Machine Offer",
    "What nodes have": "Image PipIndex Secret Spec Worker Accelerator",
    "Inside a body": "instance_info InstanceInfo is_head shard progress preempted Preemption Preempted "
    "stdout stderr silent redirect_output CallbackWriter",
    "Shared collections": f"{_COLLECTIONS} SharedCounter SharedDict SharedSet SharedQueue "
    "SharedLock SharedEvent SharedBarrier",
    "Plugins": "plugins Plugin Cluster integrations",
    "Other modules": "events errors SkywardError accelerators providers testing",
}


_POOL_EXAMPLES = """\
# Methods of a pool

What [`sky.ComputePool`](reference.md#skycomputepool) has, each with an example. The examples run in an open `pool`
of two nodes, with these functions:

```python
@sky.compute
def train(rate: float) -> float:
    return 1 / rate


@sky.compute
def look_up(table: dict[float, str], rate: float) -> str:
    return table[rate]
```
"""

_RUN = """\
### The run

What `sky.detach` and `sky.attach` return.

::: skyward.pool.run.Run

::: skyward.pool.run.RunStatus

::: skyward.node.run_files.Fetched
"""

_FUTURES = """\
## Futures

::: skyward.api.futures.AwaitableFuture
    options:
      members: false

`call > pool`, `pool.submit` and the other methods that do not wait return one. It has the methods of
`concurrent.futures.Future`: `result(timeout=None)`, `exception(timeout=None)`, `cancel()`, which also stops a body that
runs, `done()`, `running()`, `cancelled()` and `add_done_callback(fn)`. `concurrent.futures.wait` and `as_completed`
accept it.

```python
future = train(0.1) > pool
future.add_done_callback(lambda ended: print(ended.result()))
print(future.result(timeout=60), future.done())
```

## Stacks

`pool.stacks()` returns a tuple of these; printed, it reads like tracebacks.

::: skyward.api.stacks.Stack
"""

_ALL_COMMANDS = """\
`sky`, `skyward` or `python -m skyward`. `sky COMMAND --help` has what follows, and the fields of `--json`. A wrong
command or option is answered with the one that was probably meant.
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
program, 128 and the signal where one ended it). `sky COMMAND --help` says what 0 and 1 mean there.

## For programs

With `--json`, standard output has JSON and nothing else; everything for people goes to standard error. Lists
are one object per line, for `jq` (`sky doctor` and `sky exec` print one list). New fields may come;
existing ones keep their name and meaning. `null` means not known.

POOL is a pool's name, or the id that `sky history` shows.

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
    return {
        "errors.md": _errors(),
        "cli.md": _commands(),
        "reference.md": _reference(),
        "pool-methods.md": _pool_methods(),
        "comparison.md": _comparison(),
    }


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
        also = f" Also {'an' if base[0] in 'AEIO' else 'a'} `{base}`." if base else ""
        lines += [
            f"{level} `{name}`",
            "",
            f"{meaning}{also}",
            "",
            f"**Next**: {advice[name]}",
            "",
        ]
    return "\n".join(lines)


def _commands() -> str:
    """The help of every command."""
    os.environ["COLUMNS"] = "100"
    os.environ["NO_COLOR"] = "1"
    commands = parser().commands
    lines = ["# Command line", "", _ALL_COMMANDS]
    lines += [_CONVENTIONS]
    for title, names in COMMANDS.items():
        if names:
            lines += [f"## {title.capitalize()}", ""]
        if title == "detached runs":
            lines += ["[Runs that outlive this terminal](guides/detached-runs.md) explains them.", ""]
        for name in names:
            if name == "completion":
                continue
            text = _help(commands[name].format_help())
            if name != "run":
                text = re.sub(r"^the pool:\n(?: +.*\n)+", "the pool: the options of `sky run`\n", text, flags=re.M)
            lines += [f"### sky {name}", "", "```text", text, "```", ""]
    return "\n".join(lines)


def _help(text: str) -> str:
    """A command's help, without plain examples and what the page says once: --help, --json, POOL, status 0 or 1."""
    text = re.sub(r"^ +-h, --help +show this help message and exit\n", "", text, flags=re.M)
    text = re.sub(r"^ +--json +print JSON, for programs\n", "", text, flags=re.M)
    text = re.sub(r"^--json: .*(?:\n.+)*\n+", "", text, flags=re.M)
    text = re.sub(r"(; |,\s)?2\s+for\s+a\s+wrong\s+command\s+line(,\s130\s+after\s+Ctrl-C)?\.", ".", text)
    text = re.sub(r"^exit status: 0(?!.*(?:\d\d|that of))[^\n]*(?:\n.+)*\n*", "", text, flags=re.M)
    text = re.sub(r"^positional arguments:\n  POOL +its name, or the id that .*\n\n", "", text, flags=re.M)
    text = re.sub(r"^  sky \w+(?: [\w-]+)?(?: --json)?\n", "", text.rstrip() + "\n", flags=re.M)
    text = re.sub(r"\n\nexamples:\n(?=\n|\Z)", "\n", text)
    return re.sub(r"\noptions:\n(?=\n|\Z)", "", text.replace("[-h] ", "")).rstrip()


def _reference() -> str:
    """Where every public name is explained."""
    lines = [
        "# Reference",
        "",
        "Every public name, as its docstring explains it. The same text is in `help(sky.ComputePool)`.",
        "",
    ]
    for title, names in GROUPS.items():
        lines += [f"## {title}", ""]
        for name in names.split():
            value = getattr(sky, name)
            lines += [f"### `sky.{name}`", ""]
            if inspect.isroutine(value):
                lines += [f"`{_signature('sky', value)}`", ""]
            lines += [f"::: {_home(name)}", *_options(name, value), ""]
            if name == "attach":
                lines += [_RUN]
            if name == "ComputePool":
                lines += [
                    "The [methods of a pool](pool-methods.md) have a page of their own, with futures and stacks.",
                    "",
                ]
    return "\n".join(lines)


def _home(name: str) -> str:
    """The path at which mkdocstrings finds the docstring of a public name."""
    if name == "sky":
        return "skyward.api.compute.Innermost"
    if name in _COLLECTIONS.split():
        return f"skyward.node.shared.names.Collections.{name}"
    homes: dict[str, str] = sky._HOMES  # pyright: ignore[reportPrivateUsage,reportAttributeAccessIssue,reportUnknownMemberType,reportUnknownVariableType]
    return f"{homes[name]}.{name}" if name in homes else f"skyward.{name}"


def _options(name: str, value: Any) -> list[str]:
    """What differs from the options in mkdocs.yml: what only providers and pools call is left out."""
    if name == "accelerators":
        return ["    options:", "      members: [Model, resolve]"]  # sky.Accelerator has its own place
    ready_made = inspect.isclass(value) and issubclass(value, sky.Provider) and value is not sky.Provider
    return ["    options:", "      members: false"] if name in ("ComputePool", "sky") or ready_made else []


def _pool_methods() -> str:
    """The methods of a pool, which are inherited: each with its signature, docstring and example."""
    lines = [_POOL_EXAMPLES]
    for title, examples in tomllib.loads((DOCS / "pool_methods.toml").read_text()).items():
        lines += [f"## {title}", ""]
        for name, example in examples.items():
            found = inspect.getattr_static(sky.ComputePool, name, None)
            owner = "sky.ComputePool" if isinstance(found, classmethod) else "pool"
            lines += [f"### `pool.{name}`", ""]
            if found is not None and not isinstance(found, property):
                lines += [f"`{_signature(owner, getattr(sky.ComputePool, name))}`", ""]
            lines += [f"::: skyward.pool.pool.ComputePool.{name}", "", "```python", example.strip(), "```", ""]
    return "\n".join([*lines, _FUTURES])


def _signature(owner: str, function: Any) -> str:
    """A function as it is called: names, defaults and what comes back; parameters that only refuse are left out."""
    found = inspect.signature(function)
    known = [p for p in found.parameters.values() if p.name != "self" and "Never" not in str(p.annotation)]
    given = found.replace(parameters=[p.replace(annotation=p.empty) for p in known], return_annotation=found.empty)
    returned = re.sub(r"\[(Any|T|P|R|\*Ts|, )+,?\]", "", str(found.return_annotation))
    return f"{owner}.{function.__name__}{given}" + ("" if returned in ("Any", "None") else f" -> {returned}")


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
        "| what | Skyward | peer | ratio | our aim | met |",
        "|---|---:|---:|---:|---|---|",
    ]
    for group, rounds in kept["groups"].items():
        rows = importlib.import_module(group).rows(contest.Medians(rounds))
        lines += [_row(contest, row) for row in rows if not math.isnan(row.theirs)]  # else the peer took no part
    lines += [_row(contest, contest.Row(**row)) for row in kept.get("hosts", ())]  # of benchmarks/hosts.py
    page = (DOCS / "comparison.md").read_text()
    return re.sub(
        r"(<!-- rows -->\n\n).*(\n\n<!-- end of rows -->)",
        lambda at: at[1] + "\n".join(lines) + at[2],
        page,
        flags=re.S,
    )


def _row(contest: Any, row: Any) -> str:
    better = "large" if row.unit in ("/s", "") else "small"
    aim = f"at most {row.at_most:.2f}" if row.at_most else f"at least {row.at_least:.2f}" if row.at_least else better
    met = {True: "yes", False: "**no**", None: ""}[row.met]
    ratio = "" if math.isnan(row.ratio) else f"{row.ratio:.2f}"
    peer = f"{row.peer}: {contest.figure(row.theirs, row.unit)}"
    cells = (row.what, contest.figure(row.ours, row.unit), peer, ratio, aim, met)
    return f"| {' | '.join(cell.strip() for cell in cells)} |"


if __name__ == "__main__":
    for page, text in pages().items():
        if "--check" not in sys.argv:
            (DOCS / page).write_text(text)
        elif (DOCS / page).read_text() != text:
            sys.exit(f"docs/{page} is not what the code says: run `python docs/make_pages.py`")
