"""What commands share."""

from __future__ import annotations

import argparse
import codecs
import json
import shutil
import sys
import textwrap
import traceback
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, is_dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyward.errors import InvalidArgument, SkywardError
from skyward.machines.ledger import state_dir, usable
from skyward.transport.private import is_locked

if TYPE_CHECKING:
    from skyward.api.plugin import Plugin
    from skyward.history.store import Entry
    from skyward.pool.pool import ComputePool
    from skyward.pool.run import Run
    from skyward.setup.checks.findings import Finding

__all__ = [
    "EXIT_CODES",
    "add_command",
    "add_json",
    "add_pool_options",
    "chosen",
    "in_bytes",
    "kept_up",
    "make_pool",
    "pool_names",
    "print_findings",
    "print_json",
    "print_pieces",
    "show_error",
    "table",
]


EXIT_CODES = "exit status: 0 if all went well, 1 if not, 2 for a wrong command line, 130 after Ctrl-C."


def add_command(
    commands: Any,
    name: str,
    summary: str,
    description: str,
    examples: Sequence[str],
    codes: str = EXIT_CODES,
    shape: str = "",
) -> argparse.ArgumentParser:
    width = min(100, shutil.get_terminal_size().columns - 2)
    lines = "\n".join(f"  {example}" for example in examples)
    shape = textwrap.fill(f"--json: {shape}", width) + "\n\n" if shape else ""
    return commands.add_parser(
        name,
        help=summary,
        description=textwrap.fill(description, width),
        epilog=f"examples:\n{lines}\n\n{shape}{textwrap.fill(codes, width)}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def add_pool_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the pool")
    group.add_argument("--pool", metavar="NAME", help="a pool of sky.toml or pyproject.toml (default: the default one)")
    group.add_argument("--config", metavar="FILE", help="another file with settings")
    group.add_argument("--provider", metavar="KIND", help="aws, local, ssh, ...: where machines come from")
    group.add_argument(
        "--host", action="append", default=[], metavar="HOST", help="a host to log in to by ssh (repeat)"
    )
    group.add_argument("--nodes", type=int, metavar="N", help="how many nodes")
    group.add_argument("--accelerator", metavar="NAME", help='what each node has, such as A100 or "H100:8"')
    group.add_argument("--pip", action="append", default=[], metavar="PACKAGE", help="a package for the nodes (repeat)")
    group.add_argument("--plugin", action="append", default=[], metavar="NAME", help="torch, jax, ... (repeat)")
    group.add_argument("--budget", type=float, metavar="DOLLARS", help="what the pool may cost in all")
    group.add_argument("--console", choices=("auto", "live", "plain", "silent"), help="what is shown of the pool")
    parser.set_defaults(error=parser.error)


def make_pool(arguments: argparse.Namespace) -> ComputePool:
    from skyward import extensions
    from skyward.pool.pool import ComputePool
    from skyward.pool.settings import find_settings

    options: dict[str, Any] = {"nodes": arguments.nodes, "accelerator": arguments.accelerator}
    options["console"], options["budget"] = arguments.console, arguments.budget
    if arguments.host:
        from skyward.providers.ssh import SSH

        options["provider"] = SSH(hosts=arguments.host)
    elif arguments.provider:
        kinds = {name.lower(): point for name, point in extensions.found("providers").items()}
        if arguments.provider.lower() not in kinds:
            arguments.error(f"--provider {arguments.provider}: there are {', '.join(sorted(kinds))}.")
        if arguments.provider.lower() == "ssh":
            arguments.error("--provider ssh: name the hosts instead, --host gpu1 --host gpu2.")
        options["provider"] = kinds[arguments.provider.lower()].load()()
    if arguments.plugin:
        options["plugins"] = [_plugin(name, arguments) for name in arguments.plugin]
    options = {name: value for name, value in options.items() if value is not None}
    described = arguments.provider or arguments.host
    if arguments.pool or arguments.config or (not described and find_settings() is not None):
        pool = ComputePool.from_config(arguments.pool, path=arguments.config, **options)
        if not arguments.pip:
            return pool
        options["image"] = pool.image.adding(pip=arguments.pip)
        return ComputePool.from_config(arguments.pool, path=arguments.config, **options)
    if arguments.pip:
        from skyward.api.image import Image

        options["image"] = Image(pip=arguments.pip)
    return ComputePool(**options)


