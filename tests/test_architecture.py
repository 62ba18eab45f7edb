"""docs/architecture.md says what the code says: the rows of the tables, the messages, the functions that it names."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from skyward.client import call_table, node_table
from skyward.node import agent_tables, orders, protocol, runner_calls
from skyward.node.receiver import Direction
from skyward.node.shared import protocol as shared_protocol

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


LINKS = {
    re.sub(r"(?<!^)(?=[A-Z])", " ", name).capitalize(): link
    for name, link in (vars(protocol) | vars(orders) | vars(shared_protocol)).items()
    if inspect.isclass(link) and link.__bases__ == (Direction,)
}
"""The links by the headings of the page: "Client to agent" for ClientToAgent."""


def table_of(link: type[Direction]) -> str:
    """The page's table of the messages of a link."""
    lines = ["| kind | fields | meaning |", "|---|---|---|"]
    for kind, fields in link.kinds().items():
        meaning = " ".join((inspect.getdoc(getattr(link, kind)) or "").split())
        assert meaning, f"{link.__name__}.{kind} does not say what it means"
        names = ", ".join(name for name in fields if name not in ("kind", "buffers"))
        kinds = {name: protocol.VERDICTS[name] for name in link.verdicts} if kind == "verdict" else {kind: meaning}
        lines += [f"| `{name}` | {names} | {text} |" for name, text in kinds.items()]
    return "\n".join(lines)


@pytest.mark.parametrize("title", LINKS)
def test_the_messages_of_a_link_are_on_the_page(title: str) -> None:
    """`python -m tests.test_architecture` prints the tables."""
    assert table_of(LINKS[title]) in section(title)


@pytest.mark.parametrize("link", LINKS.values())
def test_a_message_is_its_kind_its_fields_and_the_number_of_its_buffers(link: type[Direction]) -> None:
    for kind, fields in link.kinds().items():
        message = getattr(link, kind)(*fields)
        expected = [*fields] if kind == "verdict" else [kind, *fields]
        assert message == (expected if fields[-1:] == ("buffers",) else [*expected, 0])


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


if __name__ == "__main__":
    for title, link in LINKS.items():
        print(f"### {title}\n\n{table_of(link)}\n")
