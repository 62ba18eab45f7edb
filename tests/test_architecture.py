"""The pages for maintainers name files, functions, limits and tests that exist; every message has a meaning."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

from skyward.node import orders, protocol
from skyward.node.shared import protocol as shared_protocol
from skyward.transport import codec

ROOT = Path(__file__).parent.parent
PAGES = {name: (ROOT / "docs" / name).read_text() for name in ("architecture.md", "a-call.md", "what-ends-what.md")}
PAGE = "\n".join(PAGES.values())
SOURCE = ROOT / "src" / "skyward"

LINKS = {
    name: link
    for name, link in (vars(protocol) | vars(orders) | vars(shared_protocol)).items()
    if inspect.isclass(link) and link.__bases__ == (codec.Direction,)
}


@pytest.mark.parametrize("link", LINKS.values(), ids=LINKS)
def test_every_message_says_what_it_means(link: type[codec.Direction]) -> None:
    for message in link.messages().values():
        assert message.__doc__, f"{message.__qualname__} does not say what it means"


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


def test_the_limits_of_what_ends_what_are_those_of_the_code() -> None:
    said = re.findall(r"([\d.]+) (?:s|times)\b[^(|;]*?[(,] ?`([\w/]+\.py): (\w+)`", PAGES["what-ends-what.md"])
    assert len(said) > 20
    for number, file, name in said:
        tree = ast.parse((SOURCE / file).read_text()).body
        found = [n.value for n in tree if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == name]
        assert found, f"{file} has no {name}"
        assert ast.literal_eval(found[0]) == float(number), f"{file}: {name} is not {number}"
