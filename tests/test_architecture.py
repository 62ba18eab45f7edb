"""docs/architecture.md says what the code says: the rows of the tables, the messages, the functions that it names."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from skyward.client import call_table, node_table
from skyward.client.core import VERDICTS, Core
from skyward.client.engine import Engine
from skyward.node import agent_tables, runner_calls
from skyward.node.agent import Agent
from skyward.node.runner import Runner

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "architecture.md").read_text()
SOURCE = ROOT / "src" / "skyward"

Table = Mapping[tuple[str, str], tuple[str, tuple[str, ...]]]
TABLES: dict[str, Table] = {
    "A call on the client": call_table.CALLS,
    "A call on the agent": agent_tables.CALLS,
    "A runner process, as the agent sees it": agent_tables.SLOTS,
    "A call in the runner": runner_calls.CALLS,
    "A node": node_table.NODES,
}


def section(title: str) -> str:
    """The text under a heading, up to the next one."""
    found = re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^#+ |\Z)", PAGE, re.M | re.S)
    assert found is not None, f"architecture.md has no section {title!r}"
    return found[1]


def rows(text: str) -> list[list[str]]:
    """The cells of the tables in a text, without their heads."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    marks = [index for index, line in enumerate(lines) if re.fullmatch(r"[|\-]+", line)]
    return [row for index, row in enumerate(cells) if index not in marks and index + 1 not in marks]


def explained(text: str, title: str) -> list[str]:
    """What the list under "States:", "Events:" or "Actions:" explains."""
    found = re.search(rf"^{title}:\n\n(.*?)\n\n", text, re.M | re.S)
    assert found is not None, f"there is no list of {title.lower()}"
    return re.findall(r"^- \*\*(.+?)\*\*: \S", found[1], re.M)


@pytest.mark.parametrize("title", TABLES)
def test_the_rows_of_a_table_are_those_of_the_code(title: str) -> None:
    written = [
        ((state, event), (following, () if actions == "none" else tuple(actions.split(", "))))
        for state, event, following, actions in rows(section(title))
    ]
    assert dict(written) == dict(TABLES[title])
    assert len(written) == len(TABLES[title]), "a row is written twice"


@pytest.mark.parametrize("title", TABLES)
def test_every_state_event_and_action_of_a_table_is_explained_above_it(title: str) -> None:
    table, text = TABLES[title], section(title)
    states = {state for state, _ in table} | {following for following, _ in table.values()}
    events = {event for _, event in table}
    actions = {action for _, names in table.values() for action in names}
    for kind, expected in (("States", states), ("Events", events), ("Actions", actions)):
        names = explained(text, kind)
        assert sorted(names) == sorted(expected), f"{kind} of {title!r}"


def kinds_in(function: Callable[..., Any]) -> set[str]:
    """The message kinds that a dispatcher compares `kind` with, or matches."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
        if isinstance(node, ast.Compare) and isinstance(node.left, ast.Name) and node.left.id == "kind":
            values = [value for comparator in node.comparators for value in ast.walk(comparator)]
        elif isinstance(node, ast.match_case):
            values = list(ast.walk(node.pattern))
        else:
            continue
        found |= {value.value for value in values if isinstance(value, ast.Constant) and isinstance(value.value, str)}
    return found


def kinds_on_page(title: str) -> set[str]:
    return {kind for row in rows(section(title)) for kind in re.findall(r"`(\w+)`", row[0])}


STREAMS = kinds_in(Runner._pass_on)
HANDLERS = {name.removeprefix("_on_") for name in vars(Engine) if name.startswith("_on_")}


@pytest.mark.parametrize(
    ("title", "handled"),
    [
        ("Client to agent", kinds_in(Agent._obey) | STREAMS),
        ("Agent to client", kinds_in(Core.heed) | VERDICTS | HANDLERS),
        ("Agent to runner", kinds_in(Runner._obey) | kinds_in(Runner.serve) | STREAMS | {"init"}),
        ("Runner to agent", kinds_in(Agent._heed) | {"done", "error", "stopped"}),
    ],
)
def test_the_messages_that_are_handled_are_those_of_the_page(title: str, handled: set[str]) -> None:
    assert len(handled) > 5, "the dispatchers are written in another way now; this test must follow"
    assert kinds_on_page(title) == handled


def test_the_orders_to_a_keeper_and_to_the_fork_server_are_on_the_page() -> None:
    for file, title in (("node/keeper.py", "Client and keeper"), ("node/fork_server.py", "Agent and fork server")):
        source = (SOURCE / file).read_text()
        for name in re.findall(r'case "(\w+)"|(?:_say|_tell)\((?:agent, |known\[0\], )?\{"(\w+)"', source):
            assert f"`{''.join(name)}`" in section(title), f"{file} knows {''.join(name)!r}"


def defined_in(file: Path) -> set[str]:
    """The functions, classes, methods and constants of a file."""
    found: set[str] = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ClassDef):
            found |= {node.name} | {f"{node.name}.{m.name}" for m in node.body if isinstance(m, ast.FunctionDef)}
        elif isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def test_the_files_and_functions_that_are_named_exist() -> None:
    for name in re.findall(r"`(?!tests/)((?:\w+/)*\w+\.py)(?:`|:)", PAGE):
        assert (SOURCE / name).is_file(), f"there is no {name}"
    named = set(re.findall(r"`((?:\w+/)*\w+\.py): ([\w.]+)`", PAGE))
    assert len(named) > 80
    for file, function in sorted(named):
        assert function in defined_in(SOURCE / file), f"{file} has no {function}"
    for name in re.findall(r"`(tests/[\w/]+(?:\.py)?)`", PAGE):
        assert (ROOT / name).exists(), f"there is no {name}"


def test_the_threads_that_are_named_exist() -> None:
    source = "\n".join(file.read_text() for file in SOURCE.rglob("*.py"))
    for name in set(re.findall(r"`(skyward-[a-z]+)", PAGE)):
        assert f'"{name}"' in source or f'"{name}-' in source, f"no thread is called {name}"