def _plugin(name: str, arguments: argparse.Namespace) -> Plugin:
    from skyward import extensions, plugins

    known = sorted({*plugins.__all__, *extensions.found("plugins")})
    if name not in known:
        arguments.error(f"--plugin {name}: there are {', '.join(known)}.")
    try:
        return getattr(plugins, name)()
    except TypeError as exc:
        why = str(exc).rstrip(".")
        return arguments.error(
            f"--plugin {name}: {why}. Give the plugin in sky.toml, or in the program, with its arguments."
        )


def table(rows: Sequence[Sequence[str]], right: Container[str] = ()) -> list[str]:
    sizes = [max(map(len, column)) for column in zip(*rows, strict=True)]
    ends = [">" if name in right else "<" for name in rows[0]]
    return [
        "  ".join(f"{text:{end}{size}}" for text, end, size in zip(row, ends, sizes, strict=True)).rstrip()
        for row in rows
    ]


def in_bytes(size: float) -> str:
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


def print_json(value: object) -> None:
    print(json.dumps(value, default=_plain, allow_nan=False))


def print_findings(found: Sequence[Finding]) -> None:
    wide = max(len(each.host) for each in found)
    for each in found:
        host = f"{each.host:{wide}}  " if wide else ""
        print(f"{each.state:7}  {host}{each.what:9}  {each.text}{f'. {each.do}' if each.do else ''}")


def _plain(value: object) -> object:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return str(value)


def copy_histories(pool: str) -> None:
    """Those of a detached run of this name, if it is on another machine."""
    from skyward.history import runs
    from skyward.pool.run_record import KIND

    if any(run.name == pool for run in runs.runs(KIND)):
        from skyward.pool.run import Run

        Run(pool).copy_histories()


def kept_up(entry: Entry) -> AbstractContextManager[None]:
    """While it is shown, a history that another machine writes grows here, too."""
    from skyward.pool.run_history import repeated

    return nullcontext() if entry.away is None else repeated(partial(copy_histories, entry.away["run"]))


def chosen(name: str | None) -> Entry:
    from skyward.history.store import entries, find  # the completion of a shell needs neither

    if name is not None:
        try:
            copy_histories(name)
        except (SkywardError, OSError):
            with suppress(InvalidArgument):  # as it was last seen
                return find(name)
            raise
        return find(name)
    known = entries()
    if not known:
        raise InvalidArgument(
            "there is no history of a pool on this computer: none was opened in the last thirty days."
        )
    return next((entry for entry in known if entry.running), known[0])


def print_pieces(found: Run, pieces: Iterable[bytes], seen: int | None = None) -> None:
    """Of a detached run's output; with `seen` it remembers how much of it was printed."""
    text = codecs.getincrementaldecoder(sys.stdout.encoding or "utf-8")("replace")
    for piece in pieces:
        if sys.stdout is sys.__stdout__:
            sys.stdout.buffer.write(piece)
        else:
            sys.stdout.write(text.decode(piece))  # above the live view
        sys.stdout.flush()
        if seen is not None:
            seen += len(piece)
            found.seen = max(found.seen, seen)


def show_error(exc: Exception, path: str) -> None:
    left = exc.__traceback__
    while left is not None and left.tb_frame.f_code.co_filename != path:
        left = left.tb_next
    if left is None and not isinstance(exc, SyntaxError):  # a program that is not a Python has no frames
        left = exc.__traceback__
    traceback.print_exception(type(exc), exc, left)


_RUNNING = ("top", "stacks", "ssh", "down")
_MOST = 200  # folders that are looked at
_NEWEST = 10


def pool_names(command: str) -> list[str]:
    found = [*_with_history(running=command in _RUNNING), *(_with_ledger() if command == "down" else ())]
    names = [name for name in dict.fromkeys(found) if usable(name)]
    return names if command == "down" else names[:_NEWEST]


def _with_ledger() -> list[str]:
    return sorted(path.name for path in _entries(state_dir() / "pools"))


def _with_history(running: bool) -> Iterator[str]:
    folders = sorted(_entries(state_dir() / "history"), key=lambda path: path.name.split("-")[-3:-1], reverse=True)
    for folder in folders[:_MOST]:
        pool, *stamp = folder.name.rsplit("-", 3)  # its date, its time, and letters by chance
        if len(stamp) == 3 and (not running or is_locked(folder / "events.jsonl")):
            yield pool


def _entries(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if not path.name.startswith(".")]
    except OSError:
        return []
