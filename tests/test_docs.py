"""README and docs show lines that exist, and link to pages that exist."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [page for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if page.exists()]
BLOCK = re.compile(r"^(?P<indent> *)```python\n(?P<body>.*?)^(?P=indent)```", re.M | re.S)
SOURCE = re.compile(r"# from (examples/\S+)\n")
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")


def blocks(page: Path) -> list[str]:
    return [match["body"] for match in BLOCK.finditer(page.read_text())]


def quotations() -> list[tuple[Path, str, str]]:
    found = []
    for page in PAGES:
        for body in blocks(page):
            match = SOURCE.match(body)
            if match:
                found.append((page, match[1], body[match.end() :]))
    return found


def links() -> list[tuple[Path, str]]:
    found = []
    for page in PAGES:
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
        found += [(page, target) for target in LINK.findall(text)]
        found += [(page, target) for target in re.findall(r"<img[^>]*\ssrc=\"([^\"]+)\"", text)]
    return [(page, target) for page, target in found if not re.match(r"[a-z]+:", target)]


def anchors(page: Path) -> set[str]:
    """The names of a page's headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    headings = re.findall(r"^#+ +(.+?) *#*$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(
    ("page", "source", "body"),
    [pytest.param(*q, id=f"{q[0].name}-{i}") for i, q in enumerate(quotations())],
)
def test_quoted_lines_are_those_of_the_example(page: Path, source: str, body: str) -> None:
    example = ROOT / source
    assert example.is_file(), f"{page.name} quotes {source}, which does not exist"
    assert body.strip(), f"{page.name} quotes nothing of {source}"
    text = example.read_text()
    deep = [textwrap.indent(body, " " * depth) for depth in range(0, 24, 4)]  # a page shows them without indentation
    assert any(lines in text for lines in deep), f"{page.name} shows lines that {source} does not have:\n{body}"


def test_code_that_is_copied_from_a_page_can_be_pasted() -> None:
    for page in PAGES:
        for body in blocks(page):
            lines = body.partition("\n")[2] if SOURCE.match(body) else body
            if page.name == "write-a-provider.md":  # methods of the class that its first block begins
                continue
            assert lines == textwrap.dedent(lines), f"{page.name} has indented code:\n{body}"


@pytest.mark.parametrize(
    ("page", "target"), [pytest.param(*pair, id=f"{pair[0].name}-{pair[1]}") for pair in sorted(set(links()))]
)
def test_links_lead_somewhere(page: Path, target: str) -> None:
    path, _, anchor = target.partition("#")
    found = (ROOT / path.lstrip("/") if path.startswith("/") else page.parent / path) if path else page
    assert found.exists(), f"{page.name} links to {target}"
    if anchor and found.suffix == ".md":
        assert anchor in anchors(found), f"{found.name} has no heading {anchor}"


def test_every_guide_quotes_its_example() -> None:
    quoted = {page for page, _, _ in quotations()}
    guides = set((ROOT / "docs" / "guides").glob("*.md"))
    assert guides <= quoted
